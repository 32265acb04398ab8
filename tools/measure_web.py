# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk web`` takes of a processor core beside engines at work, with a page open and
without, and how long a prompt's path and the report take: ``tools/measure_web.py --dir DIR``.

The engines are made up: each writes new figures before each look of the page. The blocks are
records in the index of one of them, without files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from demo_figures import demo_engines
from demo_store import SMALL

from kvdisk.blocks import Slot, make_block_key
from kvdisk.cli.web.watch import PATIENCE_S
from kvdisk.cli.why import chain_hashes
from kvdisk.device.store import Store
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for

CHAIN_BLOCKS = 1000
SEGMENT_SLOTS = 1 << 16
TICK_S = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where to make the store; removed at the end")
    parser.add_argument("--engines", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    store: Path = arguments.dir / "web-store"
    try:
        prompt = fill(store, arguments.blocks)
        with demo_engines(store, [SMALL] * arguments.engines, time.time()) as engines:

            def work() -> None:
                for engine in engines:
                    engine.work(time.time())

            work()
            measure(store, work, arguments.seconds, prompt)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    return 0


def fill(store: Path, count: int) -> list[int]:
    """Make an engine store with so many blocks, in chains; return the first chain's tokens."""
    home = Store.open(store).acquire_home(SMALL.fingerprint, SMALL.description, 1 << 40)
    index = LmdbIndex(home.index_path, map_bytes=map_bytes_for(count + 1000))
    prompt = list(range(16 * CHAIN_BLOCKS))
    hashes = chain_hashes(prompt, 16, "sha256", None)
    for first in range(0, count, SEGMENT_SLOTS):
        segment = first // SEGMENT_SLOTS
        index.put_segment(SegmentRecord(segment, SMALL.geometry.groups[0].slot_bytes, SEGMENT_SLOTS, 0))
        records, now_s = [], int(time.time())
        for at in range(first, min(count, first + SEGMENT_SLOTS)):
            chain, place = divmod(at, CHAIN_BLOCKS)
            if chain:
                hashes[place] = hashlib.sha256(b"%d" % at).digest()
            above = make_block_key(hashes[place - 1], 0) if place else None
            records.append(
                BlockRecord(0, make_block_key(hashes[place], 0), Slot(segment, at - first), at, above, now_s)
            )
        index.put(records)
        assert index.flush(600)
    index.close()
    home.close(clean=True)
    return prompt


def measure(store: Path, work: Callable[[], None], seconds: float, prompt: list[int]) -> None:
    """Serve the store in a process of its own; print what that takes."""
    command = [sys.executable, "-m", "kvdisk.cli.main", "web", str(store), "--port", "0", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        said = ""
        while not said.endswith("}\n"):
            said += child.stdout.readline()
        url = json.loads(said)["url"]

        def look() -> None:
            urllib.request.urlopen(f"{url}figures.json?span=minutes&after={10**9}").read()  # noqa: S310 - our own

        for name, asks in (("with a page open", True), ("with none", False)):
            if not asks:
                time.sleep(PATIENCE_S + 1)  # until it takes nobody to be looking
            share = busy(child.pid, (work, look) if asks else (work,), seconds)
            print(f"{name}: {100 * share:.2f} % of a core", flush=True)
        body = json.dumps({"tokens": json.dumps(prompt), "namespace": "", "salt": ""}).encode()
        asked = urllib.request.Request(f"{url}why", body, {"Content-Type": "application/json"})  # noqa: S310 - our own
        for name, request in (("a prompt's path", asked), ("the report", f"{url}report")):
            began_s = time.monotonic()
            urllib.request.urlopen(request).read()  # noqa: S310 - our own
            print(f"{name}: {time.monotonic() - began_s:.1f} s", flush=True)
    finally:
        child.terminate()
        child.wait()


def busy(pid: int, calls: Sequence[Callable[[], None]], seconds: float) -> float:
    """Return the share of a core that a process takes, while others are called every 2 s."""
    began_s, before_s, turn = time.monotonic(), _processor_s(pid), 0
    while time.monotonic() < began_s + seconds:
        for call in calls:
            call()
        turn += 1
        time.sleep(max(0.0, began_s + 2 * turn - time.monotonic()))
    return (_processor_s(pid) - before_s) / (time.monotonic() - began_s)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK_S


if __name__ == "__main__":
    sys.exit(main())
