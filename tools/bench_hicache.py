# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind SGLang beside SGLang's own file backend, on the same pages of its real host pools:
how long a lookup of 128 pages takes, and how fast pages are stored and loaded, in alternating
pairs.

    PYTHONPATH=tests:.venv-engines/sglang .venv-engines/bin/python tools/bench_hicache.py --dir DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BATCH = 128


class Run:
    """One backend with ``count`` pages of its own. ``kind``: kvdisk, or file."""

    def __init__(self, kind: str, folder: Path, model: Path, page_tokens: int, seed: int) -> None:
        from hicache.backends import Backend, key_of  # SGLang is there in its environment alone

        self.folder, self.seed, self._key_of = folder / f"{kind}-{seed}", seed, key_of
        settings: dict[str, Any] = {"pages": 2 * BATCH, "page": page_tokens}
        if kind == "kvdisk":
            self.backend = Backend(model, self.folder, nvme_bytes="8GiB", nvme_admission="all", **settings)
        else:
            self.backend = Backend(model, self.folder, kind="file", tensors=True, **settings)
        self.page_bytes = len(self.backend.bytes_of(0))

    def keys(self, batch: int) -> list[str]:
        return [self._key_of(self.seed * 1_000_000 + batch * BATCH + at) for at in range(BATCH)]

    def set_speed(self, batches: int) -> float:
        """Return GB a second. The pages of each batch are others."""
        taken_s = 0.0
        for batch in range(batches):
            self.backend.fill(range(BATCH), seed=self.seed * 1000 + batch)
            began_s = time.monotonic()
            assert self.backend.store(self.keys(batch))
            taken_s += time.monotonic() - began_s
        return batches * BATCH * self.page_bytes / taken_s / 1e9

    def get_speed(self, batches: int) -> float:
        began_s = time.monotonic()
        for batch in range(batches):
            assert all(self.backend.load(self.keys(batch), first=BATCH))
        return batches * BATCH * self.page_bytes / (time.monotonic() - began_s) / 1e9

    def exists_ms(self) -> float:
        """Return the median of 50 lookups of 128 pages that are there."""
        times = []
        for _ in range(50):
            began_s = time.monotonic()
            assert self.backend.exists(self.keys(0)) == BATCH
            times.append(time.monotonic() - began_s)
        return statistics.median(times) * 1e3

    def forget_cache(self) -> None:
        """Have the kernel read from the drive again."""
        os.sync()
        for file in (each for each in self.folder.rglob("*") if each.is_file()):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def close(self) -> None:
        self.backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def beside(is_busy: bool) -> Iterator[None]:
    """Have Python busy meanwhile, as a scheduler's is."""
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            sum(range(2000))

    thread = threading.Thread(target=work)
    if is_busy:
        thread.start()
    yield
    ends.set()
    if is_busy:
        thread.join()


def measure(run: Run, batches: int, *, is_busy: bool) -> dict[str, float]:
    """Store, look up and load; remove what it stored."""
    with beside(is_busy):
        found = {"set": run.set_speed(batches), "exists_ms": run.exists_ms()}
        run.forget_cache()
        found["get"] = run.get_speed(batches)
    run.close()
    return found


def main() -> None:
    from hicache.backends import write_model

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8, help="of 128 pages each")
    parser.add_argument("--page-tokens", type=int, default=256, help="its pages have 1.5 KiB a token")
    parser.add_argument("--busy", action="store_true", help="with Python busy beside it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.dir / "bench-hicache"
    model = write_model(folder / "model")
    rows = []
    for pair in range(arguments.pairs):
        row: dict[str, Any] = {}
        kinds = ("kvdisk", "file") if pair % 2 else ("file", "kvdisk")
        for kind in kinds:
            run = Run(kind, folder, model, arguments.page_tokens, pair)
            row[kind] = measure(run, arguments.batches, is_busy=arguments.busy)
        row["set_ratio"] = row["kvdisk"]["set"] / row["file"]["set"]
        row["get_ratio"] = row["kvdisk"]["get"] / row["file"]["get"]
        rows.append(row)
        print(json.dumps({"pair": pair, **row}, default=lambda value: round(value, 3)), flush=True)
    lowest = {name: min(row[name] for row in rows) for name in ("set_ratio", "get_ratio")}
    middle = {name: statistics.median(row[name] for row in rows) for name in ("set_ratio", "get_ratio")}
    exists = statistics.median(row["kvdisk"]["exists_ms"] for row in rows)
    print(
        f"set: {middle['set_ratio']:.2f} of the file backend (lowest {lowest['set_ratio']:.2f});"
        f" get: {middle['get_ratio']:.2f} ({lowest['get_ratio']:.2f}); exists of {BATCH} pages: {exists:.2f} ms"
    )
    shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
