# SPDX-License-Identifier: Apache-2.0
"""What ``gpu_report.py`` measures: copies, stores, loads, the drive, and a model's steps beside.

Blocks and slots are paired by a seeded permutation, as those of a running engine are. Whatever is
timed has moved bytes that are compared: all blocks, with a copy of them from before, after they
were zeroed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from one_by_one import first_line

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.device.base import Device, Op, Transfer
from kvdisk.device.gds import GdsDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import await_batches
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, Geometry, GroupGeometry, round_up, slot_offset
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, SegmentSpec
from kvdisk.worker.arena import Arena
from kvdisk.worker.direct import Direct
from kvdisk.worker.mover import Mover
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import OpenFile

if TYPE_CHECKING:
    import torch

    from kvdisk.worker.copier import CudaLanes as Lanes
    from kvdisk.worker.copier import HostCopier
    from kvdisk.worker.copier_base import Event as Copied

MIB = 1 << 20
STAGING_BYTES = 128 * MIB
BATCH_BYTES, MOST_BATCHES = 8 * MIB, 4
JOB_BYTES, MOST_JOBS = 32 * MIB, 4
"""Of a store or load, as of a long prompt; and how many are under way."""
SCRATCH_BYTES = 64 * MIB
COMPARED_BYTES = 64 * MIB
SILENT_S = 20.0
"""A route of which no job ends for so long is given up."""
PASS_S, LEAST_FILE_BYTES = 2.0, 32 * MIB
"""How long a pass over the drive's file may take; the file is made so small."""
LARGE_COPY, GATHERED, DRIVE, POSIX, STRAIGHT = (
    "one large copy",
    "gathered",
    "the drive alone",
    "drive, pinned memory",
    "drive, gds, straight",
)
MODEL, PYTHON_MODEL, PINNING_MODEL = "model", "model, bound by Python", "model, while memory is pinned"
ALONE, BESIDE_LOADS, BESIDE_STORES, BESIDE_PINNING = "alone", "beside loads", "beside stores", "beside pinning"
LEAST_STEPS = 20
COPIES, MOVES = ("gather", "scatter"), ("store", "load", "load unverified")
THREADS = (1, 2, 4)


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
SHAPES = (BLOCKS_FIRST, LAYERS_FIRST)
ROW_BYTES = (2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10)
ROWS, ROWS_APART, MOST_APART = 2048, 16, 1900 * MIB
"""Rows of a copy that lie near each other, and far apart: nearly as far as CUDA takes."""
MLA_BYTES = 64 * MLA.layers * sum(MLA.kinds)
"""Of a block of 64 tokens."""
LARGE_CACHE_BYTES = 40 << 30
"""More than 2^31 words of 16 bytes, beyond which torch's index arithmetic is another one."""
LARGE_CACHE_BLOCK_BYTES = 192 << 10
"""Too small to be copied without kernels."""


@dataclass
class Speed:
    """How fast something was. ``samples``: bytes (of the model: steps) a second; none where ``why``
    says why not, and ``trace`` where."""

    route: str
    what: str
    block_bytes: int
    samples: list[float] = field(default_factory=list)
    why: str = ""
    trace: str = ""

    @property
    def median(self) -> float:
        """Of the samples; 0 without any."""
        return statistics.median(self.samples) if self.samples else 0.0

    @property
    def words(self) -> str:
        """The median, in GB/s."""
        return self.why or f"{self.median / 1e9:.2f}"


class WrongBytesError(Exception):
    """Something was moved, and is not what it was."""


class Pace:
    """How often something is measured: ``repetitions``, fewer where they take longer than
    ``seconds`` together, and once at least."""

    def __init__(self, repetitions: int, seconds: float) -> None:
        self.repetitions, self.seconds = repetitions, seconds

    def rounds(self) -> Iterator[int]:
        """Yield the rounds, as long as there is time."""
        end_s = time.monotonic() + self.seconds
        for at in range(self.repetitions):
            if at and time.monotonic() > end_s:
                return
            yield at


def speed_of(byte_count: int, act: Callable[[], None]) -> float:
    """Return bytes per second of something that is done when it returns."""
    began_s = time.perf_counter()
    act()
    return byte_count / (time.perf_counter() - began_s)


def shuffled(numbers: Iterable[int]) -> list[int]:
    """Return numbers in an order that is the same each time."""
    listed = list(numbers)
    random.Random(0).shuffle(listed)  # noqa: S311 - nothing of security
    return listed


# -- blocks ----------------------------------------------------------------------------------------


def device_of(lanes: Lanes | None) -> torch.device:
    """Return where blocks are: host memory without lanes."""
    import torch

    return torch.device("cpu") if lanes is None else lanes.device


def on_gpu(lanes: Lanes | None) -> bool:
    return bool(device_of(lanes).type == "cuda")


def settle(lanes: Lanes | None) -> None:
    """Wait for what the current stream was given: the movers' streams do not."""
    if lanes is not None:
        lanes.record(None).synchronize()


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
    settle(lanes)
    return [layers[place] for place in sorted(layers)]


class Original:
    """What ``count`` blocks were, half of them at each end of a cache. ``blocks``: their ids.

    It takes no part in index kernels with offsets as large as those that are judged by it.
    """

    def __init__(self, lanes: Lanes | None, layers: Sequence[torch.Tensor], count: int) -> None:
        every, first = int(layers[0].shape[0]), count // 2
        self.blocks = [*range(first), *range(every - (count - first), every)]
        self._lanes, self._layers = lanes, layers
        self._ends = [slice(0, first), slice(every - (count - first), every)]
        self._kept = [[layer[end].clone() for layer in layers] for end in self._ends]

    def erase(self) -> None:
        """Zero the blocks; they do not match then."""
        for end in self._ends:
            for layer in self._layers:
                layer[end].zero_()
        settle(self._lanes)
        if self.matches():
            raise WrongBytesError("zeroed blocks are what they were: the comparison sees nothing")

    def matches(self) -> bool:
        """Whether every block is what it was."""
        import torch

        return all(
            torch.equal(layer[end], kept)
            for end, all_kept in zip(self._ends, self._kept, strict=True)
            for layer, kept in zip(self._layers, all_kept, strict=True)
        )

    def in_slots(self, arena: Arena, slots: Sequence[int]) -> bool:
        """Whether every block is in its slot; these are in the order of ``blocks``."""
        import torch

        size = sum(int(layer.shape[1]) for layer in self._layers)
        each, at = max(1, COMPARED_BYTES // size), 0
        for kept in self._kept:
            count = int(kept[0].shape[0])
            for start in range(0, count, each):
                payloads = torch.cat([layer[start : start + each] for layer in kept], 1)
                mine = torch.tensor(slots[at + start : at + min(start + each, count)])
                found = arena.tensor(0)[mine, HEADER_BYTES : HEADER_BYTES + size]
                if not torch.equal(found.to(payloads.device), payloads):
                    return False
            at += count
        return True


def geometry_of(layers: Sequence[torch.Tensor]) -> Geometry:
    """Return that of one group of these layers."""
    return Geometry((GroupGeometry(0, 16, sum(int(layer.shape[1]) for layer in layers)),), 1, 16)


def make_copier(lanes: Lanes | None, layers: Sequence[torch.Tensor]) -> HostCopier:
    from kvdisk.worker.copier import CudaCopier, HostCopier, LayerBlocks

    groups = [LayerBlocks(layers)]
    return HostCopier(groups) if lanes is None else CudaCopier(groups, lanes, SCRATCH_BYTES)


# -- copies ----------------------------------------------------------------------------------------


def measure_ways(
    route: str, ways: Mapping[str, Callable[[], None]], block_bytes: int, byte_count: int, pace: Pace
) -> list[Speed]:
    """Return the speed of each, once it is warm, their repetitions in turn."""
    found = {what: Speed(route, what, block_bytes) for what in ways}
    for act in ways.values():
        act()
    for _ in pace.rounds():
        for what, act in ways.items():
            found[what].samples.append(speed_of(byte_count, act))
    return list(found.values())


def measure_plain(lanes: Lanes | None, byte_count: int, pace: Pace) -> list[Speed]:
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
        settle(lanes)

    ways = {"gather": partial(copy, host, gpu), "scatter": partial(copy, gpu, host)}
    return measure_ways(LARGE_COPY, ways, byte_count, byte_count, pace)


def measure_both(lanes: Lanes, shape: Shape, block_bytes: int, total_bytes: int, pace: Pace) -> Iterator[Speed]:
    """Yield the copier's speeds as it chooses, and where it gathers all, to choose anew by."""
    given = lanes, shape, block_bytes, total_bytes, pace
    yield from measure_copies(*given)
    with patch("kvdisk.worker.copier.STRAIGHT_BYTES", 1 << 60):
        for speed in measure_copies(*given):
            speed.route = f"{GATHERED}, {shape.name}"
            yield speed


def await_end(copy: Copied | None) -> None:
    assert copy is not None, "nothing was to be copied"
    copy.synchronize()


def measure_copies(
    lanes: Lanes | None, shape: Shape, block_bytes: int, total_bytes: int, pace: Pace, cache_bytes: int = 0
) -> list[Speed]:
    """Return the copier's speeds both ways, between blocks on the GPU and pinned slots in another
    order. ``cache_bytes``: of the GPU's blocks, if more than are moved: half of these lie at each
    end. Raises WrongBytesError."""
    from kvdisk.worker.copier_base import Slots

    count = max(2, total_bytes // block_bytes)
    layers = make_layers(lanes, shape, block_bytes, max(count, cache_bytes // block_bytes))
    original, geometry = Original(lanes, layers, count), geometry_of(layers)
    with closing(Arena(geometry.slot_sizes, [count], pin=on_gpu(lanes))) as arena:
        arena.await_pinned()
        copier = make_copier(lanes, layers)
        indices, order = shuffled(range(count)), random.Random(1).sample(range(count), count)  # noqa: S311
        blocks = [original.blocks[at] for at in order]
        slots = Slots(arena, 0, [indices[at] for at in order])
        ways = {
            "gather": lambda: await_end(copier.gather(0, blocks, slots)),
            "scatter": lambda: await_end(copier.scatter(0, slots, blocks)),
        }
        size = geometry.groups[0].payload_bytes
        found = measure_ways(f"copy, {shape.name}", ways, block_bytes, count * size, pace)
        arena.tensor(0).zero_()
        ways["gather"]()
        if not original.in_slots(arena, indices):
            raise WrongBytesError(f"a gather brought other bytes: {shape.name}, {block_bytes} bytes")
        original.erase()
        ways["scatter"]()
        if not original.matches():
            raise WrongBytesError(f"a scatter brought other bytes: {shape.name}, {block_bytes} bytes")
    return found


def measure_rows(lanes: Lanes, span_bytes: int, pace: Pace) -> Iterator[Speed]:
    """Yield the speed of copies of rows, by their size and how far they lie apart on the GPU, which
    decides what goes straight. ``span_bytes``: the most GPU memory that they lie in; 1 MiB, which
    the largest rows need, where less is asked for."""
    import torch

    from kvdisk.worker.copier import Lane, Rows

    if not lanes.copies_rows:
        yield Speed("rows", COPIES[0], 0, why="torch's CUDA runtime was not found")
        return
    least = 64 << 10
    span_bytes = max(span_bytes, (ROWS_APART + 1) * least)
    far = max(least, min(MOST_APART, span_bytes // ROWS_APART) // 4096 * 4096)
    gpu = torch.zeros(min(span_bytes, ROWS_APART * far + least), dtype=torch.uint8, device=device_of(lanes))
    settle(lanes)
    with closing(Arena([HEADER_BYTES + least], [ROWS], pin=on_gpu(lanes))) as arena:
        arena.await_pinned()
        host = arena.tensor(0).data_ptr()
        for pitch, rows in ((least, min(ROWS, gpu.numel() // least)), (far, ROWS_APART)):
            for row_bytes in ROW_BYTES:
                of_gpu, of_host, times = Rows(gpu.data_ptr(), pitch), Rows(host, row_bytes), max(1, ROWS // rows)

                def copy(lane: Lane, ways: tuple[Rows, Rows], row_bytes: int, rows: int, times: int) -> None:
                    for _ in range(times):
                        if not lanes.copy_rows(lane, *ways, row_bytes, rows, pinned=True):
                            raise RuntimeError("CUDA refused to copy rows")
                    lanes.record(lane).synchronize()

                given = row_bytes, rows, times
                ways = {
                    "gather": partial(copy, Lane.STORE, (of_host, of_gpu), *given),
                    "scatter": partial(copy, Lane.LOAD, (of_gpu, of_host), *given),
                }
                name = f"rows, {pitch >> 10} KiB apart"
                yield from measure_ways(name, ways, row_bytes, row_bytes * rows * times, pace)


def large_cache(shape: Shape, cache_bytes: int) -> Shape:
    """Return the shape under the name that it has in a cache of this size."""
    return shape._replace(name=f"{shape.name}, cache of {cache_bytes / (1 << 30):.0f} GiB")


def measure_large_cache(lanes: Lanes, shape: Shape, total_bytes: int, cache_bytes: int, pace: Pace) -> list[Speed]:
    """Return the copier's speeds, through its kernels, where blocks span so much, if the GPU has
    the room."""
    import torch

    named, block_bytes = large_cache(shape, cache_bytes), LARGE_CACHE_BLOCK_BYTES
    if on_gpu(lanes) and torch.cuda.mem_get_info(lanes.device)[0] < cache_bytes + 3 * total_bytes:
        return [Speed(f"copy, {named.name}", COPIES[0], block_bytes, why="the GPU has not so much free")]
    return measure_copies(lanes, named, block_bytes, total_bytes, pace, cache_bytes)


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

    def give_back(self) -> tuple[int, ...]:
        """See ``SegmentFiles``: nobody else removes its file."""
        return ()

    def close(self) -> None:
        """See ``SegmentFiles``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Route:
    """A mover whose stores and loads go one way between blocks on the GPU and slots of a tier.

    Jobs are as large as a long prompt's, several are under way, and their moves are made before.
    A tier in memory has its slots in any order; jobs to the drive have neighbouring slots, as a
    prompt's blocks get them, for blocks in any order. ``layers``: the blocks' bytes. ``memory``:
    closed at the end, also where this raises.
    """

    whats = MOVES

    def __init__(
        self,
        resources: Resources,
        lanes: Lanes | None,
        layers: Sequence[torch.Tensor],
        tier: Tier,
        memory: Sequence[Any] = (),
    ) -> None:
        self.layers = layers
        self._lanes, self._memory = lanes, memory
        count, payload_bytes = int(layers[0].shape[0]), resources.geometry.groups[0].payload_bytes
        self.moved_bytes = count * payload_bytes
        slots = shuffled(range(count))
        moves = [
            Move(make_block_key(block.to_bytes(32, "big"), 0), 1, (block,), {tier: Slot(0, slot)})
            for block, slot in enumerate(slots)
        ]
        if tier is Tier.NVME:
            moves.sort(key=lambda move: move.slots[tier])
        each = max(1, JOB_BYTES // payload_bytes)
        self._jobs = [tuple(moves[start : start + each]) for start in range(0, count, each)]
        self._mover = Mover(resources, io_deadline_s=120.0)
        self._last = 0
        with ExitStack() as undo:
            undo.callback(self.close)
            self._run(JobKind.OPEN_HOME, home=HomeSpec("00" * 16, bytes(32)))
            if tier is Tier.NVME:
                self._run(JobKind.OPEN_SEGMENT, segment=SegmentSpec(0, resources.geometry.slot_sizes[0], count))
            undo.pop_all()

    def store(self) -> None:
        """Store every block; all have to arrive."""
        self._run(JobKind.STORE, self._jobs)

    def load(self) -> None:
        """Load every block; all have to be right."""
        self._run(JobKind.LOAD, self._jobs)

    def check(self) -> None:
        """Store all, lose all, load all: raises WrongBytesError where one does not come back."""
        original = Original(self._lanes, self.layers, int(self.layers[0].shape[0]))
        self.store()
        original.erase()
        self.load()
        if not original.matches():
            raise WrongBytesError("blocks came back with other bytes")

    def close(self) -> None:
        """End the mover, and give memory and file back."""
        self._mover.close()
        for memory in self._memory:
            memory.close()

    def _run(self, kind: JobKind, jobs: Sequence[tuple[Move, ...]] = ((),), **fields: Any) -> None:
        """Run jobs to their ends, several at once. Raises RuntimeError where a move fails, and
        TimeoutError where nothing ends."""
        waiting, out, since_s = list(reversed(jobs)), set[JobId](), time.monotonic()
        while waiting or out:
            while waiting and len(out) < MOST_JOBS:
                self._last += 1
                job = Job(JobId(self._last), kind, waiting.pop(), **fields)
                out.add(job.id)
                self._mover.submit(Plan((job,)))
            self._mover.wait_any(0.1)
            for job_id, result in self._mover.poll().results.items():
                out.discard(job_id)
                since_s = time.monotonic()
                if result.failed:
                    why = next(iter(result.failed.values())).name
                    raise RuntimeError(f"{kind.name}: {len(result.failed)} blocks failed, {why}")
            if time.monotonic() > since_s + SILENT_S:
                raise TimeoutError(f"{kind.name}: no job has ended for {SILENT_S:.0f} s, {len(out)} are under way")


def drive_route(
    lanes: Lanes | None,
    directory: Path,
    make: Callable[[], Device],
    block_bytes: int,
    count: int,
    *,
    direct: bool = False,
) -> Route:
    """Return the route to a file of the directory: through pinned staging, or straight. ``make``:
    its device."""
    from kvdisk.worker.gpu_staging import GpuStaging

    layers = make_layers(lanes, LAYERS_FIRST, block_bytes, count)
    geometry = geometry_of(layers)
    slots = [max(8, STAGING_BYTES // geometry.slot_sizes[0])]
    every = frozenset({0})
    with ExitStack() as undo:
        staging = undo.enter_context(closing(Arena(geometry.slot_sizes, slots, pin=on_gpu(lanes))))
        staging.await_pinned()
        way = Direct(GpuStaging(geometry.slot_sizes, slots, lanes), every, every) if direct else None  # type: ignore[arg-type]
        copier = make_copier(lanes, layers)
        resources = Resources(
            geometry, 0, {}, staging, copier, make(), OneSegment(directory), way, checksum_threads=max(THREADS)
        )
        memory = [staging] if way is None else [staging, way.staging]
        route = Route(resources, lanes, layers, Tier.NVME, memory)
        undo.pop_all()
    return route


class Memory:
    """Blocks of a shape, and a CPU tier with a slot for each, for routes that share them."""

    def __init__(self, lanes: Lanes | None, shape: Shape, block_bytes: int, total_bytes: int) -> None:
        self.layers = make_layers(lanes, shape, block_bytes, max(2, total_bytes // block_bytes))
        self._lanes, self._geometry = lanes, geometry_of(self.layers)
        sizes = self._geometry.slot_sizes
        with ExitStack() as undo:
            self._arena = undo.enter_context(closing(Arena(sizes, [self.layers[0].shape[0]], pin=on_gpu(lanes))))
            self._staging = undo.enter_context(closing(Arena(sizes, [1], pin=False)))
            self._arena.await_pinned()
            self._copier = make_copier(lanes, self.layers)
            self._undo = undo.pop_all()

    def route(self, threads: int) -> Route:
        """Return a route that seals and verifies on so many threads."""
        resources = Resources(
            self._geometry,
            0,
            {Tier.CPU: self._arena},
            self._staging,
            self._copier,
            PosixDevice(),
            OneSegment(Path()),
            checksum_threads=threads,
        )
        return Route(resources, self._lanes, self.layers, Tier.CPU)

    def close(self) -> None:
        """Give the tier's memory back, after the routes."""
        self._undo.close()


@contextmanager
def unverified() -> Iterator[None]:
    """Let loads go without their checksums, to see what these cost."""
    with (
        patch("kvdisk.worker.slot_headers.SlotHeaders.check", lambda *_: ({}, [])),
        patch("kvdisk.worker.gpu_staging.PayloadSums.of", lambda *_: None),
    ):
        yield


def measure_routes(makers: Mapping[str, Callable[[], Route | DriveAlone]], block_bytes: int, pace: Pace) -> list[Speed]:
    """Return the speeds of stores and loads by each route, their repetitions in turn. ``makers``:
    by name."""
    routes: dict[str, Route | DriveAlone] = {}
    found = []
    with ExitStack() as undo:
        for name, make in makers.items():
            try:
                routes[name] = undo.enter_context(closing(make()))
                routes[name].check()
                found += [Speed(name, what, block_bytes) for what in routes[name].whats]
            except Exception as error:  # the other routes go on
                found.append(Speed(name, MOVES[0], block_bytes, why=first_line(error)))
        for _ in pace.rounds():
            for speed in (speed for speed in found if not speed.why):
                route = routes[speed.route]
                with unverified() if speed.what == MOVES[2] else nullcontext():
                    act = route.store if speed.what == MOVES[0] else route.load
                    speed.samples.append(speed_of(route.moved_bytes, act))
    return found


def measure_memory(
    lanes: Lanes | None, shape: Shape, block_bytes: int, total_bytes: int, threads: Sequence[int], pace: Pace
) -> list[Speed]:
    """Return the speeds of stores and loads to and from memory, by threads."""
    with closing(Memory(lanes, shape, block_bytes, total_bytes)) as memory:
        makers = {memory_name(shape, count): partial(memory.route, count) for count in threads}
        return measure_routes(makers, block_bytes, pace)


def memory_name(shape: Shape, threads: int) -> str:
    return f"memory, {shape.name}, checksum threads: {threads}"


class DriveAlone:
    """The drive, in transfers as the mover's, with the methods of a ``Route``. Raises OSError."""

    whats = MOVES[:2]

    def __init__(self, directory: Path, block_bytes: int, file_bytes: int) -> None:
        self._slot_bytes = HEADER_BYTES + block_bytes
        self._each = max(1, round(BATCH_BYTES / self._slot_bytes))
        self._count = max(self._each, file_bytes // self._slot_bytes // self._each * self._each)
        self.moved_bytes = self._count * block_bytes
        self._files, self._device = OneSegment(directory), PosixDevice()
        self._arena = Arena([self._slot_bytes], [MOST_BATCHES * self._each], pin=False)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._fd = self._files.open_segment(SegmentSpec(0, self._slot_bytes, self._count)).fd
            self._device.attach_memory(self._arena.memory)
            self._device.attach_file(self._fd)
            undo.pop_all()

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
            while len(waiting) >= MOST_BATCHES:
                ended = {outcome.ticket for outcome in self._device.poll(1.0)}
                waiting = [ticket for ticket in waiting if ticket not in ended]
            buffer = self._arena.view(0, start // self._each % MOST_BATCHES * self._each, self._each)
            transfer = Transfer(self._fd, slot_offset(self._slot_bytes, start), (buffer,))
            waiting.append(self._device.submit(op, [transfer]))
        await_batches(self._device, waiting)


def fitting_bytes(directory: Path, block_bytes: int, file_bytes: int) -> int:
    """Return the size of a file that the drive writes in ``PASS_S``, at most ``file_bytes``."""
    least = min(file_bytes, LEAST_FILE_BYTES)
    with closing(DriveAlone(directory, block_bytes, least)) as drive:
        written = speed_of(drive.moved_bytes, drive.store)
    return max(least, min(file_bytes, int(written * PASS_S)))


def measure_drive(
    lanes: Lanes | None, directory: Path, block_bytes: int, file_bytes: int, gds: str, pace: Pace
) -> list[Speed]:
    """Return the speeds of the drive alone, and of stores and loads to and from it. ``gds``: why
    there is no straight way."""
    file_bytes = fitting_bytes(directory, block_bytes, file_bytes)
    count = max(2, file_bytes // (block_bytes + HEADER_BYTES))  # room for headers, too
    makers: dict[str, Callable[[], Route | DriveAlone]] = {
        DRIVE: partial(DriveAlone, directory, block_bytes, file_bytes),
        POSIX: partial(drive_route, lanes, directory, PosixDevice, block_bytes, count),
    }
    if not gds:
        makers[STRAIGHT] = partial(drive_route, lanes, directory, GdsDevice, block_bytes, count, direct=True)
    return measure_routes(makers, block_bytes, pace)


# -- the model -------------------------------------------------------------------------------------


class Step:
    """A model's step as vLLM's thread does it: work in Python, a few KiB of inputs to the GPU,
    matrix products, and a few KiB of tokens back on a stream of their own, waited for by an event.

    ``products``: of matrices with ``side`` rows. ``python_s``: how long the work in Python takes
    where nobody else wants the interpreter. It is the same work each time, so that waits for the
    interpreter's lock show.
    """

    def __init__(self, lanes: Lanes, side: int, products: int, python_s: float) -> None:
        import torch

        self._lanes, self._products, cuda = lanes, products, on_gpu(lanes)
        self._left = torch.randn(side, side, device=lanes.device, dtype=torch.bfloat16)
        self._inputs = torch.zeros(4096, dtype=torch.uint8, device=lanes.device)
        self._host = torch.zeros(4096, dtype=torch.uint8, pin_memory=cuda)
        self._tokens = torch.zeros(4096, dtype=torch.uint8, pin_memory=cuda)
        self._stream = torch.cuda.Stream(lanes.device) if cuda else None
        began_s, self._rounds = time.perf_counter(), 10_000
        self._compute()
        self._rounds = max(1, round(self._rounds * python_s / (time.perf_counter() - began_s)))

    def _compute(self) -> int:
        total = 0
        for at in range(self._rounds):
            total += at & 7
        return total

    def __call__(self) -> None:
        """Make the step, and wait for its tokens."""
        import torch

        self._compute()
        self._inputs.copy_(self._host, non_blocking=True)
        for _ in range(self._products):
            torch.mm(self._left, self._left)
        if self._stream is None:
            self._tokens.copy_(self._inputs)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._lanes.device))
        with torch.cuda.stream(self._stream):
            self._tokens.copy_(self._inputs, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        event.synchronize()


def measure_model(lanes: Lanes, route: Route, side: int, step_s: float, pace: Pace) -> Iterator[Speed]:
    """Yield steps a second of a model, alone and beside loads and stores from and to memory: of one
    that the GPU holds up, and of one that Python does."""
    for name, products, python_s in ((MODEL, 8, 0.002), (PYTHON_MODEL, 1, 0.005)):
        step = Step(lanes, side, products, python_s)
        found = [Speed(name, what, side) for what in (ALONE, BESIDE_LOADS, BESIDE_STORES)]
        step()
        for _ in pace.rounds():
            for speed in found:
                with busy(lanes, {BESIDE_LOADS: route.load, BESIDE_STORES: route.store}.get(speed.what)):
                    count, began_s = 0, time.perf_counter()
                    while not count or time.perf_counter() < began_s + step_s:
                        step()
                        count += 1
                    speed.samples.append(count / (time.perf_counter() - began_s))
        yield from found


def measure_pinning(lanes: Lanes, byte_count: int, side: int, pace: Pace) -> Iterator[Speed]:
    """Yield a model's steps a second alone and beside the pinning of memory, and how fast that is
    then."""
    size, step = HEADER_BYTES + MIB, Step(lanes, side, 8, 0.002)
    alone, beside = (Speed(PINNING_MODEL, what, side) for what in (ALONE, BESIDE_PINNING))
    pinned = Speed("pinning", MOVES[0], size)
    step()
    for _ in pace.rounds():
        for speed in (alone, beside):
            pin = speed is beside and on_gpu(lanes)
            with closing(Arena([size], [max(1, byte_count // size)], pin=pin)) as arena:
                count, began_s = 0, time.perf_counter()
                while count < LEAST_STEPS or arena.is_pageable:
                    step()
                    count += 1
                    if time.perf_counter() > began_s + SILENT_S:
                        raise TimeoutError(f"memory is not pinned after {SILENT_S:.0f} s")
                took_s = time.perf_counter() - began_s
                speed.samples.append(count / took_s)
                if speed is beside:
                    pinned.samples.append(arena.total_bytes / took_s)
    yield from (alone, beside, pinned)


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


def measure_beside(lanes: Lanes, total_bytes: int, side: int, step_s: float, pace: Pace) -> Iterator[Speed]:
    """Yield what moves of blocks of 2 MiB cost the model."""
    block_bytes = min(2 * MIB, total_bytes // 4)
    with (
        closing(Memory(lanes, BLOCKS_FIRST, block_bytes, total_bytes)) as memory,
        closing(memory.route(THREADS[-1])) as route,
    ):
        route.store()
        yield from measure_model(lanes, route, side, step_s, pace)
