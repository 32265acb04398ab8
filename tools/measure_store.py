# SPDX-License-Identifier: Apache-2.0
"""Measure what a large store costs: opening it, RAM of a block, a lookup, and the index's size over churn.

An index of ``--blocks`` blocks with sha256 keys, in chains of 100, is built in a fresh directory below ``--dir`` and
closed cleanly. Each opening is a process of its own: the time is that of ``LmdbIndex`` and ``NvmeSpace.restore``; the
RAM is what the process's resident memory has grown by, after freed memory was given back, divided by the blocks.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.config import EVICTIONS
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.eviction import make_eviction
from kvdisk.manager.nvme_layout import NvmeLayout
from kvdisk.manager.segments import NvmeSpace
from kvdisk.manager.transfers import Transfers
from kvdisk.stats import Stats

CHAIN_BLOCKS = 100
SEGMENT_SLOTS = 4096
CALL_BLOCKS = 500
LOOKED_UP = 2000
FLUSH_S = 600.0
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


def measure_opening(path: Path, block_count: int, eviction: str) -> dict[str, float]:
    """Open the store in this process, and look blocks up. ``lookup_us``: median of single lookups, in prompt order."""
    wanted = [key_of(number) for number in range(block_count // 2, block_count // 2 + LOOKED_UP)]
    layout = NvmeLayout(0, (SEGMENT_SLOTS,), (1 << 62,))
    before = resident_bytes()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    index = open_index(path, block_count)
    catalog = Catalog()
    nvme = NvmeSpace(
        GEOMETRY, layout, index, catalog, Transfers(1), Stats(), lambda: make_eviction(eviction, catalog.keys)
    )
    nvme.restore("0" * 32, bytes(32))
    open_s, open_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    assert len(catalog) == block_count
    grown = resident_bytes() - before
    times = []
    for key in wanted:
        start_s = time.perf_counter()
        ready = catalog.is_ready(catalog.find(key))
        times.append(time.perf_counter() - start_s)
        assert ready
    index.close()
    return {
        "open_s": open_s,
        "open_cpu_s": open_cpu_s,
        "ram_bytes": grown / block_count,
        "lookup_us": 1e6 * statistics.median(times),
    }


def in_a_child(path: Path, block_count: int, eviction: str) -> dict[str, float]:
    """Measure one opening in a fresh process."""
    command = [sys.executable, __file__, "--open", str(path), "--blocks", str(block_count), "--eviction", eviction]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the index may lie")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 blocks, and replacements of 10,000")
    parser.add_argument("--eviction", choices=EVICTIONS, default=EVICTIONS[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(measure_opening(options.open, options.blocks, options.eviction)))
        return
    block_count = 100_000 if options.quick else options.blocks
    replaced = min(100_000, block_count // 10)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        path = Path(directory) / "index"
        build(path, block_count)
        print(f"{block_count:,} blocks, eviction {options.eviction}, {os.cpu_count()} cores")
        rounds = [in_a_child(path, block_count, options.eviction) for _ in range(options.rounds)]
        for name, what in (
            ("open_s", "open, s"),
            ("open_cpu_s", "open, s of processor time"),
            ("ram_bytes", "RAM of a block, bytes (growth of the resident memory)"),
            ("lookup_us", f"lookup of an own block, µs (median of {LOOKED_UP:,} in prompt order)"),
        ):
            values = sorted(found[name] for found in rounds)
            middle = statistics.median(values)
            print(f"{what}: median {middle:.2f}, lowest {values[0]:.2f}, highest {values[-1]:.2f} of {len(values)}")
        sizes = churn(path, block_count, replaced, options.cycles)
    listed = ", ".join(f"{size / 2**20:.1f}" for size in sizes)
    print(f"index file, MiB: at first and after each of {options.cycles} times {replaced:,} replacements: {listed}")


if __name__ == "__main__":
    main()
