# SPDX-License-Identifier: Apache-2.0
"""How long a start needs to know a model's weights, of which it reads every byte.

    python tools/measure_identity.py --dir DIR --gb 1 16 140

Makes files in DIR, and removes them. *Cold*: no page of them is in memory; beyond ``--distinct-gb``
the same files are read again, under other names, when their pages have been dropped for others.
*Warm*: all pages are in memory, as they are when vLLM has just loaded them; the files are names of
one of 4 GB. *Remembered*: a later start. *Sample*: what a start reads before it knows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from figures import Record, add_json_option
from rich.console import Console
from rich.table import Table

from kvdisk.connector import weights

GB = 10**9
FILE_BYTES = 4 * GB
PIECE_BYTES = 64 << 20


def make_files(folder: Path, size: int, distinct: int) -> list[Path]:
    """Make files of ``size`` bytes in all, ``distinct`` of them their own."""
    folder.mkdir()
    files, piece = list[Path](), os.urandom(PIECE_BYTES)
    for at, start in enumerate(range(0, size, FILE_BYTES)):
        file, length = folder / f"model-{at:05}.bin", min(FILE_BYTES, size - start)
        if start + length > distinct and files:
            file.symlink_to(files[at % max(1, distinct // FILE_BYTES)].name)
        else:
            with file.open("wb") as stream:
                for done in range(0, length, PIECE_BYTES):
                    stream.write(at.to_bytes(8, "little") + piece[8 : min(PIECE_BYTES, length - done)])
                os.fsync(stream.fileno())
        files.append(file)
    return files


def drop_pages(files: Sequence[Path]) -> None:
    """Have no page of files in memory."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(action: Callable[[], object], before: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round."""
    taken = []
    for _ in range(rounds):
        before()
        began_s = time.monotonic()
        action()
        taken.append(time.monotonic() - began_s)
    return taken


def said(taken: Sequence[float]) -> str:
    """Return the median, and from where to where."""
    return f"{statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})"


def measure(place: Path, size: int, distinct: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by the columns of a row."""
    memory = place / "memory"
    cold = make_files(place / "cold", size, distinct)
    content = weights.content_digest
    found = {"cold": timed(lambda: content(cold), lambda: drop_pages(cold), rounds)}
    sample = timed(lambda: weights.sample_digest(cold), lambda: drop_pages(cold), rounds)
    shutil.rmtree(place / "cold")
    warm = make_files(place / "warm", size, FILE_BYTES)
    found["warm"] = timed(lambda: content(warm), lambda: content(warm[:1]), rounds)
    time.sleep(2.5)  # a file that has just changed is not remembered
    weights.known_digest(warm, memory, worth_s=0.0)
    found["remembered"] = timed(lambda: weights.known_digest(warm, memory), lambda: None, rounds)
    shutil.rmtree(place / "warm")
    return found | {"sample, cold": sample}


def main() -> None:
    """Measure each size, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive; all in it is removed again")
    parser.add_argument("--gb", type=float, nargs="+", default=[1, 16], help="sizes of weights")
    parser.add_argument("--distinct-gb", type=float, default=48, help="most bytes that are written")
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    arguments = parser.parse_args()
    place, record = arguments.dir / "measure-identity", Record(arguments.dir)
    place.mkdir()
    table = Table("weights", "cold", "warm", "remembered", "sample, cold")
    try:
        for size in arguments.gb:
            row = measure(place, int(size * GB), int(arguments.distinct_gb * GB), arguments.rounds)
            table.add_row(f"{size:g} GB", *map(said, row.values()))
            for column, taken in row.items():
                record.add("weights", f"{size:g} GB", column, taken, "s")
    finally:
        shutil.rmtree(place)
    Console(width=140).print(table)
    record.write(arguments.json)


if __name__ == "__main__":
    main()
