# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler, with the workers' threads and a real S3 server: what hosts share that
have nothing but a bucket in common. Every byte that is read is compared."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench, Engines, prompt_of

from kvdisk.blocks import group_of
from kvdisk.messages import JobKind

RANKS, BLOCKS = 2, 9
PROMPT = prompt_of(1, BLOCKS * BLOCK_TOKENS + 5)
STATES: dict[str, Any] = {"state_tokens": BLOCK_TOKENS, "num_blocks": 256, "max_batched_tokens": BLOCK_TOKENS}
"""vLLM has a state only where a step ends: here at each block's end."""
KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "attention": ({}, [BLOCKS, 0]),
    "states": (STATES, [BLOCKS, 1]),
    "states alone": (STATES | {"state_only": True}, [1, 0]),
}
"""Groups, and how many blocks of each a hit of all the prompt's blocks brings."""


def loaded(bench: Bench, name: str) -> list[int]:
    """Return how many blocks of each group the loads of a request bring."""
    keys = [move.key for job in bench.jobs_of(JobKind.LOAD, name) for move in job.moves]
    return [sum(group_of(key) == group for key in keys) for group in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_request_of_one_host_hits_what_another_has_computed(engines: Engines, s3_server, tmp_path, kind):
    """Both have a store of their own, and two ranks. A third has one: that is another namespace."""
    engine, blocks = KINDS[kind]
    shared = {
        "remote": f"s3://kvdisk-tests/{secrets.token_hex(8)}",
        "remote_options": s3_server.options,
        "remote_admission": "all",
        "remote_deadline_s": 60,
        "prefetch": False,
        "nvme_bytes": "64MiB",
        "segment_bytes": "1MiB",
    }

    def host(name: str, ranks: int = RANKS) -> Bench:
        extra = shared | {"store_dirs": str(tmp_path / name)}
        return engines.make(threaded=True, ranks=ranks, extra=extra, **engine)

    one = host("one")
    one.serve("a", PROMPT)
    one.finish()
    assert one.counters()["sent_blocks"] == len(one.stored()) >= sum(blocks)
    engines.close()
    two = host("two")
    two.serve("b", PROMPT)
    assert loaded(two, "b") == blocks
    assert two.counters()["hit_tokens.remote"] == BLOCKS * BLOCK_TOKENS
    assert two.sampled("b") == one.sampled("a")
    assert not {name for name in two.counters() if name.startswith(("failed", "verification", "remote_rejects"))}
    engines.close()
    other = host("three", ranks=1)
    other.serve("c", PROMPT)
    assert other.loads() == [] and other.counters()["remote_questions"] == 1
    assert other.sampled("c") == one.sampled("a")
