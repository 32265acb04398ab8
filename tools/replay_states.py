# SPDX-License-Identifier: Apache-2.0
"""What a store hits of a model with recurrent state, on a trace: three groups of states in slots as
large as the attention's blocks, and the state at each prompt's last whole block, as vLLM hands them
off with a ``prefix_cache_retention_interval`` of 0. NVMe alone.

    python tools/replay_states.py trace.jsonl --block-tokens 512 --room 2 --room 5
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvdisk.blocks import Tier, group_of, make_block_key
from kvdisk.cli.replay.engine import STEP_TOKENS, Engine, GpuPool
from kvdisk.cli.replay.tiers import Setting, make_manager, parse_capacity
from kvdisk.cli.replay.trace import Trace, TracedRequest, read_trace
from kvdisk.context import HandedState
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.messages import JobKind

GROUPS = (1, 2, 3)
POLICIES = (("lru", "all"), ("learned", "learned"))


class StateEngine(Engine):
    """As ``Engine``; a hit ends where there is a state."""

    def serve(self, number: int, request: TracedRequest) -> None:
        """Take a request's whole blocks from its arrival to its end."""
        manager, pool, size = self.manager, self._pool, self._block_tokens
        self._now = max(self._now, request.time_s - self._trace.requests[0].time_s)
        count, request_id = request.tokens // size, f"request {number}"
        if not count:
            return
        manager.new_request(request_id, request.hashes[:count], count * size + 1, self._now)
        while (tokens := manager.lookup(request_id, 0, count * size + 1, self._now)) is None:
            self._step(idle=True)
        blocks, states = pool.take(count), pool.take(len(GROUPS))
        done = tokens // size
        if tokens:
            manager.plan_load(request_id, 0, tokens, [blocks[:done], *([0] * (done - 1) + [state] for state in states)])
            while not any(job.kind is JobKind.LOAD and not job.more for job in self._step(idle=True).jobs):
                pass
            self.hit_tokens[Tier.NVME] += tokens
        while True:
            first, done = done, min(count, done + self._step_blocks)
            if manager.note_scheduled(request_id, done * size):
                tables = [blocks[:done], *[[0] * done] * len(GROUPS)]
                manager.plan_store(request_id, done * size, tables, self._now)
            if first < done == count:
                for group, state in zip(GROUPS, states, strict=True):
                    pool.get_block(state).key = make_block_key(request.hashes[count - 1], group)
                handed = [HandedState(group, state, count * size) for group, state in zip(GROUPS, states, strict=True)]
                manager.plan_states(request_id, handed, self._now)
            self._step((done - first) * size)
            if done == count:
                break
        manager.request_finished(request_id)
        for state in states:
            pool.get_block(state).key = None
        pool.free_blocks([*blocks, *states])
        self.settle()


def replay(trace: Trace, room: int, eviction: str, admission: str) -> tuple[float, int, float]:
    """Return the hits' share of tokens, blocks written, and the states' share of what is held."""
    size = trace.block_tokens
    groups = [GroupGeometry(0, size, 1), *(GroupGeometry(at, size, 1, 2, state_tokens=size) for at in GROUPS)]
    geometry, step_blocks = Geometry(tuple(groups), 1, size), max(1, STEP_TOKENS // size)
    nvme = parse_capacity("--room", str(room), trace, geometry, on_nvme=True)
    none = parse_capacity("--cpu", "0", trace, geometry, on_nvme=False)
    pool = GpuPool(2 * trace.longest + step_blocks + 40, step_blocks, caches=False)
    setting = Setting(eviction, "all", admission, "on_compute", none, nvme, 0)
    engine = StateEngine(trace, make_manager(setting, geometry, pool), pool)
    engine.settle()
    for number, request in enumerate(trace.requests):
        engine.serve(number, request)
    held = [group_of(key) in GROUPS for key in engine.manager._catalog.ready_keys(Tier.NVME)]
    return sum(engine.hit_tokens.values()) / trace.tokens, engine.written, sum(held) / max(1, len(held))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--block-tokens", type=int)
    parser.add_argument("--room", type=float, action="append", help="percent of the distinct blocks and states")
    options = parser.parse_args()
    trace = read_trace(options.trace, block_tokens=options.block_tokens)
    ends = {request.hashes[count - 1] for request in trace.requests if (count := request.tokens // trace.block_tokens)}
    for room in options.room or (1, 5, 10, 25):
        for eviction, admission in POLICIES:
            slots = int((trace.distinct + len(GROUPS) * len(ends)) * room / 100)
            hits, written, states = replay(trace, slots, eviction, admission)
            print(f"{room:g} %  {eviction}, {admission}: hits {hits:.2%}, written {written:,}, states {states:.0%}")


if __name__ == "__main__":
    main()
