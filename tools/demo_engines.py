# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind SGLang and LMCache, each beside that engine's own file backend, on the same pages:
what is found after ``kill -9``, what is wrong after one bit was flipped, how much lies on the drive
at most, and how fast pages are stored and loaded, in alternating pairs.

The backends are made by the engines' own factories, over their own host memory, in processes of
``.venv-engines``: ``make demo-engines`` installs that. No GPU is needed. The exit code is 1 where
kvdisk lost or served a wrong page, or took more of the drive than its cap.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figure_pages import shown
from figures import ROOT, Figure, Record, add_json_option
from rich import box
from rich.console import Console
from rich.table import Table

TABLE = "backends"
OURS = "kvdisk"
MIB = 1 << 20
FLIPPED_AT = 100
ACT_S = 600.0
WIDTH = 110


@dataclass(frozen=True)
class Engine:
    """An engine, the directory of its package in ``.venv-engines``, its own backend by the engine's
    name, and what a page calls that."""

    name: str
    package: str
    own: str
    own_name: str

    def column(self, kind: str) -> str:
        """Return the heading of a backend's column."""
        return f"{self.name}, {OURS if kind == OURS else self.own_name}"

    @property
    def kinds(self) -> tuple[str, str]:
        """Its own backend, and ours."""
        return self.own, OURS


SGLANG = Engine("SGLang", "sglang", "file", "its file backend")
LMCACHE = Engine("LMCache", "lmcache", "fs_native", "fs_native")


class DemoError(Exception):
    """Why there is no table, in one sentence."""


class Runner:
    """Runs tools in the environment of an engine. ``place``: where they may write."""

    def __init__(self, python: Path, place: Path) -> None:
        self._python, self.place = python, place
        self.log = place / "said.txt"

    def command(self, engine: Engine, tool: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
        """Return a command and its environment. Raises DemoError."""
        package = self._python.parents[1] / engine.package
        if not package.is_dir():
            raise DemoError(f"{package} is not there: run make demo-engines, which installs it.")
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", package)))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.place / "cache")}
        own |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        return [str(self._python), str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)], os.environ | own

    def folder(self, engine: Engine, kind: str) -> Path:
        """Return where a backend keeps its pages."""
        return self.place / engine.package / kind

    def run(self, engine: Engine, tool: str, *arguments: object) -> Any:
        """Run a tool that takes ``--json`` to its end; return what it found. Raises DemoError."""
        told = self.place / "told.json"
        command, environment = self.command(engine, tool, *arguments, "--json", told)
        with self.log.open("w") as said:
            code = subprocess.run(command, env=environment, stdout=said, stderr=said, check=False).returncode
        return self._answer(told, code, tool)

    def act(self, engine: Engine, kind: str, act: str, pages: int, cap_bytes: int = 0) -> Any:
        """Have a process do one act with a backend; return what it found. One that stores is killed
        by ``kill -9`` afterwards. Raises DemoError."""
        told = self.place / "told.json"
        backend, folder = f"{engine.package}-{kind}", str(self.folder(engine, kind))
        order: dict[str, Any] = {"backend": backend, "act": act, "folder": folder}
        order |= {"pages": pages, "cap_bytes": cap_bytes, "answer": str(told)}
        command, environment = self.command(engine, "engine_pages", json.dumps(order))
        with self.log.open("w") as said, subprocess.Popen(command, env=environment, stdout=said, stderr=said) as child:
            end_s = time.monotonic() + ACT_S
            try:
                while child.poll() is None and not (act == "store" and told.exists()) and time.monotonic() < end_s:
                    time.sleep(0.02)
            finally:
                child.send_signal(signal.SIGKILL)
        return self._answer(told, 0 if act == "store" else child.returncode, f"{kind}, {act}")

    def _answer(self, told: Path, code: int, what: str) -> Any:
        if code or not told.exists():
            raise DemoError(f"{what} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        found = json.loads(told.read_text())
        told.unlink()
        return found


def flip_a_bit(folder: Path, head: bytes) -> None:
    """Flip a bit of the page that begins so, in the one place where it lies. Raises DemoError."""
    places = []
    for file in (each for each in folder.rglob("*") if each.is_file() and each.stat().st_size):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(head)
            if at >= 0:
                places.append((file, at + FLIPPED_AT, content[at + FLIPPED_AT]))
    if len(places) != 1:
        raise DemoError(f"The page lies in {len(places)} files of {folder}, and not in one.")
    ((file, at, byte),) = places
    with file.open("r+b") as changed:
        changed.seek(at)
        changed.write(bytes([byte ^ 4]))
        changed.flush()
        os.fsync(changed.fileno())


def try_backend(runner: Runner, engine: Engine, kind: str, options: argparse.Namespace, record: Record) -> None:
    """Kill a process that has stored pages, flip a bit, and write more than a cap."""
    column = engine.column(kind)

    def add(row: str, value: float, unit: str = "") -> None:
        record.add(TABLE, row, column, [value], unit)

    stored = runner.act(engine, kind, "store", options.pages)
    add("pages stored", options.pages)
    add("a page", stored["page_bytes"] >> 10, "KiB")
    add("found after kill -9", runner.act(engine, kind, "load", options.pages)["found"])
    flip_a_bit(runner.folder(engine, kind), bytes.fromhex(stored["heads"][options.pages // 2]))
    flipped = runner.act(engine, kind, "load and write", options.pages, options.cap_mib * MIB)
    add("loaded after a bit flip", flipped["loaded"])
    add("of these wrong", flipped["wrong"])
    add("written", round(1.5 * options.cap_mib), "MiB")
    add("most on the drive", round(flipped["most_bytes"] / MIB), "MiB")
    if kind == OURS:
        add("its cap", options.cap_mib, "MiB")
    shutil.rmtree(runner.place / engine.package)


def try_speed(runner: Runner, engine: Engine, options: argparse.Namespace, record: Record) -> None:
    """Measure both backends of an engine in alternating pairs."""
    place = ("--dir", runner.place, "--pairs", options.pairs)
    if engine is LMCACHE:
        rounds = max(1, options.batches // 2)  # each has 64 objects
        rows = runner.run(engine, "bench_lmcache", *place, "--rounds", rounds, "--kib", options.object_kib)
        _add_pairs(record, engine, rows, {"store": "store", "load": "load"}, 1e-3)
        return
    for beside, more in (("", ()), (", busy Python", ("--busy",)))[: 1 + options.busy]:
        rows = runner.run(engine, "bench_hicache", *place, "--batches", options.batches, *more)
        _add_pairs(record, engine, rows, {"set": f"store{beside}", "get": f"load{beside}"}, 1.0)
        for kind in engine.kinds:
            found = [row[kind]["exists_ms"] for row in rows]
            record.add(TABLE, f"lookup{beside}", engine.column(kind), found, "ms")


def _add_pairs(record: Record, engine: Engine, rows: Any, names: dict[str, str], scale: float) -> None:
    for what, row in names.items():
        for kind in engine.kinds:
            record.add(TABLE, row, engine.column(kind), [each[kind][what] * scale for each in rows], "GB/s")
        ratios = [each[OURS][what] / each[engine.own][what] for each in rows]
        record.add(TABLE, f"{row}: ratio", engine.column(OURS), ratios)


def verdict(table: dict[str, dict[str, Figure]]) -> list[str]:
    """Return what is wrong with kvdisk, in sentences."""
    wrong = []
    for engine in (SGLANG, LMCACHE):
        name = engine.column(OURS)
        found = {row: cells[name].median for row, cells in table.items() if name in cells}
        if found["found after kill -9"] < found["pages stored"]:
            wrong.append(f"{name}: found {found['found after kill -9']:.0f} pages of {found['pages stored']:.0f}.")
        if found["of these wrong"]:
            wrong.append(f"{name}: {found['of these wrong']:.0f} wrong pages after a bit was flipped.")
        if found["most on the drive"] > found["its cap"]:
            wrong.append(f"{name}: {found['most on the drive']:.0f} MiB on the drive, over its cap.")
    return wrong


def shown_table(table: dict[str, dict[str, Figure]]) -> Table:
    """Return the table that the demo ends with."""
    columns = [engine.column(kind) for engine in (SGLANG, LMCACHE) for kind in engine.kinds]
    made = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for each in made.columns[1:]:
        each.justify = "right"
    for row, cells in table.items():
        made.add_row(row, *(shown(cells[name]) if name in cells else "" for name in columns))
    return made


def run_all(runner: Runner, options: argparse.Namespace, record: Record, console: Console) -> None:
    """Fill the record. Raises DemoError."""
    for engine in (SGLANG, LMCACHE):
        for kind in engine.kinds:
            console.print(f"kvdisk: trying {engine.column(kind)}")
            try_backend(runner, engine, kind, options, record)
        console.print(f"kvdisk: measuring both backends of {engine.name}")
        try_speed(runner, engine, options, record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, default=ROOT / ".demo" / "engines", help="a directory on the drive")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-engines" / "bin" / "python")
    parser.add_argument("--pages", type=int, default=128, help="to store before kill -9")
    parser.add_argument("--cap-mib", type=int, default=256, help="of kvdisk, where more than that is written")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8, help="of each run of a pair")
    parser.add_argument("--object-kib", type=int, default=8192, help="of LMCache, in pairs")
    parser.add_argument("--busy", action="store_true", help="also beside busy Python, for SGLang")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=WIDTH)
    place = options.dir.absolute() / "demo-engines"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    record = Record(place)
    try:
        run_all(Runner(options.python.absolute(), place), options, record, console)
    except DemoError as failure:
        console.print(f"kvdisk: {failure}", markup=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    table = record.tables[TABLE]
    console.print(shown_table(table))
    wrong = verdict(table)
    for sentence in wrong:
        console.print(f"kvdisk: {sentence}", style="bold red", soft_wrap=True)
    record.write(options.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
