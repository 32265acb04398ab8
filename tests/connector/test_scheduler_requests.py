# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: requests that are left alone or kept apart, and lookups that wait for the neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedulers import BLOCK_TOKENS, Bench
from support.fake_neighbours import FakeHome, FakeNeighbours
from vllm.lora.request import LoRARequest

from kvdisk import assembly
from kvdisk.blocks import Tier, make_block_key
from kvdisk.index.base import SegmentRecord
from kvdisk.messages import FOREIGN_SEGMENTS, Job, JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))


def _jobs(bench: Bench, kind: JobKind) -> list[Job]:
    return [job for job in bench.jobs if job.kind is kind]


def _forget_gpu(bench: Bench) -> None:
    assert bench.scheduler.reset_prefix_cache()


# -- adapters and salts ----------------------------------------------------------------------------


def test_a_request_with_an_adapter_is_left_alone(tmp_path: Path) -> None:
    """vLLM's hash names the adapter and its path. Retrained under both, it would find the KV of the old one."""
    bench = Bench(tmp_path / "model")
    for name in ("before", "after"):  # it is retrained
        adapter = LoRARequest("tuned", 1, "/adapters/tuned")
        bench.add(name, PROMPT, lora_request=adapter)
        bench.run()
        assert len(bench.tokens[name]) == 2, "it is served"
        _forget_gpu(bench)
    assert bench.jobs == []
    assert bench.counters() == {}
    # The base model is not hindered by it, nor does it leave anything to it.
    bench.add("base", PROMPT)
    bench.run()
    assert len(_jobs(bench, JobKind.STORE)[0].moves) == BLOCKS
    _forget_gpu(bench)
    bench.add("later", PROMPT, lora_request=LoRARequest("tuned", 1, "/adapters/tuned"))
    bench.run()
    assert [job.kind for job in bench.jobs] == [JobKind.STORE], "the one of the base model"


def test_an_adapter_among_others_is_preempted_and_aborted_in_peace(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", num_blocks=12)
    adapter = LoRARequest("tuned", 1, "/adapters/tuned")
    requests = [
        bench.add(name, [token + at for token in PROMPT], max_tokens=150, lora_request=adapter if at % 2 else None)
        for at, name in enumerate("abcd")
    ]
    for _ in range(20):
        bench.step()
    bench.abort("b")
    bench.run(steps=1500)
    assert [len(bench.tokens[name]) for name in "acd"] == [150] * 3
    assert sum(request.num_preemptions for request in requests) > 0
    touched = {move.key for job in bench.jobs for move in job.moves}
    for at, request in enumerate(requests):
        keys = {make_block_key(block_hash, 0) for block_hash in request.block_hashes}
        assert bool(keys & touched) == (at % 2 == 0), request.request_id
    assert all(block.ref_cnt == 0 for block in bench.pool.blocks[1:])


def test_salts_have_keys_of_their_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model")
    salts = (None, "one", "two")
    for salt in salts:
        bench.add(f"first {salt}", PROMPT, cache_salt=salt)
        bench.run()
        assert not _jobs(bench, JobKind.LOAD), "nothing of another tenant"
        _forget_gpu(bench)
    stored = [{move.key for move in job.moves} for job in _jobs(bench, JobKind.STORE)]
    assert [len(keys) for keys in stored] == [BLOCKS] * 3
    assert len(set.union(*stored)) == 3 * BLOCKS, "not one block is shared"
    for salt in salts:
        bench.add(f"again {salt}", PROMPT, cache_salt=salt)
        bench.run()
        _forget_gpu(bench)
    assert [{move.key for move in job.moves} for job in _jobs(bench, JobKind.LOAD)] == stored


# -- the neighbours' answer ------------------------------------------------------------------------


class Neighbourhood:
    """A bench with a store, and one other home in it that answers when it is told to."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch, **extra: object) -> None:
        self.home = FakeHome("a" * 32, SegmentRecord(0, 0, 64))
        self.neighbours = FakeNeighbours([self.home])
        patch.setattr(assembly, "_meet_neighbours", lambda *_: self.neighbours)
        model = tmp_path / "model"
        model.mkdir()
        (model / "weights.bin").write_bytes(b"a store needs weights that have an identity")
        store = {"store_dirs": str(tmp_path / "store"), "nvme_bytes": "64MiB", "segment_bytes": "1MiB"}
        self.bench = Bench(model, extra=store | extra)
        (slot_bytes,) = self.bench.connector.scheduler._geometry.slot_sizes
        self.home.segment = SegmentRecord(0, slot_bytes, 64)

    def asked(self, name: str, elsewhere: int = BLOCKS) -> list[bytes]:
        """Add a request whose first blocks the other home has; return their keys."""
        request = self.bench.add(name, PROMPT)
        keys = [make_block_key(block_hash, 0) for block_hash in request.block_hashes]
        for slot, key in enumerate(keys[:elsewhere]):
            self.home.put(key, slot, 7 + slot, [])
        return list(keys[:elsewhere])

    def run(self) -> None:
        """Step until nothing is left to do, waiting for the index's commits."""
        for _ in range(60):
            if not self.bench.scheduler.has_requests():
                return
            self.bench.step()
            assert self.bench.connector.scheduler._parts.index.flush(600.0)
        raise AssertionError("still busy")

    def close(self) -> None:
        self.bench.connector.shutdown()


def test_a_request_waits_for_the_neighbours_and_gets_their_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Neighbourhood(tmp_path, monkeypatch, lookup_wait_s=600.0)
    bench = place.bench
    keys = place.asked("a")
    request = bench.scheduler.requests["a"]
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (None, False), "no answer yet"
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens
    place.neighbours.answer()
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (BLOCKS * BLOCK_TOKENS, True)
    place.run()
    (load,) = _jobs(bench, JobKind.LOAD)
    assert [move.key for move in load.moves] == keys
    assert [move.generation for move in load.moves] == [7, 8, 9, 10]
    assert all(move.slots[Tier.NVME].segment >= FOREIGN_SEGMENTS for move in load.moves)
    assert bench.counters()["loaded_blocks_foreign"] == BLOCKS
    assert bench.counters().get("demoted_blocks", 0) == 0, "what another home has is not written again"
    place.close()


def test_the_wait_for_the_neighbours_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Neighbourhood(tmp_path, monkeypatch, lookup_wait_s=0)
    bench = place.bench
    place.asked("a")
    assert bench.step().num_scheduled_tokens == {"a": len(PROMPT)}, "computed: nobody answered"
    assert bench.counters()["wait_timeouts"] == 1
    # The answer comes late, and is of use to the next request.
    place.neighbours.answer()
    place.run()
    _forget_gpu(bench)
    place.close()


def test_what_the_neighbours_do_not_have_is_computed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Neighbourhood(tmp_path, monkeypatch, lookup_wait_s=600.0)
    bench = place.bench
    place.asked("a", elsewhere=0)
    assert not bench.step().num_scheduled_tokens
    place.neighbours.answer()
    assert bench.step().num_scheduled_tokens == {"a": len(PROMPT)}
    place.run()
    assert bench.counters()["demoted_blocks"] == BLOCKS
    # Now it is this engine's own: no question is asked, and nobody is waited for.
    _forget_gpu(bench)
    bench.add("b", PROMPT)
    assert place.neighbours.waiting == 0
    place.run()
    assert len(_jobs(bench, JobKind.LOAD)[0].moves) == BLOCKS
    place.close()


def test_a_request_goes_on_where_the_other_home_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Neighbourhood(tmp_path, monkeypatch, lookup_wait_s=600.0)
    bench = place.bench
    place.asked("a")
    assert not bench.step().num_scheduled_tokens
    place.neighbours.homes.clear()
    assert bench.step().num_scheduled_tokens == {"a": len(PROMPT)}, "there is nobody left to wait for"
    place.run()
    place.close()
