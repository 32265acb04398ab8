# SPDX-License-Identifier: Apache-2.0
"""Measure what a large store costs: opening it, RAM of a block, lookups, other homes, a rebuild, the index over churn.

An index of ``--blocks`` blocks with sha256 keys, in chains of 100, is built in a fresh directory below ``--dir`` and
closed cleanly. Each opening is a process of its own: the time is that of reading the file's sum (after a clean end)
or of the child that reads the index first (after a kill), of ``LmdbIndex`` and of ``NvmeSpace.restore``. The RAM is
what the process's resident memory has grown by, after freed memory was given back, divided by the blocks. Other homes
are asked through a ``NeighbourReader``. A pause is that of a full collection of garbage, beside the same in a
process without a store. A rebuild reads headers of slots of 64 KiB, past the system's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from measure_neighbours import AskedHome
from measure_rebuild import HomeOfHeaders, quiet

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.config import EVICTIONS, Config
from kvdisk.device.paths import sum_of_file
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.admission import AdmitAll
from kvdisk.manager.lookup import longest_hit
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout

CHAIN_BLOCKS = 100
SEGMENT_SLOTS = 4096
CALL_BLOCKS = 500
LOOKED_UP = 2000
PROMPTS = 20
STEPS, EVICTED = 50, 64
FLUSH_S = 600.0
PARTS = ("open", "neighbours", "rebuild", "churn")
GEOMETRY = Geometry((GroupGeometry(0, 16, 65536 - 4096),), 1, 16)


def key_of(number: int) -> BlockKey:
    """Return a key like those of sha256 hashes."""
    return make_block_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def record_of(number: int, slot: int) -> BlockRecord:
    """Return a block's record; each chain's blocks follow each other."""
    parent = key_of(number - 1) if number % CHAIN_BLOCKS else None
    place = Slot(slot // SEGMENT_SLOTS, slot % SEGMENT_SLOTS)
    return BlockRecord(0, key_of(number), place, 10**18 + number, parent, 1_700_000_000 + number // 500)


def open_index(path: Path, block_count: int) -> LmdbIndex:
    """Open the index with as large a map as the assembly would give it."""
    return LmdbIndex(path, map_bytes=map_bytes_for(block_count), commit_s=0.01)


def put_all(index: LmdbIndex, numbers: range, slot_count: int) -> None:
    """Commit the records of these blocks."""
    for start in range(numbers.start, numbers.stop, CALL_BLOCKS):
        call = range(start, min(start + CALL_BLOCKS, numbers.stop))
        while index.put([record_of(number, number % slot_count) for number in call]) is None:
            assert index.flush(FLUSH_S)
    assert index.flush(FLUSH_S)


def build(path: Path, block_count: int) -> None:
    """Make the index, and close it cleanly."""
    index = open_index(path, block_count)
    for segment in range(-(-block_count // SEGMENT_SLOTS)):
        index.put_segment(SegmentRecord(segment, GEOMETRY.slot_sizes[0], SEGMENT_SLOTS))
    put_all(index, range(block_count), block_count)
    index.close()


def churn(path: Path, block_count: int, replaced: int, cycles: int) -> list[int]:
    """Replace so many blocks in each cycle, the oldest by new ones; return the file's allocated bytes after each."""
    index = open_index(path, block_count)
    sizes = [allocated_bytes(path)]
    for cycle in range(cycles):
        for start in range(cycle * replaced, (cycle + 1) * replaced, CALL_BLOCKS):
            call = range(start, min(start + CALL_BLOCKS, (cycle + 1) * replaced))
            index.delete([(0, key_of(number)) for number in call])
            put_all(index, range(call.start + block_count, call.stop + block_count), block_count)
        sizes.append(allocated_bytes(path))
    index.close()
    return sizes


def allocated_bytes(path: Path) -> int:
    """Return what the index's file takes on the drive."""
    return (path / "data.mdb").stat().st_blocks * 512


def resident_bytes() -> int:
    """Return this process's anonymous resident memory, when freed memory was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def pause_s() -> float:
    """Return the processor time of a full collection of garbage, the second one: nothing else runs meanwhile."""
    gc.collect()
    start_s = time.process_time()
    gc.collect()
    return time.process_time() - start_s


def measure_opening(path: Path, block_count: int, eviction: str, after_kill: bool) -> dict[str, float]:
    """Open the store in this process, and look blocks up: each alone, and by prompts of LOOKED_UP as a request is."""
    prompts = [
        [key_of(first + number) for number in range(LOOKED_UP)]
        for first in range(0, block_count - LOOKED_UP + 1, block_count // PROMPTS)
    ]
    empty_pause_s = pause_s()
    layout = NvmeLayout(0, (SEGMENT_SLOTS,), (1 << 62,))
    if after_kill:
        (path / "open").touch()
    before = resident_bytes()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    if not after_kill:
        sum_of_file(path / "data.mdb")
    index = open_index(path, block_count)
    config = Config(store_dirs=(path,), nvme_bytes=1, eviction=eviction)
    parts = Parts.make(config, GEOMETRY, None)  # nobody asks the engine
    catalog, nvme = parts.catalog, NvmeSpace(parts, layout, index, AdmitAll())
    nvme.restore("0" * 32, bytes(32))
    open_s, open_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    assert len(catalog) == block_count
    grown = resident_bytes() - before
    pause = pause_s() - empty_pause_s
    steps = [step_s(nvme, now=1.0 + number) for number in range(STEPS)]
    times, hits = [], []
    for at, prompt in enumerate(prompts):
        if at % 2:
            for key in prompt:
                start_s = time.perf_counter()
                ready = catalog.is_ready(catalog.find(key))
                times.append(time.perf_counter() - start_s)
                assert ready
        else:
            tokens = LOOKED_UP * GEOMETRY.groups[0].block_tokens
            start_s = time.perf_counter()
            found = longest_hit(catalog, GEOMETRY, [prompt], 0, tokens, coming=False)
            hits.append((time.perf_counter() - start_s) / LOOKED_UP)
            assert found == tokens
    index.close()
    return {
        "open_s": open_s,
        "open_cpu_s": open_cpu_s,
        "ram_bytes": grown / block_count,
        "pause_ms": 1e3 * pause,
        "step_us": 1e6 * statistics.median(steps),
        "lookup_us": 1e6 * statistics.median(times),
        "hit_us": 1e6 * statistics.median(hits),
    }


def step_s(nvme: NvmeSpace, now: float) -> float:
    """Return how long a step of the tier takes in which nothing is to be stored."""
    start_s = time.perf_counter()
    nvme.refresh(now, int(now))
    nvme.make_room(now, [0])
    return time.perf_counter() - start_s


class GivenIndex(MemoryIndex):
    """An index that gives columns and keeps nothing: what the scheduler holds of a store, without the drive."""

    def __init__(self, block_count: int) -> None:
        super().__init__()
        self._count = block_count

    def segments(self) -> Iterator[SegmentRecord]:
        """Return full segments."""
        count = -(-self._count // SEGMENT_SLOTS)
        return (SegmentRecord(segment, GEOMETRY.slot_sizes[0], SEGMENT_SLOTS) for segment in range(count))

    def block_columns(self) -> BlockColumns:
        """Return blocks as ``record_of`` makes them; keys ascend."""
        keys = [key_of(number) for number in range(self._count)]
        order = np.array(sorted(range(self._count), key=keys.__getitem__))
        chained = order % CHAIN_BLOCKS > 0
        parents = b"".join(keys[number - 1] for number in order[chained])
        return BlockColumns(
            np.zeros(self._count, np.uint64),
            [keys[number] for number in order],
            (order // SEGMENT_SLOTS).astype(np.uint32),
            (order % SEGMENT_SLOTS).astype(np.uint32),
            (order + 10**18).astype(np.uint64),
            parents,
            np.where(chained, len(keys[0]), 0),
            (1_700_000_000 + order // 500).astype(np.uint32),
        )

    def delete(self, names: Sequence[tuple[int, BlockKey]]) -> int:  # noqa: ARG002
        """Return a ticket that no commit waits for."""
        return 0


def measure_pauses(block_count: int, eviction: str) -> dict[str, float]:
    """Fill a tier without a drive, and evict from it as a step does; return processor times of steps and pauses."""
    before, empty = resident_bytes(), pause_s()
    config = Config(store_dirs=("/nowhere",), nvme_bytes=1, eviction=eviction)
    parts = Parts.make(config, GEOMETRY, None)  # nobody asks the engine
    nvme = NvmeSpace(parts, NvmeLayout(0, (SEGMENT_SLOTS,), (1 << 62,)), GivenIndex(block_count), AdmitAll())
    start_s = time.process_time()
    nvme.restore("0" * 32, bytes(32))
    filled_s = time.process_time() - start_s
    assert len(parts.catalog) == block_count
    grown, pause = resident_bytes() - before, pause_s() - empty
    steps = []
    for number in range(PROMPTS):
        start_s = time.process_time()
        nvme.refresh(1.0 + number, 1_800_000_000)
        nvme._evict(0, EVICTED)
        steps.append(time.process_time() - start_s)
    hits = []
    for first in range(0, block_count - LOOKED_UP + 1, block_count // PROMPTS):
        prompt = [key_of(first + number) for number in range(LOOKED_UP)]
        start_s = time.process_time()
        longest_hit(parts.catalog, GEOMETRY, [prompt], 0, LOOKED_UP * GEOMETRY.groups[0].block_tokens, coming=False)
        hits.append(time.process_time() - start_s)
    return {
        "filled_s": filled_s,
        "pause_ms": 1e3 * pause,
        "ram_bytes": grown / block_count,
        "evict_us": 1e6 * statistics.median(steps) / EVICTED,
        "hit_us": 1e6 * statistics.median(hits) / LOOKED_UP,
    }


def in_a_child(path: Path, block_count: int, eviction: str, *, after_kill: bool) -> dict[str, float]:
    """Measure one opening in a fresh process."""
    command = [sys.executable, __file__, "--open", str(path), "--blocks", str(block_count), "--eviction", eviction]
    command += ["--after-kill"] * after_kill
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def say(what: str, values: Sequence[float], digits: int = 2) -> None:
    """Print median, lowest and highest."""
    middle, lowest, highest = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    load = os.getloadavg()[0]
    print(f"{what}: median {middle}, lowest {lowest}, highest {highest} of {len(values)} (load {load:.1f})", flush=True)


def show_openings(path: Path, block_count: int, eviction: str, rounds: int) -> None:
    """Measure openings after both ends, and lookups."""
    for after_kill, end in ((False, "a clean end"), (True, "a kill")):
        found = [in_a_child(path, block_count, eviction, after_kill=after_kill) for _ in range(rounds)]
        say(f"open after {end}, s", [one["open_s"] for one in found])
        say(f"open after {end}, s of processor time, without the child", [one["open_cpu_s"] for one in found])
        say("RAM of a block, bytes", [one["ram_bytes"] for one in found], 0)
        say("full collection of garbage, ms more than without a store", [one["pause_ms"] for one in found])
        say("a step of the NVMe tier, us (median of each)", [one["step_us"] for one in found], 1)
        say(
            "lookup of an own block, one call of find and is_ready, us (median of each)",
            [f["lookup_us"] for f in found],
        )
        say(f"lookup of an own block, by prompts of {LOOKED_UP:,} blocks, us", [f["hit_us"] for f in found])


def show_neighbours(path: Path, block_count: int, rounds: int) -> None:
    """Measure questions of LOOKED_UP keys, at random places, to this index as another home's."""
    batches = [
        [key_of((at * LOOKED_UP + step) * 7919 % block_count) for step in range(LOOKED_UP)] for at in range(rounds)
    ]
    with contextlib.closing(AskedHome(path)) as home:
        say("other home: first answer, index not in memory, with the start of the child, ms",
            [1e3 * home.ask(batches[0]).answer_s], 1)  # fmt: skip
        cold = [home.ask(batch) for batch in batches[1:]]
        warm = [home.ask(batch) for batch in batches]
    say(f"other home: answer to {LOOKED_UP:,} keys not asked for before, ms", [1e3 * one.answer_s for one in cold], 1)
    say("other home: answer to the same again, ms", [1e3 * one.answer_s for one in warm], 1)
    say("other home: the call of ask on the scheduler's thread, us", [1e6 * one.ask_s for one in cold + warm], 1)
    polls = [1e6 * poll_s for one in cold + warm for poll_s in one.polls_s]
    say("other home: a call of poll on the scheduler's thread, us", polls, 1)


def show_rebuild(directory: Path, header_count: int, rounds: int) -> None:
    """Measure a rebuild of a home of one rank with so many headers, each in the drive and not in memory."""
    quiet()
    home = HomeOfHeaders(directory / "store", GEOMETRY, -(-header_count // SEGMENT_SLOTS), SEGMENT_SLOTS, names_of)
    with contextlib.closing(home):
        found, alone = zip(*[(home.rebuild(), home.read_alone()) for _ in range(rounds)], strict=True)
    say(f"rebuild of {home.block_count:,} blocks, us a header", [wall for wall, _ in found])
    say("rebuild, us of processor time a header", [cpu for _, cpu in found])
    say("reading these headers and no more, us a header", [wall for wall, _ in alone])
    say("reading these headers and no more, us of processor time a header", [cpu for _, cpu in alone])


def names_of(number: int) -> tuple[BlockKey, BlockKey | None]:
    """Return a block's key and its parent's."""
    return key_of(number), record_of(number, 0).parent


def show_churn(path: Path, block_count: int, cycles: int) -> None:
    """Measure the index's file over cycles of replacements."""
    replaced = min(100_000, block_count)
    sizes = churn(path, block_count, replaced, cycles)
    listed = ", ".join(f"{size / 2**20:.2f}" for size in sizes)
    print(f"index file of {block_count:,} blocks, MiB: at first and after each {replaced:,} replacements: {listed}")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the index may lie")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--headers", type=int, default=100_000, help="of the rebuild; 64 KiB of the drive for each")
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks and headers")
    parser.add_argument("--eviction", choices=EVICTIONS, default=Config().eviction)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--memory", action="store_true", help="only what the scheduler holds, without a drive")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--after-kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(measure_pauses(options.blocks, options.eviction)))
        return
    if options.open:
        print(json.dumps(measure_opening(options.open, options.blocks, options.eviction, options.after_kill)))
        return
    share = 10 if options.quick else 1
    block_count, header_count = options.blocks // share, options.headers // share
    print(f"{block_count:,} blocks, eviction {options.eviction}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        path = Path(directory) / "index"
        if set(options.parts) - {"rebuild"}:
            build(path, block_count)
        if "open" in options.parts:
            show_openings(path, block_count, options.eviction, options.rounds)
        if "neighbours" in options.parts:
            show_neighbours(path, block_count, options.rounds)
        if "rebuild" in options.parts:
            show_rebuild(Path(directory), header_count, options.rounds)
        if "churn" in options.parts:
            small = min(100_000, block_count)
            if small < block_count:
                build(Path(directory) / "small", small)
                show_churn(Path(directory) / "small", small, options.cycles)
            show_churn(path, block_count, options.cycles)


if __name__ == "__main__":
    main()
