# SPDX-License-Identifier: Apache-2.0
"""All that only a GPU machine can show, in one go: the GPU's tests, and how fast bytes get to its
blocks and back.

Run it with nothing but kvdisk and torch installed; vLLM is not needed::

    python tools/gpu_report.py --dir /nvme/somewhere --json report.json

It prints a table to put into docs/measurements/gpu.md, and writes the same as JSON. Without a GPU
it says so and ends with 2; with failed tests it ends with 1. The directory should be on the drive
that kvdisk shall use; what is written there (``--file-bytes``) is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from machine import Machine
from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.device.base import Device
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError
from kvdisk.geometry import HEADER_BYTES, Geometry, GroupGeometry, slot_offset
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, SegmentSpec
from kvdisk.worker.arena import Arena
from kvdisk.worker.direct import Direct
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import OpenFile, Resources

if TYPE_CHECKING:
    from kvdisk.worker.copier import CudaLanes as Lanes

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = "gpu_report: there is no CUDA GPU here (torch finds none), so there is nothing to report."
MIB = 1 << 20
BLOCK_BYTES = (64 << 10, 256 << 10, MIB, 2 * MIB, 8 * MIB)
LAYERS = 32
STAGING_BYTES = 128 * MIB
LARGE_COPY, COPY = "one large copy", "copy"
STRAIGHT = "gds, straight"
COPIES, MOVES = ("gather", "scatter"), ("store", "load", "load unverified")


@dataclass
class Speed:
    """How fast something was. ``samples``: bytes a second; none where ``why`` says why not."""

    route: str
    what: str
    block_bytes: int
    samples: list[float] = field(default_factory=list)
    why: str = ""

    @property
    def words(self) -> str:
        """The median, in GB/s."""
        return self.why or f"{statistics.median(self.samples) / 1e9:.2f}"


@dataclass
class Report:
    """What is printed, and written as JSON."""

    machine: dict[str, str]
    tests: dict[str, Any] = field(default_factory=dict)
    gds: str = ""
    speeds: list[Speed] = field(default_factory=list)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def speed_of(byte_count: int, act: Callable[[], None]) -> float:
    """Return bytes per second of something that is done when it returns."""
    began_s = time.perf_counter()
    act()
    return byte_count / (time.perf_counter() - began_s)


# -- the machine and the tests --------------------------------------------------------------------


def describe_machine(directory: Path) -> dict[str, str]:
    """Return what this runs on."""
    import torch

    found = {"machine": Machine.here(directory).sentence, "torch": torch.__version__}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "gpu_bytes": str(gpu.total_memory), "cuda": str(torch.version.cuda)}
    return found


def run_tests(directory: Path) -> dict[str, Any]:
    """Run tests/gpu, on files of the directory; return counts and the last lines."""
    with tempfile.TemporaryDirectory(dir=directory) as base:
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-rs"]
        done = subprocess.run(
            [*command, "--basetemp", str(Path(base) / "tests"), "tests/gpu"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    return {"code": done.returncode, **counts, "last_lines": done.stdout.splitlines()[-15:]}


# -- copies ----------------------------------------------------------------------------------------


def measure_plain(lanes: Lanes, byte_count: int, repetitions: int) -> list[Speed]:
    """Return the speed of one large copy between pinned memory and the GPU, each way: the limit of
    the others."""
    import torch

    host = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=lanes.device.type == "cuda")
    gpu = torch.zeros(byte_count, dtype=torch.uint8, device=lanes.device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        lanes.record(None).synchronize()

    ways = {"gather": partial(copy, host, gpu), "scatter": partial(copy, gpu, host)}
    return measure_ways(LARGE_COPY, ways, byte_count, byte_count, repetitions)


def measure_ways(
    route: str, ways: Mapping[str, Callable[[], None]], block_bytes: int, byte_count: int, repetitions: int
) -> list[Speed]:
    """Return the speed of each, once it is warm."""
    found = []
    for what, act in ways.items():
        act()
        samples = [speed_of(byte_count, act) for _ in range(repetitions)]
        found.append(Speed(route, what, block_bytes, samples))
    return found


def make_layers(lanes: Lanes, block_bytes: int, count: int) -> list[Any]:
    """Return the layers of ``count`` blocks as vLLM lays them out: one allocation."""
    import torch

    each = block_bytes // LAYERS
    return list(torch.randint(0, 256, (LAYERS, count, each), dtype=torch.uint8, device=lanes.device).unbind(0))


def measure_copies(lanes: Lanes, block_bytes: int, total_bytes: int, repetitions: int) -> list[Speed]:
    """Return the copier's speeds both ways, between blocks on the GPU and neighbouring pinned
    slots."""
    from kvdisk.worker.copier import CudaCopier, LayerBlocks, Slots

    count = max(2, total_bytes // block_bytes)
    arena = Arena([HEADER_BYTES + block_bytes], [count], pin=lanes.device.type == "cuda")
    copier = CudaCopier([LayerBlocks(make_layers(lanes, block_bytes, count))], lanes, 64 * MIB)
    slots, blocks = Slots(arena, 0, list(range(count))), list(range(count))[::-1]
    ways = {
        "gather": lambda: copier.gather(0, blocks, slots).synchronize(),
        "scatter": lambda: copier.scatter(0, slots, blocks).synchronize(),
    }
    found = measure_ways(COPY, ways, block_bytes, count * block_bytes, repetitions)
    arena.close()
    return found


# -- routes ----------------------------------------------------------------------------------------


class OneSegment:
    """``SegmentFiles`` of one file without a name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def open_home(self, spec: HomeSpec) -> None:
        """See ``SegmentFiles``."""

    def open_segment(self, spec: SegmentSpec) -> OpenFile:
        """See ``SegmentFiles``."""
        self._fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, slot_offset(spec.slot_bytes, spec.slot_count))
        return OpenFile(self._fd, spec.slot_bytes, spec.slot_count)

    def drop_segment(self, spec: SegmentSpec) -> None:
        """See ``SegmentFiles``."""

    def close(self) -> None:
        """See ``SegmentFiles``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Route:
    """A mover whose stores and loads go one way between blocks on the GPU and a file, in jobs of
    all blocks.

    ``layers``: the blocks' bytes.
    """

    def __init__(self, lanes: Lanes, directory: Path, device: Device, block_bytes: int, count: int, *, direct: bool):
        from kvdisk.worker.copier import CudaCopier, LayerBlocks
        from kvdisk.worker.gpu_staging import GpuStaging

        geometry = Geometry((GroupGeometry(0, 16, block_bytes),), 1, 16)
        self.layers = make_layers(lanes, block_bytes, count)
        self._count = count
        slots = [max(8, STAGING_BYTES // geometry.slot_sizes[0])]
        self._memory: list[Any] = [Arena(geometry.slot_sizes, slots, pin=lanes.device.type == "cuda")]
        every = frozenset({0})
        way = Direct(GpuStaging(geometry.slot_sizes, slots, lanes), every, every) if direct else None
        if way is not None:
            self._memory.append(way.staging)
        copier = CudaCopier([LayerBlocks(self.layers)], lanes, 64 * MIB)
        resources = Resources(geometry, 0, None, self._memory[0], copier, device, OneSegment(directory), way)
        self._mover = Mover(resources, io_deadline_s=120.0)
        self._last = 0
        self._run(JobKind.OPEN_HOME, home=HomeSpec("00" * 16, bytes(32)))
        self._run(JobKind.OPEN_SEGMENT, segment=SegmentSpec(0, geometry.slot_sizes[0], count))

    def store(self) -> None:
        """Store every block; all have to arrive."""
        self._run(JobKind.STORE, self._moves())

    def load(self) -> None:
        """Load every block; all have to be right."""
        self._run(JobKind.LOAD, self._moves())

    def close(self) -> None:
        """End the mover, and give memory and file back."""
        self._mover.close()
        for memory in self._memory:
            memory.close()

    def _moves(self) -> list[Move]:
        keys = [make_block_key(at.to_bytes(32, "big"), 0) for at in range(self._count)]
        return [Move(key, 1, at, {Tier.NVME: Slot(0, at)}) for at, key in enumerate(keys)]

    def _run(self, kind: JobKind, moves: list[Move] | None = None, **fields: Any) -> None:
        self._last += 1
        job = Job(JobId(self._last), kind, tuple(moves or ()), **fields)
        self._mover.submit(Plan((job,)))
        while True:
            report = self._mover.poll()
            if job.id in report.results:
                failed = report.results[job.id].failed
                if failed:
                    raise RuntimeError(f"{kind.name}: {len(failed)} blocks failed, {next(iter(failed.values())).name}")
                return
            self._mover.wait_any(0.01)


@contextmanager
def unverified() -> Iterator[None]:
    """Let loads go without their checksums, to see what these cost."""
    with (
        patch("kvdisk.worker.slot_headers.SlotHeaders.check", lambda *_: ({}, [])),
        patch("kvdisk.worker.gpu_staging.PayloadSums.of", lambda *_: None),
    ):
        yield


def measure_routes(
    lanes: Lanes, directory: Path, makers: Mapping[str, Callable[[], Device]], block_bytes: int, options: Any
) -> list[Speed]:
    """Return the speeds of stores and loads by each route, their repetitions in turn. ``makers``:
    of devices, by name of the route."""
    count = max(2, options.file_bytes // (block_bytes + HEADER_BYTES))  # room for headers, too
    routes, found = {}, []
    try:
        for name, make in makers.items():
            try:
                routes[name] = Route(lanes, directory, make(), block_bytes, count, direct=name == STRAIGHT)
                routes[name].store()
                found += [Speed(name, what, block_bytes) for what in MOVES]
            except (ConfigError, OSError, RuntimeError) as error:
                found.append(Speed(name, MOVES[0], block_bytes, why=str(error)))
        for speed in [speed for speed in found if not speed.why] * options.repetitions:
            route = routes[speed.route]
            with unverified() if speed.what == MOVES[2] else nullcontext():
                act = route.store if speed.what == MOVES[0] else route.load
                speed.samples.append(speed_of(count * block_bytes, act))
    finally:
        for route in routes.values():
            route.close()
    return found


# -- what is printed ---------------------------------------------------------------------------


def show(report: Report) -> None:
    """Print the report as Markdown, for docs/measurements/gpu.md."""
    console = Console(width=200, markup=False, highlight=False)
    tests = [f"{report.tests[what]} {what}" for what in ("passed", "failed", "skipped") if what in report.tests]
    console.print("GPU:", ", ".join(f"{name} {value}" for name, value in report.machine.items()))
    console.print(f"\nTests: {', '.join(tests) or 'none ran'}.")
    if report.gds:
        console.print(f"Not here: gds: {report.gds}")
    by_route = {(speed.block_bytes, speed.route, speed.what): speed for speed in report.speeds}
    for whats, routes in (
        (COPIES, {LARGE_COPY, COPY}),
        (MOVES, {speed.route for speed in report.speeds} - {LARGE_COPY, COPY}),
    ):
        table = Table("block", "route", *(f"{what} GB/s" for what in whats), box=box.MARKDOWN)
        for size, route in dict.fromkeys(key[:2] for key in by_route if key[1] in routes):
            cells = [by_route[key].words for what in whats if (key := (size, route, what)) in by_route]
            table.add_row(f"{size >> 10} KiB", route, *cells)
        console.print(table)


def make_report(lanes: Lanes, options: Any) -> Report:
    report = Report(describe_machine(options.dir), gds=gds_unavailable() or "")
    if not options.no_tests:
        say("the tests of tests/gpu")
        report.tests = run_tests(options.dir)
    makers: dict[str, Callable[[], Device]] = {"posix, pinned memory": PosixDevice}
    if not report.gds:
        makers[STRAIGHT] = GdsDevice
    say("one large copy each way")
    report.speeds = measure_plain(lanes, options.copy_bytes, options.repetitions)
    for at, size in enumerate(options.sizes, 1):
        say(f"blocks of {size >> 10} KiB ({at} of {len(options.sizes)})")
        report.speeds += measure_copies(lanes, size, options.copy_bytes, options.repetitions)
        report.speeds += measure_routes(lanes, options.dir, makers, size, options)
    return report


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--dir", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--json", type=Path, help="where the same goes as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=BLOCK_BYTES, help="of blocks, in bytes")
    parser.add_argument("--file-bytes", type=int, default=1 << 30, help="of the file of each route")
    parser.add_argument("--copy-bytes", type=int, default=256 * MIB, help="moved by each copy")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    options.dir = options.dir.resolve()
    for size in options.sizes:
        if size <= 0 or size % (LAYERS * 8):
            parser.error(f"a size must be a multiple of {LAYERS * 8}: {size}")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        from kvdisk.worker.copier import CudaLanes

        lanes = CudaLanes()
    except (ImportError, AssertionError, RuntimeError):  # torch is absent, built without CUDA, or finds no GPU
        print(NO_GPU)
        return 2
    report = make_report(lanes, options)
    show(report)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.tests.get("code", 0) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
