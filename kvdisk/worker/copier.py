# SPDX-License-Identifier: Apache-2.0
"""Copies between vLLM's blocks and arena slots.

vLLM: the layers of a kind lie at a regular distance in one allocation, so that all layers of many
blocks are one strided view, and one index operation copies them all: ``LayerBlocks`` finds such
stacks, also where kinds take turns. Layers that do not fit a stack become stacks of their own.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from itertools import accumulate, cycle, groupby, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, contiguous_runs, round_up
from kvdisk.messages import NO_BLOCK
from kvdisk.worker.copier_base import Event, Passed, Slots
from kvdisk.worker.cudart import cuda_runtime, forget_error, is_of_capture, is_out_of_memory, relax_captures

logger = logging.getLogger("kvdisk.worker")


class Stack(NamedTuple):
    """Layers at a regular distance: uint8 (num_blocks, layer count, layer_bytes).

    ``offset``: bytes into the payload, of the first one; ``distance``: from each to the next there.
    """

    blocks: torch.Tensor
    offset: int
    distance: int


class Rows(NamedTuple):
    """Rows at a regular distance: the first one's address, and bytes from each to the next."""

    address: int
    pitch: int


_Rectangle = tuple[Rows, Rows, int, int]
"""Rows of blocks, rows of slots, bytes of a row, and how many."""


class LayerBlocks:
    """The blocks of one KV-cache group.

    ``layers``: per layer a uint8 tensor of shape (num_blocks, layer_bytes), contiguous in the
    second dimension, with any stride in the first. ``per_slot``: blocks that a slot has. A block's
    bytes are its layers', one after the other, in this order; a payload is the bytes of
    ``per_slot`` blocks, one after the other, and padding, which no copy touches; without layers all
    of it is. The tensors are vLLM's; they must live as long as copies are asked for.

    ``rows``: uint8 (num_blocks, block_bytes), where all of a block lies together as in a payload;
    else None. ``row_bytes``: of the smallest row that ``rectangles`` yields. ``farthest``: from a
    layer to the next in a stack, at most.
    """

    def __init__(self, layers: Sequence[torch.Tensor], per_slot: int = 1) -> None:
        for layer in layers:
            assert layer.dtype == torch.uint8, layer.dtype
            assert layer.dim() == 2 and layer.stride(1) == 1, (layer.shape, layer.stride())
            assert layer.shape[0] == layers[0].shape[0], "layers of one group have the same blocks"
            assert layer.device == layers[0].device
        offsets = list(accumulate((int(layer.shape[1]) for layer in layers), initial=0))
        self.per_slot = per_slot
        self.block_bytes = offsets.pop()
        self.payload_bytes = per_slot * self.block_bytes
        self.layers = tuple(layers)
        self.block_count = int(layers[0].shape[0]) if layers else 0
        kinds: dict[Any, list[int]] = {}
        for at, layer in enumerate(layers):
            kinds.setdefault((layer.untyped_storage().data_ptr(), layer.shape, layer.stride()), []).append(at)
        runs = [run for places in kinds.values() for run in _regular_runs(layers, offsets, places)]
        self.stacks = [_stack_of(layers, offsets, run) for run in runs]
        self._word = _widest_word(self.stacks)
        first = layers[0] if layers else None
        together = first is not None and all(
            layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and layer.stride(0) == first.stride(0)
            and layer.storage_offset() == first.storage_offset() + offset
            for layer, offset in zip(layers, offsets, strict=True)
        )
        self.rows = (
            first.as_strided((first.shape[0], self.block_bytes), first.stride())
            if together and first is not None
            else None
        )
        # Numbers for ``rectangles``, of tensors that stay where they are: to ask these costs more.
        self._row_places = None if self.rows is None else Rows(self.rows.data_ptr(), self.rows.stride(0))
        self._stack_places = [
            (stack.blocks.data_ptr(), *stack.blocks.stride()[:2], *stack.blocks.shape[1:], stack.offset, stack.distance)
            for stack in self.stacks
        ]
        self.farthest = max((stack.blocks.stride(1) for stack in self.stacks), default=0)
        layer_bytes = min((int(layer.shape[1]) for layer in layers), default=0)
        self.row_bytes = layer_bytes if self.rows is None else self.block_bytes

    def rectangles(self, blocks: Sequence[int], address: int, slot_bytes: int) -> Iterator[_Rectangle]:
        """Yield what lies at regular distances in blocks and in their payloads, the first of these
        at ``address``: runs of blocks that lie as in payloads, or layers of one block.

        ``blocks``: see ``Copier``.
        """
        if self._row_places is not None:
            first, pitch = self._row_places
            for block, place, apart, count in self._runs(blocks, slot_bytes):
                yield Rows(first + block * pitch, pitch), Rows(address + place, apart), self.block_bytes, count
            return
        for first, of_block, apart, count, layer_bytes, offset, distance in self._stack_places:
            for at, block in enumerate(blocks):
                if block != NO_BLOCK:
                    slot, place = divmod(at, self.per_slot)
                    of_slot = Rows(address + slot * slot_bytes + place * self.block_bytes + offset, distance)
                    yield Rows(first + block * of_block, apart), of_slot, layer_bytes, count

    def _runs(self, blocks: Sequence[int], slot_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield runs of blocks that lie at regular distances in slots: the first block, its place
        there in bytes, those from each to the next, and how many they are."""
        if self.per_slot == 1:
            for start, count in contiguous_runs(blocks, len(blocks)):
                yield blocks[start], start * slot_bytes, slot_bytes, count
            return
        for slot in range(len(blocks) // self.per_slot):
            of_slot = blocks[slot * self.per_slot : (slot + 1) * self.per_slot]
            for start, some in _filled(of_slot):
                for at, count in contiguous_runs(some, len(some)):
                    yield some[at], slot * slot_bytes + (start + at) * self.block_bytes, self.block_bytes, count

    def places(self, blocks: Sequence[int]) -> Iterator[tuple[int, slice, Sequence[int]]]:
        """Yield the blocks at each place in slots: bytes of the payload before it, and runs of
        slots that have one there.

        ``blocks``: see ``Copier``.
        """
        for place in range(self.per_slot):
            for start, some in _filled(blocks[place :: self.per_slot]):
                yield place * self.block_bytes, slice(start, start + len(some)), some

    def widened(self, part: torch.Tensor) -> torch.Tensor:
        """View a stack, or its part of slots, as the largest words that divide it: faster."""
        return part.view(self._word)


def _filled(blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the runs of blocks without NO_BLOCK: where each starts, and the blocks."""
    if NO_BLOCK not in blocks:
        yield 0, blocks
        return
    for is_filled, run in groupby(range(len(blocks)), lambda at: blocks[at] != NO_BLOCK):
        places = list(run)
        if is_filled:
            yield places[0], blocks[places[0] : places[-1] + 1]


def _regular_runs(layers: Sequence[torch.Tensor], offsets: Sequence[int], places: list[int]) -> Iterator[list[int]]:
    """Cut layers of one kind into runs at a regular distance, in memory and in the payload."""
    run = places[:1]
    for at in places[1:]:
        steps = {
            (layers[two].storage_offset() - layers[one].storage_offset(), offsets[two] - offsets[one])
            for one, two in pairwise([*run[-2:], at])
        }
        if len(steps) > 1 or min(steps)[0] <= 0:
            yield run
            run = []
        run.append(at)
    yield run


def _stack_of(layers: Sequence[torch.Tensor], offsets: Sequence[int], run: list[int]) -> Stack:
    first, last = layers[run[0]], layers[run[-1]]
    layer_bytes, steps = int(first.shape[1]), max(1, len(run) - 1)
    apart = (last.storage_offset() - first.storage_offset()) // steps or layer_bytes
    shape = (first.shape[0], len(run), layer_bytes)
    blocks = first.as_strided(shape, (first.stride(0), apart, 1))
    return Stack(blocks, offsets[run[0]], (offsets[run[-1]] - offsets[run[0]]) // steps or layer_bytes)


def _widest_word(stacks: Sequence[Stack]) -> torch.dtype:
    sizes = [
        size
        for stack in stacks
        for size in (stack.blocks.shape[2], stack.blocks.storage_offset(), *stack.blocks.stride()[:2])
    ]
    # Nothing is computed with them: a complex number is 16 bytes that are moved at once.
    words = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return words[math.gcd(16, *sizes)]


def _payload_part(slots: torch.Tensor, stack: Stack, place: int) -> torch.Tensor:
    """Return a stack's part of slots (n, slot_bytes), as uint8 (n, layer count, layer_bytes).
    ``place``: of the block in the payload, in bytes."""
    shape = (slots.shape[0], *stack.blocks.shape[1:])
    strides = (slots.stride(0), stack.distance, 1)
    return slots.as_strided(shape, strides, slots.storage_offset() + HEADER_BYTES + place + stack.offset)


def _slot_runs(slots: Slots, most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbouring slots, ``most`` of them at most: where in ``slots``, and how many.
    None goes across the end of a piece of the memory."""
    piece = slots.memory.piece_slots(slots.size_class)
    for start, count in contiguous_runs(slots.indices, most):
        at, end = start, start + count
        while at < end:
            some = min(end - at, piece - slots.indices[at] % piece)
            yield at, some
            at += some


def _runs(slots: Slots, most_bytes: int | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield ``_slot_runs``: which of ``slots``, and their bytes (count, slot_bytes).
    ``most_bytes``: of those that are more than one slot."""
    every, count = slots.memory.tensor(slots.size_class), len(slots.indices)
    most = count if most_bytes is None else max(1, most_bytes // slots.memory.slot_sizes[slots.size_class])
    for at, some in _slot_runs(slots, most):
        yield slice(at, at + some), every[slots.indices[at] : slots.indices[at] + some]


def _of(run: slice, blocks: Sequence[int], layers: LayerBlocks) -> Sequence[int]:
    """Return the blocks of some slots."""
    return blocks[run.start * layers.per_slot : run.stop * layers.per_slot]


_Copy = Callable[[int, Sequence[int], Slots, Event | None], Event | None]
_CopyBack = Callable[[int, Slots, Sequence[int], Event | None], Event | None]


class Way(NamedTuple):
    """One of the ways in which a copier gathers and scatters. ``is_straight``: it can be given up.
    Its functions return None where what is asked for does not go this way."""

    gather: _Copy
    scatter: _CopyBack
    is_straight: bool = False


class HostCopier:
    """``Copier`` of vLLM's blocks: between its tensors and slots of an arena. This one is the CPU
    platform's: it copies at once, on the mover's thread.

    ``groups``: the blocks of each KV-cache group, in order of their index. Only the payload of
    slots takes part, though a gather may overwrite their headers. From a call until the event that
    it returns has passed, the copier owns the slots and blocks. ``compute_done`` and ``hold_model``
    are called on the model's thread, all else on the mover's.
    """

    def __init__(self, groups: Sequence[LayerBlocks]) -> None:
        self.groups = tuple(groups)

    def ways(self, group: int) -> list[Way]:  # noqa: ARG002
        """Return every way that blocks of a group may be copied by, to try each."""
        return [Way(self.gather, self.scatter)]

    def go_straight_no_more(self) -> None:
        """Leave the straight way."""

    def thread(self) -> AbstractContextManager[Any]:
        """Return what the mover's thread runs within: on its GPU, in vLLM's inference mode."""
        mode: AbstractContextManager[Any] = torch.inference_mode()
        return mode

    def compute_done(self) -> Event | None:
        """Return the end of the model's work launched so far, for ``after``; None: it has ended."""
        return None

    def hold_model(self) -> None:
        """Let the model's next work begin after every gather so far. No wait on the host."""

    def settle(self) -> None:
        """Wait until no copy is under way, once none begins any more. Any thread; does not
        raise."""

    def gather(
        self,
        group: int,
        blocks: Sequence[int],
        slots: Slots,
        after: Event | None = None,  # noqa: ARG002
    ) -> Event | None:
        """Start copying GPU blocks to slots, once ``after`` has passed; ``blocks``: see ``Copier``.

        None: the GPU has no memory for it now, and nothing of it is under way.
        """
        layers = self.groups[group]
        for run, target in _runs(slots):
            for place, some, found in layers.places(_of(run, blocks, layers)):
                at = torch.tensor(found)
                for stack in layers.stacks:
                    torch.index_select(stack.blocks, 0, at, out=_payload_part(target[some], stack, place))
        return Passed()

    def scatter(
        self,
        group: int,
        slots: Slots,
        blocks: Sequence[int],
        after: Event | None = None,  # noqa: ARG002
    ) -> Event | None:
        """Start copying slots to GPU blocks, once ``after`` has passed; ``blocks``: see ``Copier``.

        A forward pass launched once the copy is done sees them. None: as of ``gather``.
        """
        layers = self.groups[group]
        for run, source in _runs(slots):
            for place, some, found in layers.places(_of(run, blocks, layers)):
                at = np.array(found)
                for stack in layers.stacks:
                    stack.blocks.numpy()[at] = _payload_part(source[some], stack, place).numpy()
        return Passed()


class Lane(Enum):
    """The streams of device work; each runs in order, beside the others.

    Stores and loads have two each, and take them in turn: while one copies a part over the link,
    the other's kernel gathers, or scatters, the next.
    """

    STORE = "store"
    LOAD = "load"
    STORE_BESIDE = "store beside"
    LOAD_BESIDE = "load beside"


_BOTH = {Lane.STORE: (Lane.STORE, Lane.STORE_BESIDE), Lane.LOAD: (Lane.LOAD, Lane.LOAD_BESIDE)}
STRAIGHT_BYTES = 256 << 10
"""Bytes that a copy must have on average to go straight between blocks and slots, without kernel
and scratch: each such copy takes the mover's thread some microseconds. Not measured:
``tools/gpu_report.py``."""
STRAIGHT_ROW_BYTES = 16 << 10
"""Bytes that its smallest row must have; rows are a block's layers where these are apart."""
_MOST_PITCH = 2**31 - 1
COPY_BYTES = 2 << 20
"""The most bytes of one copy over the link. vLLM's own copies, of a few KiB in each step, wait
behind one such copy, about 40 us at 50 GB/s, and not behind a batch. Not measured."""


class CudaLanes:
    """The streams of a CUDA device (None: the calling thread's current one), and what else
    ``CudaCopier`` needs of it. Tests have one that works at once.

    ``device``: where vLLM's blocks and the scratch are. ``copies_rows``: whether ``copy_rows`` can
    be used.
    """

    device: torch.device
    copies_rows: bool

    def __init__(self, device: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        self._streams = {lane: torch.cuda.Stream(self.device) for lane in Lane}
        runtime = cuda_runtime()
        self.copies_rows = runtime is not None
        if runtime is not None:
            place = [ctypes.c_void_p, ctypes.c_size_t]
            types = [*place, *place, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
            # Pinned: a call only queues. Otherwise it copies, and others have to run meanwhile.
            self._memcpy_2d = {pinned: cuda_runtime(holding=pinned).cudaMemcpy2DAsync for pinned in (False, True)}
            for function in self._memcpy_2d.values():
                function.argtypes = types

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """Return a context in which operations of this thread go to the lane."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._streams[lane])
        return context

    def record(self, lane: Lane | None) -> Event:
        """Return an event after all that a lane (None: the current stream) was given so far."""
        event = torch.cuda.Event(blocking=True)  # a wait sleeps, and leaves the core to the model's thread
        event.record(self._streams[lane] if lane else torch.cuda.current_stream(self.device))
        recorded: Event = event
        return recorded

    def wait(self, lane: Lane | None, event: Event) -> None:
        """Let a lane (None: the current stream) wait on the device before what it is given next."""
        stream = self._streams[lane] if lane else torch.cuda.current_stream(self.device)
        stream.wait_event(event)

    def synchronize(self, lane: Lane) -> None:
        """Wait until a lane has done all that it was given. Ask again while a capture of graphs
        forbids to. Raises RuntimeError where the GPU fails."""
        while True:
            try:
                self._streams[lane].synchronize()
                return
            except RuntimeError as error:
                if not is_of_capture(error):
                    raise
            time.sleep(_CAPTURE_WAIT_S)

    def copy_rows(
        self, lane: Lane, target: Rows, source: Rows, row_bytes: int, count: int, *, pinned: bool = False
    ) -> bool:
        """Start one copy of ``count`` rows between host (LOAD: ``source``) and device; return
        whether CUDA did. ``pinned``: all of the host's memory is."""
        # torch would copy rows that are apart through memory of its own, and wait for it.
        kind, stream = 1 if lane is Lane.LOAD else 2, self._streams[lane].cuda_stream
        status: int = self._memcpy_2d[pinned](*target, *source, row_bytes, count, kind, stream)
        if status:
            forget_error()
        return status == 0


_CAPTURE_WAIT_S = 0.01
"""Between two tries of a call that a capture forbids: a capture takes some milliseconds."""
MOST_NUMBERS = 16 << 10
"""Block numbers that may be on their way to a lane's kernels: enough for several batches, however
small a slot is."""


def _in_pieces(rectangles: Iterable[_Rectangle]) -> Iterator[_Rectangle]:
    """Cut rectangles into such of ``COPY_BYTES`` at most: by rows, and rows that are longer."""
    for whole in rectangles:
        of_blocks, of_slots, row_bytes, count = whole
        if row_bytes * count <= COPY_BYTES:
            yield whole
            continue
        rows = max(1, COPY_BYTES // row_bytes)
        for row, at in product(range(0, count, rows), range(0, row_bytes, COPY_BYTES)):
            places = [Rows(each.address + row * each.pitch + at, each.pitch) for each in (of_blocks, of_slots)]
            yield places[0], places[1], min(COPY_BYTES, row_bytes - at), min(rows, count - row)


def _link_copies(slots: Slots, scratch: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield bytes of slots, and those of the scratch for them: neighbours at once, and over the
    link ``COPY_BYTES`` at most."""
    if slots.memory.on_gpu:
        yield from ((neighbours, scratch[run]) for run, neighbours in _runs(slots))
        return
    for run, neighbours in _runs(slots, COPY_BYTES):
        yield from zip(neighbours.split(COPY_BYTES, 1), scratch[run].split(COPY_BYTES, 1), strict=True)


class _Numbers:
    """Brings numbers of blocks to the kernels of a lane, through memory that is made once.

    Half of it takes the next numbers while the device may still read those of the other half.
    ``most``: that go at once.
    """

    def __init__(self, lanes: CudaLanes, lane: Lane, most: int) -> None:
        self._lanes, self._lane = lanes, lane
        self._most = max(most, MOST_NUMBERS)
        # From pageable memory a copy would first wait for all that the lane has to do.
        self._host = torch.zeros(2, self._most, dtype=torch.int64, pin_memory=lanes.device.type == "cuda")
        self._to_fill = self._host.numpy()
        self._on_device = torch.zeros(2, self._most, dtype=torch.int64, device=lanes.device)
        self._half, self._filled = 0, 0
        self._read: list[Event | None] = [None, None]
        """For each half, the event after the work that read numbers from it."""

    def put(self, values: Sequence[int]) -> torch.Tensor:
        """Return values on the device, for what the lane, which is entered, is given next.

        Waits only where so many others are on their way that there is no room.
        """
        if self._filled + len(values) > self._most:
            self._read[self._half] = self._lanes.record(self._lane)
            self._half, self._filled = 1 - self._half, 0
            read = self._read[self._half]
            if read is not None:
                read.synchronize()
        some = slice(self._filled, self._filled + len(values))
        self._filled = some.stop
        self._to_fill[self._half, some] = values
        return self._on_device[self._half, some].copy_(self._host[self._half, some], non_blocking=True)


def unless_full(lanes: CudaLanes, used: Sequence[Lane], start: Callable[[], Event]) -> Event | None:
    """Start work on lanes; return its end, or None where the GPU has no memory for it: then nothing
    of it is under way."""
    try:
        return start()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    for lane in used:  # what has begun would go on in slots and blocks that are given to others
        lanes.synchronize(lane)
    return None


class CudaCopier(HostCopier):
    """The copier of an accelerator: pinned arena, vLLM's blocks, and scratch between them.

    ``groups``: on ``lanes.device``. ``gpu_scratch_bytes``: device memory for scratch, a quarter for
    each lane, though never less than the largest slot. The scratch holds whole slots, so that
    neighbours in the arena move in one copy. What is larger goes in parts. Large blocks need no
    scratch.
    """

    def __init__(self, groups: Sequence[LayerBlocks], lanes: CudaLanes, gpu_scratch_bytes: int) -> None:
        super().__init__(groups)
        self._lanes = lanes
        largest = max(HEADER_BYTES + round_up(group.payload_bytes, ALIGNMENT) for group in groups)
        self.scratch_bytes = max(gpu_scratch_bytes // len(Lane), largest)
        # Zeros, so that headers and padding that a gather copies out hold no stale bytes.
        self._scratch = {lane: torch.zeros(self.scratch_bytes, dtype=torch.uint8, device=lanes.device) for lane in Lane}
        self._next = {lane: cycle(both) for lane, both in _BOTH.items()}
        most = self.scratch_bytes // (HEADER_BYTES + ALIGNMENT)  # of the smallest slots
        self._numbers = {lane: _Numbers(lanes, lane, most) for lane in Lane}
        zeroed = lanes.record(None)
        for lane in Lane:
            lanes.wait(lane, zeroed)

    @contextmanager
    def thread(self) -> Iterator[None]:
        device = self._lanes.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
            if device.type == "cuda":
                relax_captures()
            yield

    def compute_done(self) -> Event | None:
        return self._lanes.record(None)

    def hold_model(self) -> None:
        for lane in _BOTH[Lane.STORE]:
            self._lanes.wait(None, self._lanes.record(lane))

    def settle(self) -> None:
        """See ``HostCopier``. It looks at the lanes: a copy that failed half-way has no event."""
        for lane in Lane:
            with suppress(RuntimeError):  # a GPU that fails copies nothing any more
                self._lanes.synchronize(lane)

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event | None:
        def start() -> Event:
            straight = self._copy_straight(Lane.STORE, group, blocks, slots, after)
            return straight or self._gather(group, blocks, slots, after)

        return unless_full(self._lanes, _BOTH[Lane.STORE], start)

    def _gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None) -> Event:
        """Gather through scratch."""
        layers, used = self.groups[group], dict[Lane, None]()
        for lane, part, some, scratch in self._parts(Lane.STORE, slots):
            with self._lanes.on(lane):
                if after is not None and lane not in used:
                    self._lanes.wait(lane, after)
                for place, some_slots, found in layers.places(_of(part, blocks, layers)):
                    at = self._numbers[lane].put(found)
                    for stack in layers.stacks:
                        target = layers.widened(_payload_part(scratch[some_slots], stack, place))
                        torch.index_select(layers.widened(stack.blocks), 0, at, out=target)
                for in_slots, in_scratch in _link_copies(some, scratch):
                    in_slots.copy_(in_scratch, non_blocking=True)
            used[lane] = None
        return self._end_of(used)

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event | None:
        """See ``HostCopier``. The blocks' earlier owner has ended with ``after``."""

        def start() -> Event:
            straight = self._copy_straight(Lane.LOAD, group, blocks, slots, after)
            return straight or self._scatter(group, slots, blocks, after)

        return unless_full(self._lanes, _BOTH[Lane.LOAD], start)

    def _scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None) -> Event:
        """Scatter through scratch."""
        layers, used = self.groups[group], dict[Lane, None]()
        for lane, part, some, scratch in self._parts(Lane.LOAD, slots):
            with self._lanes.on(lane):
                for in_slots, in_scratch in _link_copies(some, scratch):
                    in_scratch.copy_(in_slots, non_blocking=True)
                if after is not None and lane not in used:
                    self._lanes.wait(lane, after)
                for place, some_slots, found in layers.places(_of(part, blocks, layers)):
                    at = self._numbers[lane].put(found)
                    for stack in layers.stacks:
                        source = layers.widened(_payload_part(scratch[some_slots], stack, place))
                        layers.widened(stack.blocks).index_copy_(0, at, source)
            used[lane] = None
        return self._end_of(used)

    def ways(self, group: int) -> list[Way]:
        through_scratch = Way(self._gather, self._scatter)
        if self.groups[group].row_bytes < STRAIGHT_ROW_BYTES:
            return [through_scratch]

        def gather(group: int, blocks: Sequence[int], slots: Slots, after: Event | None) -> Event | None:
            return self._copy_straight(Lane.STORE, group, blocks, slots, after, least_bytes=0)

        def scatter(group: int, slots: Slots, blocks: Sequence[int], after: Event | None) -> Event | None:
            return self._copy_straight(Lane.LOAD, group, blocks, slots, after, least_bytes=0)

        return [through_scratch, Way(gather, scatter, is_straight=True)]

    def go_straight_no_more(self) -> None:
        self._lanes.copies_rows = False

    def _straight(self, group: int, blocks: Sequence[int], slots: Slots, least_bytes: int) -> list[_Rectangle]:
        """Return copies of rows that need no scratch; none where they would have less than
        ``least_bytes`` on average, or too small rows, or the slots are on the GPU."""
        layers, memory, found = self.groups[group], slots.memory, list[_Rectangle]()
        far_apart = layers.farthest > _MOST_PITCH
        if not self._lanes.copies_rows or memory.on_gpu or far_apart or layers.row_bytes < STRAIGHT_ROW_BYTES:
            return found
        slot_bytes, first = memory.slot_sizes[slots.size_class], memory.address_of(slots.size_class) + HEADER_BYTES
        assert HEADER_BYTES + layers.payload_bytes <= slot_bytes, "slots of another size"
        for at, count in _slot_runs(slots, len(slots.indices)):
            address = first + slots.indices[at] * slot_bytes
            found += layers.rectangles(_of(slice(at, at + count), blocks, layers), address, slot_bytes)
        return found if layers.block_bytes * len(blocks) >= least_bytes * len(found) else []

    def _copy_straight(
        self,
        lane: Lane,
        group: int,
        blocks: Sequence[int],
        slots: Slots,
        after: Event | None,
        least_bytes: int | None = None,
    ) -> Event | None:
        """Start the copies of ``_straight``; None: there are none, or CUDA refused one, and is not
        asked again. ``least_bytes``: None: STRAIGHT_BYTES."""
        copies = self._straight(group, blocks, slots, STRAIGHT_BYTES if least_bytes is None else least_bytes)
        if copies and after is not None:
            self._lanes.wait(lane, after)
        for of_blocks, of_slots, row_bytes, count in _in_pieces(copies):
            ways = (of_blocks, of_slots) if lane is Lane.LOAD else (of_slots, of_blocks)
            if not self._lanes.copy_rows(lane, *ways, row_bytes, count, pinned=not slots.memory.is_pageable):
                logger.warning("CUDA refused to copy rows of blocks: from now on all are gathered")
                self.go_straight_no_more()
                self._lanes.synchronize(lane)  # what has begun is not in the event of the gather
                return None
        return self._lanes.record(lane) if copies else None

    def _parts(self, lane: Lane, slots: Slots) -> Iterator[tuple[Lane, slice, Slots, torch.Tensor]]:
        """Yield as many slots as fit the scratch: the lane whose turn it is, which slots, and its
        scratch for them (count, slot_bytes)."""
        slot_bytes = slots.memory.slot_sizes[slots.size_class]
        most = self.scratch_bytes // slot_bytes
        for start in range(0, len(slots.indices), most):
            some = slots._replace(indices=slots.indices[start : start + most])
            count, turn = len(some.indices), next(self._next[lane])
            scratch = self._scratch[turn][: count * slot_bytes].view(count, slot_bytes)
            yield turn, slice(start, start + count), some, scratch

    def _end_of(self, used: Iterable[Lane]) -> Event:
        """Return an event after all that these lanes, one at least, were given so far."""
        first, *others = used
        event = self._lanes.record(first)
        for lane in others:
            self._lanes.wait(lane, event)
            event = self._lanes.record(lane)
        return event
