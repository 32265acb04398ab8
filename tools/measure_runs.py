# SPDX-License-Identifier: Apache-2.0
"""How long the runs of neighbouring slots are in which a request's blocks lie on the drive, after long churn.

    PYTHONPATH=tests python tools/measure_runs.py conversation_trace.jsonl
    PYTHONPATH=tests python tools/measure_runs.py --pool

Replays a trace of prompts through a real ``TierManager`` without bytes: every job ends well at once. The NVMe tier is
full for most of the replay. What counts is what a load reads: a run is what the mover merges into one transfer.
A trace has one JSON object a line, whose ``hash_ids`` are the parts of a prompt in order, ``--split`` blocks each.
``--pool`` measures instead what the pool's allocation costs the scheduler, in a fragmented pool.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.fake_pool import FakePool

from kvdisk.blocks import Slot, Tier
from kvdisk.config import EVICTIONS, Config
from kvdisk.geometry import Geometry, GroupGeometry, segment_charge_bytes, slots_per_segment
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.admission import make_admission
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.segments import NvmeLayout
from kvdisk.manager.store_policy import make_store_policy
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import Job, JobKind, JobResult, Report

TOKENS = 16
STEP_S = 0.05


@dataclass
class Request:
    """A prompt on its way. ``computed``: its blocks that are on the GPU; ``loading``: a load of so many is out."""

    id: str
    hashes: list[bytes]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    looked_up: bool = False


class Churn:
    """An engine that stores every block and loads every hit, and has no prefix cache of its own."""

    def __init__(self, options: argparse.Namespace, eviction: str, most_blocks: int) -> None:
        geometry = Geometry((GroupGeometry(0, TOKENS, (options.block_kib << 10)),), 1, TOKENS)
        config = Config(
            store_dirs=(Path("/nowhere"),),
            nvme_bytes=1,
            cpu_bytes=1,
            eviction=eviction,
            prefetch=False,
            min_load_tokens=1,
            nvme_admission=options.admission,
        )
        size = geometry.slot_sizes[0]
        per_segment = slots_per_segment(min(options.segment_mib << 20, most_blocks * size // 4), size)
        charge = segment_charge_bytes(size, per_segment)
        layout = NvmeLayout(0, (per_segment,), (max(4, most_blocks // per_segment) * charge,))
        self.index = MemoryIndex()
        cpu_slots = max(64, most_blocks // options.cpu_share)
        self.pool = FakePool(options.gpu_blocks, lambda _: None)
        parts = Parts.make(config, geometry, self.pool)
        cpu = CpuSpace(parts, (cpu_slots,), make_admission("all", cpu_slots))
        admission = make_admission(options.admission, layout.most_slots(geometry))
        self.nvme = NvmeSpace(parts, layout, self.index, admission)
        self.nvme.restore("0" * 32, bytes(32))
        self.manager = TierManager(parts, cpu, self.nvme, make_store_policy("on_compute"), first_generation=1)
        self.step_blocks = options.step_blocks
        self.most_running = options.running
        self.now = 0.0
        self.reads: list[tuple[int, int]] = []
        """Blocks and runs of each load from the drive."""
        self.writes: list[tuple[int, int]] = []
        self.was_full = False

    def serve(self, requests: Iterable[Request]) -> None:
        """Serve all, ``most_running`` at a time, each ``step_blocks`` a step."""
        running: list[Request] = []
        waiting = iter(requests)
        more = True
        while more or running:
            while more and len(running) < self.most_running:
                request = next(waiting, None)
                more = request is not None
                if request is not None:
                    self.manager.new_request(request.id, request.hashes, len(request.hashes) * TOKENS + 1)
                    running.append(request)
            self._step(running)
            for request in [request for request in running if request.computed == len(request.hashes)]:
                self.manager.request_finished(request.id)
                self.pool.free_blocks(request.table)
                running.remove(request)

    def _step(self, running: Sequence[Request]) -> None:
        self.now += STEP_S
        for request in running:
            if not request.looked_up and not self._load(request):
                continue
            count = min(self.step_blocks, len(request.hashes) - request.computed)
            self._grow(request, request.computed + count)
            request.computed += count
            tokens = request.computed * TOKENS
            if self.manager.may_offer(request.id, tokens):
                self.manager.plan_store(request.id, tokens, [request.table], self.now)
        plan = self.manager.take_plan(self.now, idle=False)
        for job in plan.jobs:
            if job.kind is JobKind.LOAD and any(Tier.NVME in move.slots for move in job.moves):
                self.reads.append(count_runs(job))
            elif job.kind is JobKind.DEMOTE:
                self.writes.append(count_runs(job))
        self.manager.settle(Report({job.id: JobResult(1) for job in plan.jobs}), self.now, int(self.now))
        self.index.flush(1.0)
        self.was_full = self.was_full or self.manager.stats["evicted_blocks.nvme"] > 0

    def _load(self, request: Request) -> bool:
        """Look a request up and load what is there; False: ask again in the next step."""
        answer = self.manager.lookup(request.id, 0, len(request.hashes) * TOKENS + 1, self.now)
        if answer is None:
            return False
        request.looked_up = True
        self._grow(request, answer // TOKENS)
        if answer:
            self.manager.plan_load(request.id, 0, answer, [request.table])
            request.computed = answer // TOKENS
        return True

    def _grow(self, request: Request, blocks: int) -> None:
        request.table += self.pool.take(blocks - len(request.table))


def count_runs(job: Job) -> tuple[int, int]:
    """Return how many blocks a job moves from or to the drive, and in how many runs."""
    places = sorted(move.slots[Tier.NVME] for move in job.moves if Tier.NVME in move.slots)
    after = {Slot(place.segment, place.index + 1) for place in places}
    return len(places), sum(place not in after for place in places)


def read_trace(path: Path, split: int, most: int | None) -> list[Request]:
    """Return the requests of a trace."""
    requests = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number == most:
                break
            ids = json.loads(line)["hash_ids"]
            hashes = [(part * split + at).to_bytes(32, "big") for part in ids for at in range(split)]
            requests.append(Request(str(number), hashes))
    return requests


def measure_trace(options: argparse.Namespace) -> None:
    """Replay, and print what the later half of the loads read."""
    distinct = len(
        {h for request in read_trace(options.trace, options.split, options.requests) for h in request.hashes}
    )
    print(f"{distinct} distinct blocks of {options.block_kib} KiB, {options.running} requests at a time")
    print(f"{'room':>6} {'eviction':9} {'loads':>6} {'blocks':>7} {'read run':>9} {'MiB':>6} {'write run':>10}")
    for percent in options.percent:
        for eviction in options.evictions:
            churn = Churn(options, eviction, distinct * percent // 100)
            began_s = time.perf_counter()
            churn.serve(read_trace(options.trace, options.split, options.requests))
            took_s = time.perf_counter() - began_s
            assert churn.was_full, "the tier was never full"
            reads, writes = (found[len(found) // 2 :] for found in (churn.reads, churn.writes))
            blocks, runs = (sum(column) for column in zip(*reads, strict=True))
            write_run = sum(count for count, _ in writes) / sum(count for _, count in writes)
            mean = blocks / runs
            print(
                f"{percent:4} % {eviction:9} {len(reads):6} {blocks // len(reads):7} {mean:9.1f} "
                f"{mean * options.block_kib / 1024:6.1f} {write_run:10.1f}   ({took_s:.0f} s)",
                flush=True,
            )


def fragmented_pool(slots: int, per_segment: int, free_share: float) -> SlotPool:
    """Return a pool with so much of it free, in holes of 1 to 8 slots."""
    rng = random.Random(0)  # noqa: S311 - reproducible, not secret
    pool = SlotPool(1)
    for segment in range(slots // per_segment):
        pool.add_segment(segment, 0, per_segment)
    held = pool.allocate(0, slots)
    at = 0
    freed: list[Slot] = []
    while at < len(held):
        hole = rng.randint(1, 8)
        freed += held[at : at + hole]
        at += hole + int(hole * 2 * rng.random() * (1 - free_share) / free_share) + 1
    pool.release(freed)
    return pool


def measure_pool(options: argparse.Namespace) -> None:
    """Time ``SlotPool.allocate`` as the scheduler would call it, each time giving the slots back elsewhere."""
    print(f"{'slots':>8} {'a segment':>9} {'free':>6} {'wanted':>6} {'median us':>10} {'worst us':>9} {'mean run':>9}")
    for per_segment in (512, 4096, 65536):
        for free_share in (0.01, 0.1):
            for wanted in (1, 64, 512):
                pool = fragmented_pool(options.slots, per_segment, free_share)
                times, runs, held = [], 0, []
                for _ in range(50):
                    began_s = time.perf_counter()
                    taken = pool.allocate(0, wanted)
                    times.append((time.perf_counter() - began_s) * 1e6)
                    after = {Slot(segment, index + 1) for segment, index in taken}
                    runs += sum(slot not in after for slot in taken)
                    held.append(taken)
                moved = sum(map(len, held))
                print(
                    f"{options.slots:8} {per_segment:9} {pool.free[0] + moved:6} {wanted:6} "
                    f"{statistics.median(times):10.1f} {max(times):9.1f} {moved / runs:9.1f}",
                    flush=True,
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--pool", action="store_true", help="time the pool's allocation")
    parser.add_argument("--slots", type=int, default=1 << 20, help="of the pool")
    parser.add_argument("--percent", type=int, nargs="+", default=(5, 25), help="room, of the distinct blocks")
    parser.add_argument("--evictions", nargs="+", default=EVICTIONS, choices=EVICTIONS)
    parser.add_argument("--admission", default="all")
    parser.add_argument("--requests", type=int, help="only the first so many of the trace")
    parser.add_argument("--split", type=int, default=4, help="blocks of a part of the trace")
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--segment-mib", type=int, default=1024)
    parser.add_argument("--cpu-share", type=int, default=10, help="the CPU tier is this part of the NVMe tier")
    parser.add_argument("--running", type=int, default=8, help="requests at a time")
    parser.add_argument("--step-blocks", type=int, default=32, help="of each request, in a step")
    parser.add_argument("--gpu-blocks", type=int, default=20000)
    options = parser.parse_args()
    if options.pool:
        measure_pool(options)
    elif options.trace is None:
        parser.error("a trace is needed, or --pool")
    else:
        measure_trace(options)


if __name__ == "__main__":
    sys.exit(main())
