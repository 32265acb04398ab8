# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvdisk.blocks import make_block_key
from kvdisk.errors import ConfigError
from kvdisk.manager.admission import AdmitReused, make_admission

KEY, OTHER, THIRD = (make_block_key(name, 0) for name in (b"a", b"b", b"c"))


def test_one_request_counts_once():
    policy = AdmitReused(2)
    for _ in range(5):
        policy.want(KEY, "request")
    assert (policy.count(KEY), policy.admits(KEY)) == (1, False)
    policy.want(KEY, "another")
    assert policy.admits(KEY)
    assert not policy.admits(OTHER)
    policy.reset()
    assert not policy.admits(KEY)


def test_the_least_recently_wanted_is_forgotten():
    policy = AdmitReused(1, capacity=2)
    policy.want(KEY, "1")
    policy.want(OTHER, "1")
    policy.want(KEY, "2")
    policy.want(THIRD, "1")
    assert [policy.admits(key) for key in (KEY, OTHER, THIRD)] == [True, False, True]


def test_names():
    assert make_admission("all").admits(KEY)
    assert not make_admission("reuse(2)").admits(KEY)
    with pytest.raises(ConfigError, match="reuse"):
        make_admission("adaptive")
