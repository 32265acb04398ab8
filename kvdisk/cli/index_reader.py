# SPDX-License-Identifier: Apache-2.0
"""Reads the indexes of homes in a process of its own, and counts what they hold.

LMDB maps its file: in one that was cut short or overwritten it can run into memory that is not there, which kills
the process (SIGBUS, SIGSEGV) instead of raising. So the tools let a child read; if it dies, that is one home's
problem, and another child goes on with the next. The child shares no open index with its parent either.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvdisk.blocks import group_of
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.index.base import SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex

_DAMAGED: dict[int, str] = {signal.SIGBUS: "SIGBUS", signal.SIGSEGV: "SIGSEGV", signal.SIGABRT: "SIGABRT"}


class BlockTally(NamedTuple):
    """Blocks of one epoch, segment and KV-cache group. Times: seconds since the Unix epoch."""

    epoch: int
    segment: int
    group: int
    blocks: int
    highest_slot: int
    oldest_stored_s: int
    newest_stored_s: int


class IndexFacts(NamedTuple):
    """What one index holds. ``problem`` says in one sentence why it cannot be read; then the rest is empty.

    ``exists`` is False where no index has been made yet.
    """

    segments: tuple[SegmentRecord, ...] = ()
    tallies: tuple[BlockTally, ...] = ()
    exists: bool = True
    problem: str | None = None


def read_indexes(paths: Sequence[Path]) -> list[IndexFacts]:
    """Read the indexes in these directories, in order. Never raises for what is wrong with one of them.

    Nothing is written but the mark that a reader of LMDB leaves in ``lock.mdb``, where that can be written.
    """
    facts: list[IndexFacts] = []
    while len(facts) < len(paths):
        rest = [str(path) for path in paths[len(facts) :]]
        child = subprocess.run(  # noqa: S603 - this same module, in this same interpreter
            [sys.executable, "-m", __name__],
            input=json.dumps(rest),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
        )
        # What a child was writing when it died has no newline.
        facts += [_from_json(line) for line in child.stdout.splitlines(keepends=True) if line.endswith("\n")]
        if len(facts) < len(paths):
            facts.append(IndexFacts(problem=_cause_of_death(child)))
    return facts


def read_index(path: Path) -> IndexFacts:
    """Read one index in this process: a damaged file may kill it."""
    tallies: dict[tuple[int, int, int], list[int]] = {}
    try:
        index = LmdbIndex(path, readonly=True)
        try:
            for record in index.blocks():
                where = (record.epoch, record.slot.segment, group_of(record.key))
                slot, stored_s = record.slot.index, record.stored_s
                tally = tallies.get(where)
                if tally is None:
                    tallies[where] = [1, slot, stored_s, stored_s]
                    continue
                tally[0] += 1
                tally[1] = max(tally[1], slot)
                tally[2] = min(tally[2], stored_s)
                tally[3] = max(tally[3], stored_s)
            # After the blocks: a segment's record is committed before those of its blocks.
            segments = tuple(index.segments())
        finally:
            index.close()
    except KvdiskError as error:
        if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
            return IndexFacts(exists=False)
        return IndexFacts(problem=str(error).replace(f"{path}: ", "").removeprefix("index "))
    return IndexFacts(segments, tuple(BlockTally(*where, *tally) for where, tally in sorted(tallies.items())))


def _from_json(line: str) -> IndexFacts:
    segments, tallies, exists, problem = json.loads(line)
    return IndexFacts(
        tuple(SegmentRecord(*fields) for fields in segments),
        tuple(BlockTally(*fields) for fields in tallies),
        exists,
        problem,
    )


def _cause_of_death(child: subprocess.CompletedProcess[str]) -> str:
    if -child.returncode in _DAMAGED:
        return f"the file is damaged, reading it ended in {_DAMAGED[-child.returncode]}"
    last_words = child.stderr.strip().splitlines()[-1:] or [f"status {child.returncode}"]
    return f"the process that reads it failed, {last_words[0]}"


def main() -> None:
    """Be the child: a JSON list of directories on standard input, a line of facts for each on standard output."""
    for path in json.load(sys.stdin):
        print(json.dumps(read_index(Path(path))), flush=True)


if __name__ == "__main__":
    main()
