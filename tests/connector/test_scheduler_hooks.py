# SPDX-License-Identifier: Apache-2.0
"""Hook sequences on vLLM's real scheduler: no model runner, workers that answer when told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schedulers import BLOCK_TOKENS, Bench

from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 4 * BLOCK_TOKENS + 5))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "model")


def _references(bench: Bench) -> list[int]:
    return [block.ref_cnt for block in bench.pool.blocks[1:]]


def _forget_gpu(bench: Bench) -> None:
    assert bench.scheduler.reset_prefix_cache()


def _jobs(bench: Bench, kind: JobKind) -> list:
    return [job for job in bench.jobs if job.kind is kind]


def test_blocks_of_a_prompt_are_stored_once_and_given_back(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    (store,) = _jobs(bench, JobKind.STORE)
    assert len(store.moves) == 4, "the full blocks of the prompt, without the partial tail"
    assert [move.parent for move in store.moves] == [None] + [move.key for move in store.moves[:-1]]
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)
    assert bench.counters()["stored_blocks"] == 4


def test_a_copy_holds_no_block(bench: Bench) -> None:
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    assert len(bench.held) == 1 and not bench.scheduler.running
    assert not any(block.ref_cnt for block in bench.pool.blocks[1:])
    assert bench.connector.has_pending_push_work()
    assert bench.scheduler.reset_prefix_cache(), "nothing stands against it"
    bench.release()
    bench.run()
    assert not bench.connector.has_pending_push_work()


def test_a_stored_prefix_is_loaded_asynchronously(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.hold = {JobKind.LOAD}
    bench.add("b", PROMPT)
    output = bench.step()
    (load,) = bench.held
    assert load.request_id == "b"
    assert "b" not in output.num_scheduled_tokens
    assert len(load.moves) == 4
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens, "the request waits for its blocks"
    bench.release()
    bench.step()
    assert bench.step().num_scheduled_tokens == {"b": 5}
    bench.run()
    assert bench.counters()["hit_tokens.cpu"] == 4 * BLOCK_TOKENS
    assert len(_jobs(bench, JobKind.STORE)) == 1, "what is stored is not stored again"


def test_an_engine_may_count_with_numbers_of_numpy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    connector, seen = bench.connector, []
    matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    build = connector.build_connector_meta

    def build_connector_meta(output: Any) -> Any:
        scheduled = {request_id: np.int64(count) for request_id, count in output.num_scheduled_tokens.items()}
        seen.extend(scheduled)
        return build(dataclasses.replace(output, num_scheduled_tokens=scheduled))

    monkeypatch.setattr(
        connector, "get_num_new_matched_tokens", lambda request, tokens: matched(request, np.int64(tokens))
    )
    monkeypatch.setattr(
        connector,
        "update_state_after_alloc",
        lambda request, blocks, tokens: allocated(request, blocks, np.int64(tokens)),
    )
    monkeypatch.setattr(connector, "build_connector_meta", build_connector_meta)
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.add("b", PROMPT)
    bench.run()
    assert {"a", "b"} == {*seen}
    assert bench.counters()["loaded_blocks"] == bench.counters()["stored_blocks"] == 4


def test_local_and_external_hits_add_up(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.add("b", PROMPT[: 2 * BLOCK_TOKENS + 1])
    bench.run()  # loads two blocks, which are on the GPU now
    bench.add("c", PROMPT)
    bench.run()
    first, second = _jobs(bench, JobKind.LOAD)
    assert [len(first.moves), len(second.moves)] == [2, 2]
    stored = [move.key for move in _jobs(bench, JobKind.STORE)[0].moves]
    assert [move.key for move in second.moves] == stored[2:]


@pytest.mark.parametrize("blocks", [1, 4])
def test_one_token_of_an_exact_multiple_is_left_to_compute(bench: Bench, blocks: int) -> None:
    prompt = PROMPT[: blocks * BLOCK_TOKENS]
    bench.add("a", prompt)
    bench.run()
    _forget_gpu(bench)
    bench.add("b", prompt)
    bench.run()
    loaded = sum(len(job.moves) for job in _jobs(bench, JobKind.LOAD))
    assert loaded == blocks - 1


def test_a_failed_block_is_recomputed_and_never_promised_again(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.fail = {JobKind.LOAD: (2,)}
    bench.add("b", PROMPT)
    scheduled = [bench.step().num_scheduled_tokens.get("b", 0) for _ in range(8)]
    assert sum(scheduled[:2]) == 2 * BLOCK_TOKENS + 5, "from the first failed block on"
    bench.run()
    assert len(_jobs(bench, JobKind.LOAD)) == 1
    assert bench.counters()["failed_loads"] == 1
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)


def test_a_bad_first_block_is_no_livelock(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.fail = {JobKind.LOAD: (0,)}
    bench.add("b", PROMPT)
    bench.run(steps=20)
    assert len(_jobs(bench, JobKind.LOAD)) == 1
    assert len(bench.tokens["b"]) == 2
    # The bad copy is gone, the recomputed block was stored in its place, and serves the next request.
    bench.fail = {}
    _forget_gpu(bench)
    bench.add("c", PROMPT)
    bench.run()
    assert len(_jobs(bench, JobKind.LOAD)[-1].moves) == 4


def test_with_several_groups_the_whole_request_is_recomputed(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", window_tokens=2 * BLOCK_TOKENS)
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.fail = {JobKind.LOAD: (3,)}
    bench.add("b", PROMPT)
    bench.step()
    bench.fail = {}
    bench.run()
    assert len(bench.tokens["b"]) == 2
    # The position that failed is not promised again; what lies before it is.
    first, second = _jobs(bench, JobKind.LOAD)
    assert first.moves[3].key not in {move.key for move in second.moves}
    assert len(second.moves) == 3 + 2
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)


def test_a_window_group_loads_its_window_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", window_tokens=BLOCK_TOKENS + 1)
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.add("b", PROMPT)
    bench.run()
    (load,) = _jobs(bench, JobKind.LOAD)
    groups = [int.from_bytes(move.key[-2:], "big") for move in load.moves]
    assert groups == [0, 0, 0, 0, 1], "four full blocks, and the one block that the window reaches"
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)


def test_an_abort_while_loading_frees_the_blocks_when_the_load_ended(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.hold = {JobKind.LOAD}
    bench.add("b", PROMPT)
    bench.step()
    bench.abort("b")
    bench.step()
    assert any(block.ref_cnt for block in bench.pool.blocks[1:]), "the load may still write its blocks"
    bench.release()
    bench.run()
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)
    assert "b" not in bench.scheduler.requests


def test_an_aborted_failed_load_is_settled_too(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    _forget_gpu(bench)
    bench.hold, bench.fail = {JobKind.LOAD}, {JobKind.LOAD: (0, 1)}
    bench.add("b", PROMPT)
    bench.step()
    bench.abort("b")
    bench.release()
    bench.run()
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)


def test_a_request_waits_for_a_block_that_is_being_stored(bench: Bench) -> None:
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    # The GPU forgets the prefix (its blocks are re-used by others), while the store is on its way.
    for block in bench.pool.blocks[1:]:
        bench.pool._maybe_evict_cached_block(block)
    bench.add("b", PROMPT)
    assert not bench.step().num_scheduled_tokens, "asked to wait"
    bench.release()
    bench.run()
    assert len(_jobs(bench, JobKind.LOAD)) == 1
    assert bench.counters()["lookup_waits"] >= 1


def test_the_wait_is_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", extra={"lookup_wait_s": 0})
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    for block in bench.pool.blocks[1:]:
        bench.pool._maybe_evict_cached_block(block)
    bench.add("b", PROMPT)
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}
    bench.release()
    bench.run()


def test_preempted_requests_come_back_through_their_stored_blocks(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", num_blocks=12)
    requests = [bench.add(name, [token + at for token in PROMPT], max_tokens=150) for at, name in enumerate("abcd")]
    bench.run(steps=1500)
    assert [len(bench.tokens[name]) for name in "abcd"] == [150] * 4
    assert sum(request.num_preemptions for request in requests) > 0
    victims = {request.request_id for request in requests if request.num_preemptions}
    assert victims & {job.request_id for job in _jobs(bench, JobKind.LOAD)}
    assert _references(bench) == [0] * (len(bench.pool.blocks) - 1)


def test_a_job_counts_when_every_rank_has_answered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = bench.connector.scheduler._manager._transfers
    monkeypatch.setattr(transfers, "_rank_count", 2)
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    assert len(transfers) == 1, "one rank has answered, the other has not"
    assert bench.counters().get("stored_blocks", 0) == 0


def test_a_reset_serves_nothing_from_before(bench: Bench) -> None:
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache(reset_connector=True)
    bench.add("b", PROMPT)
    bench.run()
    assert not _jobs(bench, JobKind.LOAD)
    assert len(_jobs(bench, JobKind.STORE)) == 2


def test_a_reset_with_a_store_in_flight_leaves_no_copy(bench: Bench) -> None:
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    bench.scheduler.reset_connector_cache()
    bench.release()
    bench.run()
    _forget_gpu(bench)
    bench.add("b", PROMPT)
    bench.run()
    assert not _jobs(bench, JobKind.LOAD)


def test_keep_on_reset_keeps(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "model", extra={"on_reset": "keep"})
    bench.add("a", PROMPT)
    bench.run()
    assert bench.scheduler.reset_prefix_cache(reset_connector=True)
    bench.add("b", PROMPT)
    bench.run()
    assert len(_jobs(bench, JobKind.LOAD)) == 1


def test_the_policy_is_set_to_recompute(bench: Bench) -> None:
    assert bench.scheduler.recompute_kv_load_failures
    assert not bench.connector.requires_kv_delivery


def test_without_the_block_pool_nothing_starts(bench: Bench) -> None:
    from kvdisk.config import Config
    from kvdisk.connector.scheduler_side import SchedulerSide
    from kvdisk.errors import ConfigError

    side = SchedulerSide(Config(), bench.scheduler.vllm_config, bench.scheduler.kv_cache_config)
    with pytest.raises(ConfigError, match="block pool"):
        side.bind_pool(object())
    with pytest.raises(ConfigError, match="block pool"):
        side.has_pending_work()
