# SPDX-License-Identifier: Apache-2.0
"""All that only a GPU machine can show, in one go: the GPU's tests, how fast bytes get to its
blocks and back, and what that costs the model.

Run it with nothing but kvdisk and torch installed; vLLM is not needed::

    python tools/gpu_report.py --dir /nvme/somewhere --json report.json

It prints tables and a verdict per goal for docs/measurements/gpu.md, in less than eight minutes
(``--minutes``), and writes the same as JSON. Without a GPU it says so and ends with 2; with failed
tests it ends with 1. The directory should be on the drive that kvdisk shall use; what is written
there (``--file-bytes``) is removed. ``--host`` needs no GPU: it measures stores and loads between
blocks in host memory and slots there or on the drive, beside a plain copy and the drive alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from machine import Machine
from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.device.base import Device, Op, Transfer
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import await_batches
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, Geometry, GroupGeometry, round_up, slot_offset
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, SegmentSpec
from kvdisk.worker.arena import Arena
from kvdisk.worker.direct import Direct
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import OpenFile, Resources

if TYPE_CHECKING:
    import torch

    from kvdisk.worker.copier import CudaLanes as Lanes
    from kvdisk.worker.copier import HostCopier

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = "gpu_report: there is no CUDA GPU here (torch finds none), so there is nothing to report."
MIB = 1 << 20
BLOCK_BYTES = (64 << 10, 256 << 10, 2 * MIB, 8 * MIB)
STAGING_BYTES = 128 * MIB
PART_BYTES, MOST_PARTS = 8 * MIB, 4
SCRATCH_BYTES = 64 * MIB
TESTS_S = 150
LARGE_CACHE_BYTES = 20 << 30
"""More than torch's index arithmetic of 32 bits reaches with words of 8 bytes."""
LARGE_COPY, GATHERED, DRIVE, POSIX, STRAIGHT = (
    "one large copy",
    "gathered",
    "the drive alone",
    "drive, pinned memory",
    "drive, gds, straight",
)
COPIES, MOVES = ("gather", "scatter"), ("store", "load", "load unverified")
THREADS = (1, 2, 4)
GOAL_BYTES, LEAST, MOST_LOSS, UNTOUCHED_BYTES = 256 << 10, 0.9, 0.03, 64 * MIB


class Shape(NamedTuple):
    """How a group's layers lie. ``kinds``: bytes of a token of each kind of layer, which take turns
    in the payload; ``blocks_first``: whether all of a block lies together."""

    name: str
    layers: int
    kinds: tuple[int, ...]
    blocks_first: bool = False


LAYERS_FIRST = Shape("layers outermost", 32, (8,))
BLOCKS_FIRST = Shape("blocks outermost", 32, (8,), blocks_first=True)
MLA = Shape("MLA with indexer", 61, (1152, 132))
LARGE_CACHE = LAYERS_FIRST._replace(name=f"layers outermost, cache of {LARGE_CACHE_BYTES >> 30} GiB")
SHAPES = (LAYERS_FIRST, BLOCKS_FIRST)
MLA_BYTES = 64 * MLA.layers * sum(MLA.kinds)
"""Of a block of 64 tokens."""


@dataclass
class Speed:
    """How fast something was. ``samples``: bytes (of the model: steps) a second; none where ``why``
    says why not."""

    route: str
    what: str
    block_bytes: int
    samples: list[float] = field(default_factory=list)
    why: str = ""

    @property
    def median(self) -> float:
        """Of the samples; 0 without any."""
        return statistics.median(self.samples) if self.samples else 0.0

    @property
    def words(self) -> str:
        """The median, in GB/s."""
        return self.why or f"{self.median / 1e9:.2f}"


@dataclass
class Verdict:
    """Whether a goal was met. ``met``: None: not measured."""

    goal: str
    line: str
    found: str
    met: bool | None


@dataclass
class Report:
    """What is printed, and written as JSON. ``took_s``: all of it; ``taken_bytes``: of the first
    GPU's memory, by a rank on the second one; -1: not known, ``second`` says why."""

    machine: dict[str, str]
    tests: dict[str, Any] = field(default_factory=dict)
    gds: str = ""
    speeds: list[Speed] = field(default_factory=list)
    taken_bytes: int = -1
    second: str = "there is one GPU"
    verdicts: list[Verdict] = field(default_factory=list)
    took_s: float = 0.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """Return what an error says, for a table."""
    return next(iter(str(error).splitlines()), type(error).__name__)


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
        found |= {"gpus": str(torch.cuda.device_count())}
    return found


def run_tests(directory: Path) -> dict[str, Any]:
    """Run tests/gpu, on files of the directory; return counts and the last lines."""
    with tempfile.TemporaryDirectory(dir=directory) as base:
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "gpu", "-rs"]
        try:
            done = subprocess.run(
                [*command, "--basetemp", str(Path(base) / "tests"), "tests/gpu"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=TESTS_S,
            )
        except subprocess.TimeoutExpired:
            return {"code": 1, "last_lines": [f"the tests did not end in {TESTS_S} s"]}
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    return {"code": done.returncode, **counts, "last_lines": done.stdout.splitlines()[-15:]}


# -- copies ----------------------------------------------------------------------------------------


def device_of(lanes: Lanes | None) -> torch.device:
    """Return where blocks are: host memory without lanes."""
    import torch

    return torch.device("cpu") if lanes is None else lanes.device


def on_gpu(lanes: Lanes | None) -> bool:
    return device_of(lanes).type == "cuda"


def measure_plain(lanes: Lanes | None, byte_count: int, repetitions: int) -> list[Speed]:
    """Return the speed of one large copy between pinned memory and the GPU, each way: the limit of
    the others."""
    import torch

    def memory() -> torch.Tensor:
        if on_gpu(lanes):
            return torch.ones(byte_count, dtype=torch.uint8, pin_memory=True)
        return Arena([round_up(byte_count, ALIGNMENT)], [1], pin=False).tensor(0)[0, :byte_count].fill_(1)

    host = memory()
    gpu = torch.ones(byte_count, dtype=torch.uint8, device=lanes.device) if lanes is not None else memory()

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if lanes is not None:
            lanes.record(None).synchronize()

    ways = {"gather": partial(copy, host, gpu), "scatter": partial(copy, gpu, host)}
    return measure_ways(LARGE_COPY, ways, byte_count, byte_count, repetitions)


def measure_ways(
    route: str, ways: Mapping[str, Callable[[], None]], block_bytes: int, byte_count: int, repetitions: int
) -> list[Speed]:
    """Return the speed of each, once it is warm, their repetitions in turn."""
    found = {what: Speed(route, what, block_bytes) for what in ways}
    for what, act in [*ways.items()] * (1 + repetitions):
        found[what].samples.append(speed_of(byte_count, act))
    for speed in found.values():
        del speed.samples[0]
    return list(found.values())


def make_layers(lanes: Lanes | None, shape: Shape, block_bytes: int, count: int) -> list[Any]:
    """Return the layers of ``count`` blocks of about ``block_bytes``, in the order of a payload, as
    vLLM lays them out: each kind together, in one allocation."""
    import torch

    tokens = max(1, block_bytes // (shape.layers * sum(shape.kinds)))
    kinds = [tokens * each for each in shape.kinds]
    block = shape.layers * sum(kinds)
    whole = torch.randint(0, 256, (count * block,), dtype=torch.uint8, device=device_of(lanes))
    layers: dict[tuple[int, int], torch.Tensor] = {}
    start = 0
    for kind, size in enumerate(kinds):
        apart = 1 if shape.blocks_first else count
        for layer in range(shape.layers):
            stride = block if shape.blocks_first else size
            layers[layer, kind] = whole.as_strided((count, size), (stride, 1), start + layer * size * apart)
        start += shape.layers * size * apart
    return [layers[place] for place in sorted(layers)]


def payload_of(layers: Sequence[torch.Tensor], block: int) -> bytes:
    """Return a block's bytes, as they should be in its slot."""
    return b"".join(layer[block].cpu().numpy().tobytes() for layer in layers)


def make_copier(lanes: Lanes | None, layers: Sequence[torch.Tensor]) -> HostCopier:
    from kvdisk.worker.copier import CudaCopier, HostCopier, LayerBlocks

    groups = [LayerBlocks(layers)]
    return HostCopier(groups) if lanes is None else CudaCopier(groups, lanes, SCRATCH_BYTES)


def measure_both(lanes: Lanes, shape: Shape, block_bytes: int, options: Any) -> list[Speed]:
    """Return the copier's speeds as it chooses, and where it gathers all, to choose anew by."""
    given = lanes, shape, block_bytes, options.copy_bytes, options.repetitions
    chosen = measure_copies(*given)
    with patch("kvdisk.worker.copier.STRAIGHT_BYTES", 1 << 60):
        gathered = measure_copies(*given)
    for speed in gathered:
        speed.route = f"{GATHERED}, {shape.name}"
    return chosen + gathered


def measure_copies(
    lanes: Lanes, shape: Shape, block_bytes: int, total_bytes: int, repetitions: int, cache_bytes: int = 0
) -> list[Speed]:
    """Return the copier's speeds both ways, between scattered blocks on the GPU and neighbouring
    pinned slots. ``cache_bytes``: of the GPU's blocks, if more than are moved."""
    from kvdisk.worker.copier import Slots

    count = max(2, total_bytes // block_bytes)
    layers = make_layers(lanes, shape, block_bytes, max(count, cache_bytes // block_bytes))
    geometry = geometry_of(layers)
    arena = Arena(geometry.slot_sizes, [count], pin=on_gpu(lanes))
    arena.await_pinned()
    copier = make_copier(lanes, layers)
    slots = Slots(arena, 0, range(count))
    blocks = random.Random(0).sample(range(layers[0].shape[0]), count)  # noqa: S311 - the same ones each time
    ways = {
        "gather": lambda: copier.gather(0, blocks, slots).synchronize(),
        "scatter": lambda: copier.scatter(0, slots, blocks).synchronize(),
    }
    size = geometry.groups[0].payload_bytes
    found = measure_ways(f"copy, {shape.name}", ways, block_bytes, count * size, repetitions)
    for at in (0, count - 1):
        if bytes(arena.view(0, at)[HEADER_BYTES : HEADER_BYTES + size]) != payload_of(layers, blocks[at]):
            raise RuntimeError(f"wrong bytes were copied: {shape.name}, {block_bytes} bytes")
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


def geometry_of(layers: Sequence[torch.Tensor]) -> Geometry:
    """Return that of one group of these layers."""
    return Geometry((GroupGeometry(0, 16, sum(int(layer.shape[1]) for layer in layers)),), 1, 16)


class Route:
    """A mover whose stores and loads go one way between blocks on the GPU and slots of a tier, in
    jobs of all blocks.

    ``layers``: the blocks' bytes. ``memory``: closed at the end.
    """

    whats = MOVES

    def __init__(
        self, resources: Resources, layers: Sequence[torch.Tensor], tier: Tier, memory: Sequence[Any] = ()
    ) -> None:
        self.layers = layers
        self.moved_bytes = layers[0].shape[0] * resources.geometry.groups[0].payload_bytes
        self._count, self._tier, self._memory = int(layers[0].shape[0]), tier, memory
        self._mover = Mover(resources, io_deadline_s=120.0)
        self._last = 0
        self._run(JobKind.OPEN_HOME, home=HomeSpec("00" * 16, bytes(32)))
        if tier is Tier.NVME:
            self._run(JobKind.OPEN_SEGMENT, segment=SegmentSpec(0, resources.geometry.slot_sizes[0], self._count))

    def store(self) -> None:
        """Store every block; all have to arrive."""
        self._run(JobKind.STORE, self._moves())

    def load(self) -> None:
        """Load every block; all have to be right."""
        self._run(JobKind.LOAD, self._moves())

    def check(self) -> None:
        """Store all, lose one, load all: raises RuntimeError where it does not come back."""
        self.store()
        before = payload_of(self.layers, 1)
        for layer in self.layers:
            layer[1].zero_()
        self.load()
        if payload_of(self.layers, 1) != before:
            raise RuntimeError("a block came back with other bytes")

    def close(self) -> None:
        """End the mover, and give memory and file back."""
        self._mover.close()
        for memory in self._memory:
            memory.close()

    def _moves(self) -> list[Move]:
        keys = [make_block_key(at.to_bytes(32, "big"), 0) for at in range(self._count)]
        return [Move(key, 1, at, {self._tier: Slot(0, at)}) for at, key in enumerate(keys)]

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


def drive_route(
    lanes: Lanes, directory: Path, make: Callable[[], Device], block_bytes: int, count: int, *, direct: bool = False
) -> Route:
    """Return the route to a file of the directory: through pinned staging, or straight. ``make``:
    its device."""
    from kvdisk.worker.gpu_staging import GpuStaging

    layers = make_layers(lanes, LAYERS_FIRST, block_bytes, count)
    geometry = geometry_of(layers)
    slots = [max(8, STAGING_BYTES // geometry.slot_sizes[0])]
    staging = Arena(geometry.slot_sizes, slots, pin=on_gpu(lanes))
    staging.await_pinned()
    every = frozenset({0})
    way = Direct(GpuStaging(geometry.slot_sizes, slots, lanes), every, every) if direct else None
    copier = make_copier(lanes, layers)
    resources = Resources(
        geometry, 0, None, staging, copier, make(), OneSegment(directory), way, checksum_threads=max(THREADS)
    )
    return Route(resources, layers, Tier.NVME, [staging] if way is None else [staging, way.staging])


class Memory:
    """Blocks of a shape, and a CPU tier with a slot for each, for routes that share them."""

    def __init__(self, lanes: Lanes | None, shape: Shape, block_bytes: int, total_bytes: int) -> None:
        self.layers = make_layers(lanes, shape, block_bytes, max(2, total_bytes // block_bytes))
        self._geometry = geometry_of(self.layers)
        sizes = self._geometry.slot_sizes
        self._arena = Arena(sizes, [self.layers[0].shape[0]], pin=on_gpu(lanes))
        self._staging = Arena(sizes, [1], pin=False)
        self._arena.await_pinned()
        self._copier = make_copier(lanes, self.layers)

    def route(self, threads: int) -> Route:
        """Return a route that seals and verifies on so many threads."""
        resources = Resources(
            self._geometry,
            0,
            self._arena,
            self._staging,
            self._copier,
            PosixDevice(),
            OneSegment(Path()),
            checksum_threads=threads,
        )
        return Route(resources, self.layers, Tier.CPU)

    def close(self) -> None:
        """Give the tier's memory back, after the routes."""
        self._arena.close()
        self._staging.close()


@contextmanager
def unverified() -> Iterator[None]:
    """Let loads go without their checksums, to see what these cost."""
    with (
        patch("kvdisk.worker.slot_headers.SlotHeaders.check", lambda *_: ({}, [])),
        patch("kvdisk.worker.gpu_staging.PayloadSums.of", lambda *_: None),
    ):
        yield


def measure_routes(
    makers: Mapping[str, Callable[[], Route | DriveAlone]], block_bytes: int, repetitions: int
) -> list[Speed]:
    """Return the speeds of stores and loads by each route, their repetitions in turn. ``makers``:
    by name."""
    routes: dict[str, Route | DriveAlone] = {}
    found = []
    try:
        for name, make in makers.items():
            try:
                routes[name] = make()
                routes[name].check()
                found += [Speed(name, what, block_bytes) for what in routes[name].whats]
            except (ConfigError, OSError, RuntimeError) as error:
                found.append(Speed(name, MOVES[0], block_bytes, why=first_line(error)))
        for speed in [speed for speed in found if not speed.why] * repetitions:
            route = routes[speed.route]
            with unverified() if speed.what == MOVES[2] else nullcontext():
                act = route.store if speed.what == MOVES[0] else route.load
                speed.samples.append(speed_of(route.moved_bytes, act))
    finally:
        for route in routes.values():
            route.close()
    return found


def measure_memory(
    lanes: Lanes | None, shape: Shape, block_bytes: int, total_bytes: int, threads: Sequence[int], repetitions: int
) -> list[Speed]:
    """Return the speeds of stores and loads to and from memory, by threads."""
    with closing(Memory(lanes, shape, block_bytes, total_bytes)) as memory:
        makers = {memory_name(shape, count): partial(memory.route, count) for count in threads}
        return measure_routes(makers, block_bytes, repetitions)


def memory_name(shape: Shape, threads: int) -> str:
    return f"memory, {shape.name}, checksum threads: {threads}"


class DriveAlone:
    """The drive, in transfers as the mover's, with the methods of a ``Route``. Raises OSError."""

    whats = MOVES[:2]

    def __init__(self, directory: Path, block_bytes: int, file_bytes: int) -> None:
        self._slot_bytes = HEADER_BYTES + block_bytes
        self._each = max(1, round(PART_BYTES / self._slot_bytes))
        self._count = max(self._each, file_bytes // self._slot_bytes // self._each * self._each)
        self.moved_bytes = self._count * block_bytes
        self._files, self._device = OneSegment(directory), PosixDevice()
        self._arena = Arena([self._slot_bytes], [MOST_PARTS * self._each], pin=False)
        self._fd = self._files.open_segment(SegmentSpec(0, self._slot_bytes, self._count)).fd
        self._device.attach_memory(self._arena.memory)
        self._device.attach_file(self._fd)

    def store(self) -> None:
        """Write the file."""
        self._move(Op.WRITE)

    def load(self) -> None:
        """Read it."""
        self._move(Op.READ)

    def check(self) -> None:
        """Write the file once: what was never written is not read from the drive."""
        self.store()

    def close(self) -> None:
        """Give memory and file back."""
        self._device.close()
        self._files.close()
        self._arena.close()

    def _move(self, op: Op) -> None:
        waiting: list[int] = []
        for start in range(0, self._count, self._each):
            while len(waiting) >= MOST_PARTS:
                ended = {outcome.ticket for outcome in self._device.poll(1.0)}
                waiting = [ticket for ticket in waiting if ticket not in ended]
            buffer = self._arena.view(0, start // self._each % MOST_PARTS * self._each, self._each)
            transfer = Transfer(self._fd, slot_offset(self._slot_bytes, start), (buffer,))
            waiting.append(self._device.submit(op, [transfer]))
        await_batches(self._device, waiting)


def measure_drive(
    lanes: Lanes | None, directory: Path, block_bytes: int, file_bytes: int, gds: str, repetitions: int
) -> list[Speed]:
    """Return the speeds of the drive alone, and of stores and loads to and from it. ``gds``: why
    there is no straight way."""
    count = max(2, file_bytes // (block_bytes + HEADER_BYTES))  # room for headers, too
    makers: dict[str, Callable[[], Route | DriveAlone]] = {
        DRIVE: partial(DriveAlone, directory, block_bytes, file_bytes),
        POSIX: partial(drive_route, lanes, directory, PosixDevice, block_bytes, count),
    }
    if not gds:
        makers[STRAIGHT] = partial(drive_route, lanes, directory, GdsDevice, block_bytes, count, direct=True)
    return measure_routes(makers, block_bytes, repetitions)


# -- the model, and the other GPU ------------------------------------------------------------------


def measure_model(lanes: Lanes, route: Route, options: Any) -> list[Speed]:
    """Return steps a second of a kernel as a forward pass has them, alone and beside loads and
    stores from and to memory."""
    import torch

    side, seconds = options.side, options.step_s
    left = torch.randn(side, side, device=lanes.device, dtype=torch.bfloat16)
    found = [Speed("model", what, side) for what in ("alone", "beside loads", "beside stores")]

    def steps() -> float:
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() < began_s + seconds:
            for _ in range(8):
                torch.mm(left, left)
            lanes.record(None).synchronize()
            count += 1
        return count / (time.perf_counter() - began_s)

    steps()
    for speed in found * options.repetitions:
        with busy(lanes, {"beside loads": route.load, "beside stores": route.store}.get(speed.what)):
            speed.samples.append(steps())
    return found


@contextmanager
def busy(lanes: Lanes, act: Callable[[], None] | None) -> Iterator[None]:
    """Do something again and again on another thread meanwhile."""
    import torch

    end, failed = Event(), list[BaseException]()

    def repeat() -> None:
        try:
            if on_gpu(lanes):
                torch.cuda.set_device(lanes.device)
            while act is not None and not end.is_set():
                act()
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if failed:
        raise failed[0]


def child_command() -> list[str]:
    """Return what runs a rank on the second GPU: it says so, and waits for a line."""
    return [sys.executable, str(Path(__file__).resolve()), "--rank-on-second"]


def be_second_rank() -> int:
    """Store and load on the second GPU as a rank does, and stay until told to end."""
    import torch

    from kvdisk.worker.copier import CudaLanes

    torch.cuda.set_device(1)  # as vLLM does, on the model's thread alone
    with closing(Memory(CudaLanes(), LAYERS_FIRST, MIB, 64 * MIB)) as memory, closing(memory.route(2)) as route:
        route.check()
        print("moved", flush=True)
        sys.stdin.readline()
    return 0


def free_bytes_of_first() -> int:
    """Return what the first GPU has left."""
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


def taken_by_second() -> int:
    """Return how much memory of the first GPU a rank on the second takes; -1 with one GPU. Raises
    RuntimeError where the rank failed."""
    import torch

    if torch.cuda.device_count() < 2:
        return -1
    before = free_bytes_of_first()
    with subprocess.Popen(child_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        moved = child.stdout.readline().strip()
        taken = before - free_bytes_of_first()
        child.communicate("\n")
    if moved != "moved" or child.returncode:
        raise RuntimeError("the rank on the second GPU failed")
    return max(0, taken)


# -- verdicts --------------------------------------------------------------------------------------


def judge(report: Report) -> list[Verdict]:
    """Return whether each goal was met, line by line."""
    known = {(speed.route, speed.what, speed.block_bytes): speed.median for speed in report.speeds if speed.samples}
    limits = {what: speed for (route, what, _), speed in known.items() if route == LARGE_COPY}
    found: list[Verdict] = []

    def ratio(goal: str, line: str, share: float, of: float) -> None:
        found.append(Verdict(goal, line, f"{share / of:.2f}", share / of >= LEAST))

    goal = f"copies, and moves from memory, at least {LEAST} of one large copy"
    judged = ("copy, ", *(memory_name(shape, THREADS[-1]) for shape in (LAYERS_FIRST, BLOCKS_FIRST)))
    for (route, what, size), speed in known.items():
        way = {"store": "gather", "load": "scatter"}.get(what, what)
        if size >= GOAL_BYTES and way in limits and route.startswith(judged):
            ratio(goal, f"{size >> 10} KiB, {route}, {what}", speed, limits[way])
    goal = f"drive to GPU at least {LEAST} of the drive"
    for (route, what, size), speed in known.items():
        if route == DRIVE and what == "load" and size >= GOAL_BYTES:
            ways = {name: known[name, what, size] for name in (POSIX, STRAIGHT) if (name, what, size) in known}
            if ways:
                best = max(ways, key=lambda name: ways[name])
                ratio(goal, f"{size >> 10} KiB, {best}", ways[best], speed)
    goal = f"a forward pass beside loses at most {MOST_LOSS:.0%}"
    model = {what: speed for (route, what, _), speed in known.items() if route == "model"}
    for what in ("beside loads", "beside stores"):
        if what in model:
            loss = 1 - model[what] / model["alone"]
            found.append(Verdict(goal, what, f"{loss:.1%}", loss <= MOST_LOSS))
    goal = "a rank on the second GPU takes nothing of the first"
    if report.taken_bytes < 0:
        found.append(Verdict(goal, "memory of the first GPU", report.second, None))
    else:
        taken = f"{report.taken_bytes / MIB:.0f} MiB"
        found.append(Verdict(goal, "memory of the first GPU", taken, report.taken_bytes < UNTOUCHED_BYTES))
    missing = [speed for speed in report.speeds if speed.why]
    return found + [
        Verdict("all was measured", f"{each.block_bytes >> 10} KiB, {each.route}", each.why, None) for each in missing
    ]


# -- what is printed ---------------------------------------------------------------------------


def show(report: Report) -> None:
    """Print the report as Markdown, for docs/measurements/gpu.md."""
    console = Console(width=200, markup=False, highlight=False)
    tests = [f"{report.tests[what]} {what}" for what in ("passed", "failed", "skipped") if what in report.tests]
    console.print("GPU:", ", ".join(f"{name} {value}" for name, value in report.machine.items()))
    console.print(f"\nTests: {', '.join(tests) or 'none ran'}. All in {report.took_s:.0f} s.")
    if report.gds:
        console.print(f"Not here: gds: {report.gds}")
    by_route = {
        (speed.block_bytes, speed.route, speed.what): speed for speed in report.speeds if speed.route != "model"
    }
    copies = {speed.route for speed in report.speeds if speed.what in COPIES}
    for whats, routes in ((COPIES, copies), (MOVES, {route for _, route, _ in by_route} - copies)):
        table = Table("block", "route", *(f"{what} GB/s" for what in whats), box=box.MARKDOWN)
        for size, route in dict.fromkeys(key[:2] for key in by_route if key[1] in routes):
            cells = [by_route[key].words for what in whats if (key := (size, route, what)) in by_route]
            table.add_row(f"{size >> 10} KiB", route, *cells)
        console.print(table)
    model = [f"{speed.what} {speed.median:.1f}" for speed in report.speeds if speed.route == "model"]
    if model:
        console.print(f"Steps of a forward-like kernel a second: {', '.join(model)}.\n")
    if report.verdicts:
        table = Table("goal", "line", "found", "verdict", box=box.MARKDOWN)
        words = {True: "met", False: "missed", None: "not measured"}
        for verdict in report.verdicts:
            table.add_row(verdict.goal, verdict.line, verdict.found, words[verdict.met])
        console.print(table)


def work_of(lanes: Lanes, options: Any, gds: str) -> Iterator[tuple[str, int, Callable[[], list[Speed]]]]:
    """Yield what is measured: its name, size of blocks, and how; what matters most first."""
    moved, repetitions = options.copy_bytes, options.repetitions
    yield LARGE_COPY, 0, partial(measure_plain, lanes, moved, repetitions)
    for size in options.sizes:
        for shape in SHAPES:
            yield f"copy, {shape.name}", size, partial(measure_both, lanes, shape, size, options)
        for shape, threads in ((LAYERS_FIRST, THREADS), (BLOCKS_FIRST, THREADS[-1:])):
            act = partial(measure_memory, lanes, shape, size, options.arena_bytes, threads, repetitions)
            yield f"memory, {shape.name}", size, act
    yield f"copy, {MLA.name}", MLA_BYTES, partial(measure_both, lanes, MLA, MLA_BYTES, options)
    yield "model", options.side, partial(measure_beside, lanes, options)
    yield f"copy, {LARGE_CACHE.name}", 2 * MIB, partial(measure_large_cache, lanes, options)
    for size in options.sizes:
        act = partial(measure_drive, lanes, options.dir, size, options.file_bytes, gds, repetitions)
        yield POSIX, size, act


def measure_beside(lanes: Lanes, options: Any) -> list[Speed]:
    """Return what moves of blocks of 2 MiB cost the model."""
    block_bytes = min(2 * MIB, options.arena_bytes // 4)
    with (
        closing(Memory(lanes, LAYERS_FIRST, block_bytes, options.arena_bytes)) as memory,
        closing(memory.route(THREADS[-1])) as route,
    ):
        route.store()
        return measure_model(lanes, route, options)


def measure_large_cache(lanes: Lanes, options: Any) -> list[Speed]:
    """Return the copier's speeds where blocks span more than 16 GiB, if the GPU has the room."""
    import torch

    name, cache_bytes = f"copy, {LARGE_CACHE.name}", options.cache_bytes
    if on_gpu(lanes) and torch.cuda.mem_get_info(lanes.device)[0] < cache_bytes + (4 << 30):
        return [Speed(name, COPIES[0], 2 * MIB, why="the GPU has not so much free")]
    return measure_copies(lanes, LARGE_CACHE, 2 * MIB, options.copy_bytes, options.repetitions, cache_bytes)


def make_report(lanes: Lanes, options: Any) -> Report:
    """Measure all, one after the other; what is not begun within the minutes is left out."""
    began_s = time.monotonic()
    report = Report(describe_machine(options.dir), gds=gds_unavailable() or "")
    if not options.no_tests:
        say("the tests of tests/gpu")
        report.tests = run_tests(options.dir)
    for name, size, measure in work_of(lanes, options, report.gds):
        if time.monotonic() > began_s + 60 * options.minutes:
            report.speeds.append(Speed(name, MOVES[0], size, why="no time was left"))
            continue
        say(f"{name}, {size >> 10} KiB")
        try:
            report.speeds += measure()
        except (ConfigError, OSError, RuntimeError) as error:  # torch's, of a full GPU, is one of the last
            report.speeds.append(Speed(name, MOVES[0], size, why=first_line(error)))
    try:
        report.taken_bytes = taken_by_second()
    except RuntimeError as error:
        report.second = first_line(error)
    report.verdicts = judge(report)
    report.took_s = time.monotonic() - began_s
    return report


def make_host_report(options: Any) -> Report:
    """Measure routes between host memory and host memory or the drive, without any GPU."""
    began_s = time.monotonic()
    report = Report(describe_machine(options.dir), speeds=measure_plain(None, options.copy_bytes, options.repetitions))
    for size in options.sizes:
        say(f"memory, {size >> 10} KiB")
        for shape in (LAYERS_FIRST, BLOCKS_FIRST):
            report.speeds += measure_memory(None, shape, size, options.arena_bytes, (0, *THREADS), options.repetitions)
        say(f"drive, {size >> 10} KiB")
        report.speeds += measure_drive(None, options.dir, size, options.file_bytes, "no GPU", options.repetitions)
    report.took_s = time.monotonic() - began_s
    return report


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--dir", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--json", type=Path, help="where the same goes as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=BLOCK_BYTES, help="of blocks, in bytes")
    parser.add_argument("--file-bytes", type=int, default=1 << 30, help="of the file of each route")
    parser.add_argument("--copy-bytes", type=int, default=1 << 30, help="moved by each copy")
    parser.add_argument("--arena-bytes", type=int, default=2 << 30, help="of the memory that routes go to and from")
    parser.add_argument("--cache-bytes", type=int, default=LARGE_CACHE_BYTES, help="of the GPU's blocks, once")
    parser.add_argument("--side", type=int, default=4096, help="of the matrices of the forward-like kernel")
    parser.add_argument("--step-s", type=float, default=1.0, help="for each sample of that")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="after which nothing more is begun")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--host", action="store_true", help="measure without a GPU: its blocks are in host memory")
    parser.add_argument("--rank-on-second", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.dir = options.dir.resolve()
    for size in options.sizes:
        if size <= 0 or size % (LAYERS_FIRST.layers * 8):
            parser.error(f"a size must be a multiple of {LAYERS_FIRST.layers * 8}: {size}")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.rank_on_second:
        return be_second_rank()
    if options.host:
        report = make_host_report(options)
    else:
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
