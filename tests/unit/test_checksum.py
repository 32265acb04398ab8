# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvdisk.device.checksum import multilinear_digest

PATTERN = bytes(at * 7 % 251 for at in range(251)) * 2200
DIGESTS = {
    0: "4b80d4e79a47c912c5311ef26d55f2b0",
    4096: "a3378101ba6b2d2e88908cf94aac6dae",
    4097: "391b74d75bc7776288908cf94aac6df4",
    131 * 4096 + 77: "a466f52ec4b21c773736ebea4d523fa1",
}
"""Of the pattern's first bytes, by the formula of docs/STORE.md in plain integers. Slots on drives
have such: no change of the code may change them."""


def test_it_stays_what_it_is_on_drives_at_any_address():
    for length, digest in DIGESTS.items():
        assert multilinear_digest(memoryview(PATTERN[:length])).hex() == digest
        assert multilinear_digest(memoryview(b"x" + PATTERN[:length])[1:]).hex() == digest
