# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for loads of others that bring its blocks to the GPU."""

from __future__ import annotations

from types import SimpleNamespace

from tier_bench import TierBench

from kvdisk.manager.catalog import READY

PROMPT = "aabbccddx"


def test_of_two_loads_that_hang_a_request_waits_for_each_once():
    """Which of them brings the next block changes with what the GPU has by then."""
    bench = TierBench((8,), min_load_tokens=0)
    bench.serve(PROMPT)
    loader = [1]
    bench.manager._lookups._gpu_loads = SimpleNamespace(
        any=True,
        changes=0,
        is_out=lambda load: load is not None,
        presences=lambda keys: bytes([READY]) * len(keys),
        loader_of=lambda _: loader[0],
    )
    hashes = [PROMPT[:end].encode() for end in range(2, len(PROMPT) + 1, 2)]
    bench.manager.new_request("waits", hashes, len(PROMPT), bench.now)
    wait_s = bench.parts.manager._lookups._config.lookup_wait_s
    answers = []
    for turn in range(8):
        loader[0] = 1 + turn % 2
        answers.append(bench.manager.lookup("waits", 0, len(PROMPT), bench.now + 1.25 * wait_s * turn))
    assert answers == [None, None, 8, 8, 8, 8, 8, 8], "the engine need not take what it is promised"
