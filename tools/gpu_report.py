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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.cli.bench import Machine
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
    from kvdisk.worker.copier import Lanes

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = "gpu_report: there is no CUDA GPU here (torch finds none), so there is nothing to report."
MIB = 1 << 20
BLOCK_BYTES = (64 << 10, 256 << 10, MIB, 2 * MIB, 8 * MIB)
LAYERS = 32
STAGING_BYTES = 128 * MIB


@dataclass
class Report:
    """What is printed, and written as JSON. Speeds are bytes per second, medians of their
    samples."""

    machine: dict[str, str] = field(default_factory=dict)
    tests: dict[str, Any] = field(default_factory=dict)
    gds: str = ""
    devices: dict[str, str] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    copies: list[dict[str, Any]] = field(default_factory=list)
    routes: list[dict[str, Any]] = field(default_factory=list)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def median_speed(byte_count: int, act: Callable[[], None], repetitions: int) -> tuple[float, list[float]]:
    """Return bytes per second, and all samples, of something that is done when it returns."""
    samples = []
    act()
    for _ in range(repetitions):
        began_s = time.perf_counter()
        act()
        samples.append(byte_count / (time.perf_counter() - began_s))
    return statistics.median(samples), samples


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


def measure_plain(lanes: Lanes, byte_count: int, repetitions: int) -> dict[str, float]:
    """Return the speed of one large copy between pinned memory and the GPU, each way: the limit of
    the others."""
    import torch

    host = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=lanes.device.type == "cuda")
    gpu = torch.zeros(byte_count, dtype=torch.uint8, device=lanes.device)
    found = {}
    for name, target, source in (("gpu_to_host", host, gpu), ("host_to_gpu", gpu, host)):

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)
            lanes.record(None).synchronize()

        found[name], _ = median_speed(byte_count, copy, repetitions)
    return found


def make_layers(lanes: Lanes, block_bytes: int, count: int) -> list[Any]:
    """Return the layers of ``count`` blocks as vLLM lays them out: one allocation."""
    import torch

    each = block_bytes // LAYERS
    return list(torch.randint(0, 256, (LAYERS, count, each), dtype=torch.uint8, device=lanes.device).unbind(0))


def measure_copies(lanes: Lanes, block_bytes: int, total_bytes: int, repetitions: int) -> list[dict[str, Any]]:
    """Return the copier's speeds both ways, between blocks on the GPU and neighbouring pinned
    slots."""
    from kvdisk.worker.copier import CudaCopier, LayerBlocks, Slots

    count = max(2, total_bytes // block_bytes)
    arena = Arena([HEADER_BYTES + block_bytes], [count], pin=lanes.device.type == "cuda")
    copier = CudaCopier([LayerBlocks(make_layers(lanes, block_bytes, count))], lanes, 64 * MIB)
    slots, blocks = list(range(count)), list(range(count))[::-1]
    found = []
    for name, act in (
        ("gather", lambda: copier.gather(0, blocks, Slots(arena, 0, slots)).synchronize()),
        ("scatter", lambda: copier.scatter(0, Slots(arena, 0, slots), blocks).synchronize()),
    ):
        speed, samples = median_speed(count * block_bytes, act, repetitions)
        found.append({"what": name, "block_bytes": block_bytes, "bytes_per_s": speed, "samples": samples})
    arena.close()
    return found


# -- routes ----------------------------------------------------------------------------------------


class OneSegment:
    """``SegmentFiles`` of one file without a name that lasts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def open_home(self, spec: HomeSpec) -> None:
        """See ``SegmentFiles``."""

    def open_segment(self, spec: SegmentSpec) -> OpenFile:
        """See ``SegmentFiles``."""
        path = self._directory / f"gpu-report-{os.getpid()}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        path.unlink()
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
        return [Move(make_block_key(at.to_bytes(32, "big"), 0), 1, at, {Tier.NVME: Slot(0, at)}) for at in self._all()]

    def _all(self) -> range:
        return range(self._count)

    def _run(self, kind: JobKind, moves: list[Move] | None = None, **fields: Any) -> None:
        self._last += 1
        job = Job(JobId(self._last), kind, tuple(moves or ()), **fields)
        self._mover.submit(Plan((job,)), self._mover.compute_done())
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
    lanes: Lanes, directory: Path, makers: dict[str, tuple[Callable[[], Device], bool]], block_bytes: int, options: Any
) -> list[dict[str, Any]]:
    """Return the speeds of stores and loads by each route, their repetitions in turn. ``makers``:
    device and whether it is a direct one, by name of the route."""
    count = max(2, options.file_bytes // (block_bytes + HEADER_BYTES))  # room for headers, too
    routes = {}
    samples: dict[tuple[str, str], list[float]] = {}
    errors = {}
    try:
        for name, (make, direct) in makers.items():
            try:
                routes[name] = Route(lanes, directory, make(), block_bytes, count, direct=direct)
                routes[name].store()
            except (ConfigError, OSError, RuntimeError) as error:
                errors[name] = str(error)
        for _ in range(options.repetitions):
            for name, route in routes.items():
                if name in errors:
                    continue
                acts = (
                    ("store", route.store, nullcontext),
                    ("load", route.load, nullcontext),
                    ("load unverified", route.load, unverified),
                )
                for what, act, how in acts:
                    with how():
                        began_s = time.perf_counter()
                        act()
                        speed = count * block_bytes / (time.perf_counter() - began_s)
                    samples.setdefault((name, what), []).append(speed)
    finally:
        for route in routes.values():
            route.close()
    found: list[dict[str, Any]] = [
        {
            "route": name,
            "what": what,
            "block_bytes": block_bytes,
            "bytes_per_s": statistics.median(all_of),
            "samples": all_of,
        }
        for (name, what), all_of in samples.items()
    ]
    return found + [
        {"route": name, "what": "error", "block_bytes": block_bytes, "why": why} for name, why in errors.items()
    ]


def make_makers(gds: str) -> tuple[dict[str, tuple[Callable[[], Device], bool]], dict[str, str]]:
    """Return the routes that this machine has, and why it lacks the others."""
    makers: dict[str, tuple[Callable[[], Device], bool]] = {"posix, pinned memory": (PosixDevice, False)}
    if gds:
        return makers, {"gds": gds}
    makers["gds, straight"] = (GdsDevice, True)
    return makers, {}


# -- what is printed
# --------------------------------------------------------------------------------


def gigabytes(speed: float) -> str:
    return f"{speed / 1e9:.2f}"


def table(report: Report) -> str:
    """Return the report as Markdown, for docs/measurements/gpu.md."""
    lines = ["GPU: " + ", ".join(f"{name} {value}" for name, value in report.machine.items()), ""]
    tests = ", ".join(
        f"{report.tests[what]} {what}" for what in ("passed", "failed", "skipped") if what in report.tests
    )
    lines += [f"Tests: {tests or 'none ran'}.", ""]
    lines += [f"Not here: {name}: {why}" for name, why in report.devices.items()]
    plain = report.plain
    lines += [
        "",
        f"One large copy: GPU to host {gigabytes(plain['gpu_to_host'])} GB/s, host to GPU "
        f"{gigabytes(plain['host_to_gpu'])} GB/s.",
        "",
        "| block | gather GB/s (of a large copy) | scatter GB/s (of a large copy) |",
        "|---|---|---|",
    ]
    for size in dict.fromkeys(row["block_bytes"] for row in report.copies):
        cells = [
            f"{gigabytes(row['bytes_per_s'])} ({row['bytes_per_s'] / plain[way]:.2f})"
            for what, way in (("gather", "gpu_to_host"), ("scatter", "host_to_gpu"))
            for row in report.copies
            if (row["block_bytes"], row["what"]) == (size, what)
        ]
        lines.append(f"| {size >> 10} KiB | {' | '.join(cells)} |")
    lines += ["", "| block | route | store GB/s | load GB/s | load unverified GB/s |", "|---|---|---|---|---|"]
    for size, route in dict.fromkeys((row["block_bytes"], row["route"]) for row in report.routes):
        mine = {row["what"]: row for row in report.routes if (row["block_bytes"], row["route"]) == (size, route)}
        if "error" in mine:
            lines.append(f"| {size >> 10} KiB | {route} | {mine['error']['why']} | | |")
            continue
        cells = [gigabytes(mine[what]["bytes_per_s"]) for what in ("store", "load", "load unverified")]
        lines.append(f"| {size >> 10} KiB | {route} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_report(lanes: Lanes, options: Any) -> Report:
    report = Report(describe_machine(options.dir))
    if not options.no_tests:
        say("the tests of tests/gpu")
        report.tests = run_tests(options.dir)
    report.gds = gds_unavailable() or ""
    makers, report.devices = make_makers(report.gds)
    say("one large copy each way")
    report.plain = measure_plain(lanes, options.copy_bytes, options.repetitions)
    for at, size in enumerate(options.sizes, 1):
        say(f"blocks of {size >> 10} KiB ({at} of {len(options.sizes)})")
        report.copies += measure_copies(lanes, size, options.copy_bytes, options.repetitions)
        report.routes += measure_routes(lanes, options.dir, makers, size, options)
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
    print(table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.tests.get("code", 0) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
