# SPDX-License-Identifier: Apache-2.0
"""Measure what a large store costs: opening it, RAM of a block, lookups, a rebuild.

An index of ``--blocks`` blocks with sha256 keys, in chains of 100, is built in a fresh directory
below ``--dir`` and closed cleanly. Each opening is a process of its own: the time is that of
reading the file's sum (after a clean end), of ``LmdbIndex`` and of ``NvmeSpace.restore``. The RAM
is what the process's resident memory has grown by, after freed memory was given back, divided by
the blocks. A pause is that of a full collection of garbage, beside the same in a process without a
store. ``--memory`` measures the same without a drive. A rebuild reads headers of slots of 64 KiB,
past the system's memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import logging
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.config import Config
from kvdisk.device.header import SlotIdentity, fill_header
from kvdisk.device.home import Home
from kvdisk.device.paths import sum_of_file
from kvdisk.device.segment import create_segment
from kvdisk.device.store import Store
from kvdisk.engine_store import describe_geometry
from kvdisk.geometry import HEADER_BYTES, Geometry, GroupGeometry, Namespace, slot_offset
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.index.record_index import Index
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.prefix_match import Lookups
from kvdisk.manager.segments import NvmeLayout
from kvdisk.messages import SegmentSpec
from kvdisk.recovery import rebuild_index

CHAIN_BLOCKS = 100
SEGMENT_SLOTS = 4096
CALL_BLOCKS = 500
LOOKED_UP = 2000
PROMPTS = 20
STEPS = 50
FLUSH_S = 600.0
FINGERPRINT = b"\x3f" * 32
CAP_BYTES = 1 << 44
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


def resident_bytes() -> int:
    """Return this process's anonymous resident memory, when freed memory was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def pause_s() -> float:
    """Return the processor time of a full collection of garbage, the second one: nothing else runs
    meanwhile."""
    gc.collect()
    start_s = time.process_time()
    gc.collect()
    return time.process_time() - start_s


def measure_opening(path: Path, block_count: int, after_kill: bool) -> dict[str, float]:
    """Open the store in this process."""

    def opened() -> LmdbIndex:
        if not after_kill:
            sum_of_file(path / "data.mdb")
        return open_index(path, block_count)

    return measure_tier(opened, block_count)


def measure_tier(make_index: Callable[[], Index], block_count: int) -> dict[str, float]:
    """Fill a tier from its index, and look prompts of LOOKED_UP blocks up in it."""
    before, empty_pause_s = resident_bytes(), pause_s()
    start_s = time.perf_counter()
    index = make_index()
    config = Config(store_dirs=(Path("/nowhere"),), nvme_bytes=1)
    parts = Parts.make(config, GEOMETRY, None)  # type: ignore[arg-type] # nobody asks the engine
    nvme = NvmeSpace(parts, NvmeLayout(0, (SEGMENT_SLOTS,), 1 << 62), index, AdmissionPolicy())
    nvme.restore("0" * 32, bytes(32))
    open_s = time.perf_counter() - start_s
    assert len(parts.catalog) == block_count
    grown, pause = resident_bytes() - before, pause_s() - empty_pause_s
    steps, hits = [], []
    for number in range(STEPS):
        start_s = time.process_time()
        nvme.refresh(1.0 + number)
        nvme.make_room(1.0 + number, [0])
        steps.append(time.process_time() - start_s)
    tokens = LOOKED_UP * GEOMETRY.groups[0].block_tokens
    for first in range(0, block_count - LOOKED_UP + 1, block_count // PROMPTS):
        prompt = [key_of(first + number) for number in range(LOOKED_UP)]
        start_s = time.process_time()
        found = Lookups().hits(parts.catalog, GEOMETRY, [prompt], 0, tokens)
        hits.append(time.process_time() - start_s)
        assert found.ready == tokens
    index.close()
    return {
        "open_s": open_s,
        "ram_bytes": grown / block_count,
        "pause_ms": 1e3 * pause,
        "step_us": 1e6 * statistics.median(steps),
        "hit_us": 1e6 * statistics.median(hits) / LOOKED_UP,
    }


class GivenIndex(MemoryIndex):
    """An index that gives columns and keeps nothing: what the scheduler holds of a store, without
    the drive."""

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
            np.zeros(self._count, np.uint64),
        )


def home_of_headers(path: Path, segment_count: int) -> Home:
    """Make a home with whole segments of which only the headers were ever written: no payload is
    read in a rebuild."""
    home = Store.open(path).acquire_home(FINGERPRINT, {"geometry": describe_geometry(GEOMETRY)}, CAP_BYTES)
    slot_bytes, payload_bytes = GEOMETRY.slot_sizes[0], GEOMETRY.groups[0].payload_bytes
    block, namespace = mmap.mmap(-1, HEADER_BYTES), Namespace(FINGERPRINT, 0)
    for segment in range(segment_count):
        file = create_segment(home.folder(0), SegmentSpec(segment, slot_bytes, SEGMENT_SLOTS), 0, 1, FINGERPRINT)
        for slot in range(SEGMENT_SLOTS):
            record = record_of(segment * SEGMENT_SLOTS + slot, slot)
            identity = SlotIdentity(namespace, record.key, record.generation, payload_bytes, 0, 1)
            with memoryview(block) as view:
                fill_header(view, identity, record.parent, bytes(16))
            os.pwritev(file.fd, [block], slot_offset(slot_bytes, slot))
        os.fsync(file.fd)
        file.close()
    return home


def rebuild(home: Home) -> tuple[float, float]:
    """Return the time and the processor time of a header, in microseconds."""
    shutil.rmtree(home.index_path, ignore_errors=True)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    blocks = len(rebuild_index(home, index_bytes=0).blocks)
    return 1e6 * (time.perf_counter() - start_s) / blocks, 1e6 * (time.process_time() - start_cpu_s) / blocks


def in_a_child(path: Path, block_count: int, *, after_kill: bool) -> dict[str, float]:
    """Measure one opening in a fresh process."""
    command = [sys.executable, __file__, "--open", str(path), "--blocks", str(block_count)]
    command += ["--after-kill"] * after_kill
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def say(what: str, values: Sequence[float], digits: int = 2) -> None:
    """Print median, lowest and highest."""
    middle, lowest, highest = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    load = os.getloadavg()[0]
    print(f"{what}: median {middle}, lowest {lowest}, highest {highest} of {len(values)} (load {load:.1f})", flush=True)


def show_openings(path: Path, block_count: int, rounds: int) -> None:
    """Measure openings after both ends, and lookups."""
    for after_kill, end in ((False, "a clean end"), (True, "a kill")):
        found = [in_a_child(path, block_count, after_kill=after_kill) for _ in range(rounds)]
        say(f"open after {end}, s", [one["open_s"] for one in found])
        say("RAM of a block, bytes", [one["ram_bytes"] for one in found], 0)
        say("full collection of garbage, ms more than without a store", [one["pause_ms"] for one in found])
        say("a step of the NVMe tier, us (median of each)", [one["step_us"] for one in found], 1)
        say(f"lookup of an own block, by prompts of {LOOKED_UP:,} blocks, us", [f["hit_us"] for f in found])


def show_rebuild(directory: Path, header_count: int, rounds: int) -> None:
    """Measure a rebuild of a home of one rank with so many headers, each in the drive and not in
    memory."""
    logging.getLogger("kvdisk").setLevel(logging.ERROR)  # a rebuild warns
    home = home_of_headers(directory / "store", -(-header_count // SEGMENT_SLOTS))
    found = [rebuild(home) for _ in range(rounds)]
    home.close(clean=False)
    say("rebuild, us a header", [wall for wall, _ in found])
    say("rebuild, us of processor time a header", [cpu for _, cpu in found])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the index may lie")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--headers", type=int, default=100_000, help="of the rebuild; 64 KiB of the drive for each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="only what the scheduler holds, without a drive")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--after-kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(measure_tier(lambda: GivenIndex(options.blocks), options.blocks)))
        return
    if options.open:
        print(json.dumps(measure_opening(options.open, options.blocks, options.after_kill)))
        return
    block_count = options.blocks
    print(f"{block_count:,} blocks, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        path = Path(directory) / "index"
        build(path, block_count)
        show_openings(path, block_count, options.rounds)
        show_rebuild(Path(directory), options.headers, options.rounds)


if __name__ == "__main__":
    main()
