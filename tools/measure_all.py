# SPDX-License-Identifier: Apache-2.0
"""Measure everything that README, docs/BENCHMARKS.md and docs/measurements have figures of, and
write the figures where ``make_docs.py`` takes them from.

    python tools/measure_all.py --list
    python tools/measure_all.py --dir DIR --only scheduler long
    python tools/make_docs.py

Each measurement runs in processes of its own, on a machine that does nothing else: it is left out
where more than ``--most-busy`` of a core are in use before it. Its figures replace the old ones
when all of it has ended well; what fails keeps the old ones, and the others go on. Beside the
figures stand the commit, the machine, its load, what others used of it meanwhile, and a digest of
the code that was measured: a page says so where that has changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures

DIR, TRACE = "DIR", "TRACE"
SCHEDULER = ("kvdisk/connector", "kvdisk/manager", "kvdisk/index", "tools/measure_scheduler.py")
DRIVE = ("kvdisk/device", "kvdisk/worker")
ENGINE = ("kvdisk/connector", "kvdisk/manager", "kvdisk/index", "kvdisk/worker", "kvdisk/device")
BESIDE_ENGINES = (
    *("kvdisk/sglang", "kvdisk/lmcache", "kvdisk/shared_store.py", "kvdisk/store.py"),
    *("kvdisk/manager", "kvdisk/index", "kvdisk/worker", "kvdisk/device"),
    *("tools/bench_hicache.py", "tools/bench_lmcache.py", "tools/engine_pages.py"),
)
BUSY_S = 3.0


@dataclass(frozen=True)
class Measurement:
    """One run of a tool. ``whole``: what is measured; ``small``: the same in a minute, which shows
    that it runs, and measures nothing. ``DIR`` stands for a directory on the drive, ``TRACE`` for
    Mooncake's trace of conversations. ``minutes``: of the whole, about. ``code``: what it
    measures; a change of it makes the figures old."""

    name: str
    tool: str
    whole: str
    small: str
    minutes: float
    code: tuple[str, ...]

    def command(self, arguments: str) -> str:
        """Return what a page tells its reader to type."""
        wanted = "PYTHONPATH=tests " if self.tool == "measure_remote" else ""
        return f"{wanted}python tools/{self.tool}.py {arguments}".rstrip()


MEASUREMENTS = (
    Measurement("first-token", "demo", "--store DIR/demo", "--store DIR/demo --prompt-tokens 400", 2, ENGINE),
    Measurement(
        "nothing-to-hit",
        "measure_overhead",
        "--store-parent DIR --pairs 2 --rounds 3 --requests 16",
        "--store-parent DIR --pairs 1 --rounds 1 --requests 2 --prompt-tokens 100 --max-tokens 2",
        6,
        ENGINE,
    ),
    Measurement("scheduler", "measure_scheduler", "--rounds 40", "--rounds 1", 2, SCHEDULER),
    Measurement(
        "long",
        "measure_long",
        "--rounds 1",
        "--rounds 1 --tokens 16384 --groups 2",
        4,
        (*SCHEDULER, "tools/measure_long.py"),
    ),
    Measurement(
        "calls",
        "measure_long",
        "--calls --rounds 1 --tokens 1048576 --groups 1",
        "--calls --rounds 1 --tokens 16384 --groups 2",
        2.5,
        (*SCHEDULER, "tools/measure_long.py"),
    ),
    Measurement(
        "calls-7",
        "measure_long",
        "--calls --rounds 1 --tokens 1048576 --groups 7",
        "--calls --rounds 1 --tokens 8192 --groups 2",
        5,
        (*SCHEDULER, "tools/measure_long.py"),
    ),
    Measurement(
        "drive",
        "bench_tiers",
        "DIR --rounds 5",
        "DIR --rounds 1 --total 4MiB --sizes 64KiB 2MiB",
        9,
        (*DRIVE, "tools/bench_tiers.py", "tools/gpu_measures.py"),
    ),
    Measurement(
        "store",
        "measure_store",
        "--dir DIR",
        "--dir DIR --blocks 5000 --headers 4096 --rounds 1",
        6,
        ("kvdisk/manager", "kvdisk/index", "kvdisk/device", "tools/measure_store.py"),
    ),
    Measurement(
        "memory",
        "measure_store",
        "--memory --blocks 10000000",
        "--memory --blocks 5000",
        4,
        ("kvdisk/manager", "tools/measure_store.py"),
    ),
    Measurement(
        "identity",
        "measure_identity",
        "--dir DIR --gb 1 16",
        "--dir DIR --gb 0.01 --rounds 1",
        3,
        ("kvdisk/connector/weights.py", "tools/measure_identity.py"),
    ),
    Measurement(
        "remote-objects",
        "measure_remote",
        "objects --rounds 7",
        "objects --rounds 1",
        2,
        ("kvdisk/remote", "tools/measure_remote.py"),
    ),
    Measurement(
        "remote-prompts",
        "measure_remote",
        "prompts --rounds 3",
        "prompts --rounds 1 --lengths 64 256",
        2,
        (*ENGINE, "kvdisk/remote"),
    ),
    Measurement(
        "remote-down",
        "measure_remote",
        "down --rounds 7 --requests 4",
        "down --rounds 1 --requests 1",
        4,
        (*ENGINE, "kvdisk/remote"),
    ),
    Measurement(
        "engines",
        "demo_engines",
        "--dir DIR --pairs 5 --busy",
        "--dir DIR --pairs 1 --busy --pages 8 --cap-mib 64 --batches 1 --object-kib 64",
        8,
        BESIDE_ENGINES,
    ),
    Measurement(
        "week",
        "run_week",
        "--dir DIR --requests 160000 --block-tokens 2048 --nvme-blocks 40000 --cpu-blocks 5000",
        "--dir DIR --requests 15000 --nvme-blocks 20000 --cpu-blocks 3000 --lives --seed 2",
        9,
        ("kvdisk/manager", "kvdisk/index", "tools/run_week.py", "tools/week_engine.py"),
    ),
    Measurement(
        "hits",
        "replay_models",
        "TRACE --nvme 1%,5%,10%,25%,50%",
        "TRACE --nvme 10% --models lru",
        4,
        ("kvdisk/manager", "kvdisk/cli/replay", "tools/replay_models.py"),
    ),
)
"""All of them, in the order in which they run: what a page shows first comes first."""


@dataclass(frozen=True)
class Places:
    """Where a run may write, and the trace that it reads, if one is given."""

    directory: Path
    trace: Path | None = None

    def arguments(self, text: str) -> list[str]:
        """Return the words of a command, with the places in it."""
        known = {DIR: str(self.directory), TRACE: str(self.trace)}
        parts = [word.partition("/") for word in shlex.split(text)]
        return [known.get(first, first) + slash + rest for first, slash, rest in parts]


class LeftOutError(Exception):
    """Why a measurement has no new figures."""


def busy_cores(seconds: float) -> float:
    """Return how many cores are in use, by anybody, in the next seconds."""
    before_s, began_s = _busy_s(), time.monotonic()
    time.sleep(seconds)
    return (_busy_s() - before_s) / (time.monotonic() - began_s)


def _busy_s() -> float:
    """Return the seconds that all cores together were in use since the start, or lent to others."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(one: Measurement, places: Places, *, small: bool = False, out: Path | None = None) -> dict[str, Any]:
    """Run a measurement; return its record. ``out``: takes what the tool prints. Raises
    LeftOutError."""
    text = one.small if small else one.whole
    if TRACE in text.split() and places.trace is None:
        raise LeftOutError("it needs a trace: --trace FILE")
    digests = {path: figures.digest_of(path) for path in one.code}
    with tempfile.TemporaryDirectory(dir=places.directory) as private:
        mine, found = Places(Path(private), places.trace), Path(private) / "figures.json"
        command = [sys.executable, str(figures.ROOT / "tools" / f"{one.tool}.py"), *mine.arguments(text)]
        path = os.pathsep.join([str(figures.ROOT), str(figures.ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        before_s, began_s, own_s = _busy_s(), time.monotonic(), _children_s()
        with (out or Path(private) / "said.txt").open("w+") as said:
            done = subprocess.run(
                [*command, "--json", str(found)], stdout=said, stderr=subprocess.STDOUT, env=environment, check=False
            )
            took_s, used_s = time.monotonic() - began_s, _children_s() - own_s
            others = max(0.0, (_busy_s() - before_s - used_s) / took_s)
            if done.returncode or not found.exists():
                said.seek(0)
                raise LeftOutError(f"exit code {done.returncode}: {said.read()[-2000:].strip()}")
        record: dict[str, Any] = json.loads(found.read_text())
    return {"command": one.command(text), "small": small, "others": round(others, 2), "code": digests} | record


def keep(name: str, record: dict[str, Any], path: Path) -> None:
    """Put a record in the place of the old one. A file that is there stays whole until then."""
    records = figures.read(path) | {name: record}
    order = {one.name: at for at, one in enumerate(MEASUREMENTS)}
    beside = path.with_name(path.name + ".new")
    beside.write_text(figures.dumped(dict(sorted(records.items(), key=lambda item: order.get(item[0], len(order))))))
    beside.replace(path)


def run_all(wanted: Sequence[Measurement], options: argparse.Namespace) -> list[str]:
    """Run measurements one after the other; return the names of those that have no new figures."""
    left_out = []
    places = Places(options.dir.absolute(), options.trace and options.trace.absolute())
    for one in wanted:
        began_s = time.monotonic()
        busy = busy_cores(BUSY_S)
        try:
            if busy > options.most_busy:
                raise LeftOutError(f"{busy:.1f} cores are in use: more than {options.most_busy:g} (--most-busy)")
            print(f"{one.name}: {one.command(one.small if options.small else one.whole)}", flush=True)
            log = options.logs / f"{one.name}.txt" if options.logs else None
            record = measure(one, places, small=options.small, out=log)
        except LeftOutError as why:
            left_out.append(one.name)
            print(f"{one.name}: no new figures, the old ones stay. {why}", flush=True)
            continue
        keep(one.name, record, options.out)
        print(f"{one.name}: {time.monotonic() - began_s:.0f} s; others used {record['others']} cores", flush=True)
    return left_out


def main() -> int:
    """Measure what is asked for; 1 where anything was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in MEASUREMENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="measure these alone")
    parser.add_argument("--dir", type=Path, default=figures.ROOT / ".demo" / "measures", help="on the drive to measure")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace, for 'hits'")
    parser.add_argument("--most-busy", type=float, default=0.3, help="cores that others may use before a measurement")
    parser.add_argument("--small", action="store_true", help="try whether all run: sizes that measure nothing")
    parser.add_argument("--out", type=Path, default=figures.FILE, help="the figures; others in it stay")
    parser.add_argument("--logs", type=Path, help="a directory for what the tools print")
    parser.add_argument("--list", action="store_true", help="what there is to measure, and how long it takes")
    options = parser.parse_args()
    wanted = [one for one in MEASUREMENTS if one.name in options.only]
    if options.list:
        for one in wanted:
            print(f"{one.name:15} {one.minutes:4g} min  {one.command(one.whole)}")
        print(f"{sum(one.minutes for one in wanted):g} minutes in all, on two idle cores")
        return 0
    if options.small and options.out == figures.FILE:
        parser.error("--small measures nothing: name another file with --out")
    for directory in (options.dir, options.logs):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    left_out = run_all(wanted, options)
    print(f"{len(wanted) - len(left_out)} of {len(wanted)} measured; now run tools/make_docs.py")
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
