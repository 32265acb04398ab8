# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a process that writes to the index: what it acknowledged is there, and nothing is out
of order.

This file is also the program of that process.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex

MAP_BYTES = 8 << 20
ROUNDS = 6
KEYS = [make_block_key(number.to_bytes(32, "big"), number % 2) for number in range(300)]
SEGMENTS = range(20)

Name = tuple[int, BlockKey] | int
Step = tuple[Name, BlockRecord | SegmentRecord | None]


def calls(seed: int) -> Iterator[list[Step]]:
    """Yield without end what each call puts or deletes: steps of one kind, in order."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.1:
            segment = rng.choice(SEGMENTS)
            record = SegmentRecord(segment, 4096, rng.randrange(1, 2**31)) if rng.random() < 0.7 else None
            yield [(segment, record)]
            continue
        names = [(rng.randrange(2), rng.choice(KEYS)) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.5:
            yield [(name, None) for name in names]
        else:
            yield [
                (name, BlockRecord(*name, Slot(1, rng.randrange(2**32)), rng.randrange(2**64), rng.choice(KEYS)))
                for name in names
            ]


def write_until_killed(path: Path, seed: int) -> None:
    index = LmdbIndex(path, map_bytes=MAP_BYTES, commit_s=0.001, max_queued=2000)
    printed = 0
    for number, steps in enumerate(calls(seed), start=1):
        name, record = steps[0]
        if isinstance(record, SegmentRecord):
            ticket: int | None = index.put_segment(record)
        elif isinstance(name, int):
            ticket = index.delete_segment(name)
        elif record is None:
            ticket = index.delete([name for name, _ in steps if not isinstance(name, int)])
        else:
            records = [record for _, record in steps if isinstance(record, BlockRecord)]
            while (ticket := index.put(records)) is None:
                index.flush(1.0)
        assert ticket == number
        progress = index.poll()
        assert progress.dropped_puts == 0
        if progress.committed > printed:
            printed = progress.committed
            print(printed, flush=True)


def killed_after(path: Path, seed: int, line_count: int) -> int:
    """Run a process, kill it after so many lines, and return the last ticket that it printed as
    committed."""
    with subprocess.Popen([sys.executable, __file__, str(path), str(seed)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(line_count)]
        process.kill()
        lines += process.stdout.readlines()
    assert process.returncode == -9
    assert len(lines) >= line_count
    return max(int(line) for line in lines if line.endswith(b"\n"))


def found(path: Path) -> dict[Name, BlockRecord | SegmentRecord]:
    index = LmdbIndex(path, map_bytes=MAP_BYTES)
    try:
        blocks: dict[Name, BlockRecord | SegmentRecord] = {
            (record.epoch, record.key): record for record in index.blocks()
        }
        segments = {record.segment: record for record in index.segments()}
        return {**blocks, **segments}
    finally:
        index.close()


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    rng = random.Random(20261121)
    path = tmp_path / "index"
    expected: dict[Name, BlockRecord | SegmentRecord] = {}
    for seed in range(ROUNDS):
        committed = killed_after(path, seed, line_count=rng.randrange(1, 60))
        after = found(path)
        differing = {name for name in expected.keys() | after.keys() if expected.get(name) != after.get(name)}
        # What is there is the outcome of some beginning of the sequence, no shorter than what was
        # acknowledged.
        for number, steps in enumerate(calls(seed), start=1):
            if number > committed and not differing:
                break
            assert number < committed + 100_000, f"round {seed}: {len(differing)} records are not as queued"
            for name, record in steps:
                if number > committed and not differing:
                    break
                (differing.discard if record == after.get(name) else differing.add)(name)
        expected = after


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
