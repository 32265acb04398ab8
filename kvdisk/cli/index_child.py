# SPDX-License-Identifier: Apache-2.0
"""The process that reads indexes for the tools: a question (JSON) on standard input, lines of answers on output.

A line is ``[home, answer]``, for each home in its order, and then ``[null, answer]`` for their namespace. An answer
is a sentence where there is none, and false where a home has no index yet. See ``index_reader``.
"""

from __future__ import annotations

import errno
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvdisk.cli.block_rows import save_rows
from kvdisk.cli.block_search import find_block
from kvdisk.cli.block_survey import HomeColumns, join_home, survey_blocks, tally
from kvdisk.cli.prefixes import find_prefixes, grow_forest
from kvdisk.device.uses import read_uses
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.index.base import SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex


class Read(NamedTuple):
    """A home that could be read. ``number``: its position in the question."""

    number: int
    home: HomeColumns
    segments: list[SegmentRecord]


def read_home(number: int, index_path: Path, uses_path: Path, ranks: int) -> Read | str | Literal[False]:
    """Read one index in this process: a damaged file may kill it. A sentence says why it cannot be read."""
    try:
        index = LmdbIndex(index_path, readonly=True)
        try:
            columns = index.block_columns()
            # After the blocks: a segment's record is committed before those of its blocks.
            segments = list(index.segments())
        finally:
            index.close()
    except KvdiskError as error:
        if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
            return False
        return str(error).replace(f"{index_path}: ", "").removeprefix("index ")
    return Read(number, join_home(columns, segments, ranks, read_uses(uses_path)), segments)


def _survey_home(read: Read, question: dict[str, Any]) -> list[Any]:
    _, home, segments = read
    return [segments, tally(home), survey_blocks(home, segments, question["now_s"])]


def _survey_namespace(reads: Sequence[Read], block_tokens: Sequence[int | None], question: dict[str, Any]) -> Any:
    homes = [read.home for read in reads]
    return find_prefixes(
        homes,
        grow_forest(homes, block_tokens),
        block_tokens,
        question["prefixes"],
        shared_only=question["shared_only"],
    )


def _segments_of_home(read: Read, _: dict[str, Any]) -> list[Any]:
    return [read.segments]


def _find_in_namespace(reads: Sequence[Read], block_tokens: Sequence[int | None], question: dict[str, Any]) -> Any:
    return find_block([(read.number, read.home) for read in reads], block_tokens, question["wanted"])


def _save_namespace(reads: Sequence[Read], block_tokens: Sequence[int | None], question: dict[str, Any]) -> Any:
    path = Path(question["target"]) / f"{uuid.uuid4().hex}.npz"
    save_rows([(read.number, read.home, read.segments) for read in reads], block_tokens, path)
    return path.name


_ANSWERS = {
    "survey": (_survey_home, _survey_namespace),
    "find": (_segments_of_home, _find_in_namespace),
    "save": (_segments_of_home, _save_namespace),
}


def main() -> None:
    """Be the child."""
    question = json.load(sys.stdin)
    of_home, of_namespace = _ANSWERS[question["what"]]
    for homes, block_tokens in question["namespaces"]:
        reads = []
        for number, home in enumerate(homes):
            if home is None:
                continue
            read = read_home(number, Path(home[0]), Path(home[1]), home[2])
            answer: Any = read
            if isinstance(read, Read):
                reads.append(read)
                answer = of_home(read, question)
            print(json.dumps([number, answer]), flush=True)
        print(json.dumps([None, of_namespace(reads, block_tokens, question)]), flush=True)


if __name__ == "__main__":
    main()
