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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from itertools import accumulate, cycle, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, contiguous_runs, round_up
from kvdisk.worker.copies import Event, Passed, Slots
from kvdisk.worker.cudart import cuda_runtime, forget_error, relax_captures

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
    second dimension, with any stride in the first. A payload is the layers' bytes one after the
    other, in this order, and padding, which no copy touches; without layers all of it is. The
    tensors are vLLM's; they must live as long as copies are asked for.

    ``rows``: uint8 (num_blocks, payload_bytes), where all of a block lies together as in a payload;
    else None. ``row_bytes``: of the smallest row that ``rectangles`` yields.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        for layer in layers:
            assert layer.dtype == torch.uint8, layer.dtype
            assert layer.dim() == 2 and layer.stride(1) == 1, (layer.shape, layer.stride())
            assert layer.shape[0] == layers[0].shape[0], "layers of one group have the same blocks"
            assert layer.device == layers[0].device
        offsets = list(accumulate((int(layer.shape[1]) for layer in layers), initial=0))
        self.payload_bytes = offsets.pop()
        self.layers = tuple(layers)
        self.block_count = int(layers[0].shape[0]) if layers else 0
        kinds: dict[Any, list[int]] = {}
        for at, layer in enumerate(layers):
            kinds.setdefault((layer.untyped_storage().data_ptr(), layer.shape, layer.stride()), []).append(at)
        runs = [run for places in kinds.values() for run in _regular_runs(layers, offsets, places)]
        stacks = [_stack_of(layers, offsets, run) for run in runs]
        self._word = _widest_word(stacks)
        most_bytes = MOST_WORDS * self._word.itemsize
        self.stacks = [each for stack in stacks for each in _cut(stack, most_bytes)]
        first = layers[0] if layers else None
        together = first is not None and all(
            layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and layer.stride(0) == first.stride(0)
            and layer.storage_offset() == first.storage_offset() + offset
            for layer, offset in zip(layers, offsets, strict=True)
        )
        self.rows = (
            first.as_strided((first.shape[0], self.payload_bytes), first.stride())
            if together and first is not None
            else None
        )
        layer_bytes = min((int(layer.shape[1]) for layer in layers), default=0)
        self.row_bytes = layer_bytes if self.rows is None else self.payload_bytes

    def rectangles(self, blocks: Sequence[int], address: int, slot_bytes: int) -> Iterator[_Rectangle]:
        """Yield what lies at regular distances in blocks and in as many payloads, the first of them
        at ``address``: runs of blocks that lie as payloads do, or layers of one block."""
        if self.rows is not None:
            first, pitch = self.rows.data_ptr(), self.rows.stride(0)
            for start, count in contiguous_runs(blocks, len(blocks)):
                of_blocks = Rows(first + blocks[start] * pitch, pitch)
                yield of_blocks, Rows(address + start * slot_bytes, slot_bytes), self.payload_bytes, count
            return
        for stack in self.stacks:
            first, (of_block, apart, _) = stack.blocks.data_ptr(), stack.blocks.stride()
            count, layer_bytes = stack.blocks.shape[1:]
            for at, block in enumerate(blocks):
                of_slot = Rows(address + at * slot_bytes + stack.offset, stack.distance)
                yield Rows(first + block * of_block, apart), of_slot, layer_bytes, count

    def widened(self, part: torch.Tensor) -> torch.Tensor:
        """View a stack, or its part of slots, as the largest words that divide it: faster."""
        return part.view(self._word)


MOST_WORDS = 2**31 - 1
"""Beyond so many words between its first and last, torch gathers with slower arithmetic."""


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


def _cut(stack: Stack, most_bytes: int) -> Iterator[Stack]:
    """Cut a stack into such as span so many bytes at most, where less than a layer does not span
    more."""
    count, layer_bytes = stack.blocks.shape[1:]
    of_one = (stack.blocks.shape[0] - 1) * stack.blocks.stride(0) + layer_bytes
    most = (most_bytes - of_one) // stack.blocks.stride(1) + 1
    each = most if 0 < most < count else count
    for start in range(0, count, each):
        yield stack._replace(blocks=stack.blocks[:, start : start + each], offset=stack.offset + start * stack.distance)


def _widest_word(stacks: Sequence[Stack]) -> torch.dtype:
    sizes = [
        size
        for stack in stacks
        for size in (stack.blocks.shape[2], stack.blocks.storage_offset(), *stack.blocks.stride()[:2])
    ]
    # Nothing is computed with them: a complex number is 16 bytes that are moved at once.
    words = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return words[math.gcd(16, *sizes)]


def _payload_part(slots: torch.Tensor, stack: Stack) -> torch.Tensor:
    """Return a stack's part of slots (n, slot_bytes), as uint8 (n, layer count, layer_bytes)."""
    shape = (slots.shape[0], *stack.blocks.shape[1:])
    strides = (slots.stride(0), stack.distance, 1)
    return slots.as_strided(shape, strides, slots.storage_offset() + HEADER_BYTES + stack.offset)


def _runs(slots: Slots) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield runs of neighbouring slots: which of ``slots``, and their bytes (count, slot_bytes).
    None goes across the end of a piece of the memory."""
    every, piece = slots.memory.tensor(slots.size_class), slots.memory.piece_slots(slots.size_class)
    for start, count in contiguous_runs(slots.indices, len(slots.indices)):
        at, end = start, start + count
        while at < end:
            first = slots.indices[at]
            some = min(end - at, piece - first % piece)
            yield slice(at, at + some), every[first : first + some]
            at += some


_Copy = Callable[[int, Sequence[int], Slots, Event | None], Event | None]
_CopyBack = Callable[[int, Slots, Sequence[int], Event | None], Event | None]


class Way(NamedTuple):
    """One of the ways in which a copier gathers and scatters. ``is_straight``: it can be given up.
    Its functions return None where what is asked for does not go this way."""

    gather: _Copy
    scatter: _CopyBack
    is_straight: bool = False


class HostCopier:
    """Moves whole blocks between vLLM's tensors and slots of an arena. This one is the CPU
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

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event:  # noqa: ARG002
        """Start copying GPU blocks, by their ids, to as many slots, once ``after`` has passed."""
        at = torch.tensor(blocks)
        for run, target in _runs(slots):
            for stack in self.groups[group].stacks:
                torch.index_select(stack.blocks, 0, at[run], out=_payload_part(target, stack))
        return Passed()

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event:  # noqa: ARG002
        """Start copying slots to as many GPU blocks, once ``after`` has passed.

        A forward pass launched once the copy is done sees them.
        """
        at = np.array(blocks)
        for run, source in _runs(slots):
            for stack in self.groups[group].stacks:
                stack.blocks.numpy()[at[run]] = _payload_part(source, stack).numpy()
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
"""What a copy has to have on average to go straight between blocks and slots, without kernel and
scratch: each takes the mover's thread some microseconds. Not measured: ``tools/gpu_report.py``."""
STRAIGHT_ROW_BYTES = 16 << 10
"""The same of its smallest row: rows are a block's layers where these lie apart."""
_MOST_PITCH = 2**31 - 1


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

    def numbers(self, values: Sequence[int]) -> torch.Tensor:
        """Return int64 values on the device for the entered lane. Does not wait."""
        # From pageable memory the copy would first wait for all that the lane has to do.
        return torch.tensor(values, pin_memory=True).to(self.device, non_blocking=True)

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
        zeroed = lanes.record(None)
        for lane in Lane:
            lanes.wait(lane, zeroed)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """See ``HostCopier``."""
        device = self._lanes.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
            if device.type == "cuda":
                relax_captures()
            yield

    def compute_done(self) -> Event | None:
        """See ``HostCopier``."""
        return self._lanes.record(None)

    def hold_model(self) -> None:
        """See ``HostCopier``."""
        for lane in _BOTH[Lane.STORE]:
            self._lanes.wait(None, self._lanes.record(lane))

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event:
        """See ``HostCopier``."""
        straight = self._copy_straight(Lane.STORE, group, blocks, slots, after)
        return straight or self._gather(group, blocks, slots, after)

    def _gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None) -> Event:
        """Gather through scratch."""
        layers, used = self.groups[group], dict[Lane, None]()
        for lane, part, some, scratch in self._parts(Lane.STORE, slots):
            with self._lanes.on(lane):
                if after is not None and lane not in used:
                    self._lanes.wait(lane, after)
                at = self._lanes.numbers(blocks[part])
                for stack in layers.stacks:
                    target = layers.widened(_payload_part(scratch, stack))
                    torch.index_select(layers.widened(stack.blocks), 0, at, out=target)
                for run, neighbours in _runs(some):
                    neighbours.copy_(scratch[run], non_blocking=True)
            used[lane] = None
        return self._end_of(used)

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event:
        """See ``HostCopier``. The blocks' earlier owner has ended with ``after``."""
        straight = self._copy_straight(Lane.LOAD, group, blocks, slots, after)
        return straight or self._scatter(group, slots, blocks, after)

    def _scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None) -> Event:
        """Scatter through scratch."""
        layers, used = self.groups[group], dict[Lane, None]()
        for lane, part, some, scratch in self._parts(Lane.LOAD, slots):
            with self._lanes.on(lane):
                at = self._lanes.numbers(blocks[part])
                for run, neighbours in _runs(some):
                    scratch[run].copy_(neighbours, non_blocking=True)
                if after is not None and lane not in used:
                    self._lanes.wait(lane, after)
                for stack in layers.stacks:
                    target = layers.widened(stack.blocks)
                    target.index_copy_(0, at, layers.widened(_payload_part(scratch, stack)))
            used[lane] = None
        return self._end_of(used)

    def ways(self, group: int) -> list[Way]:
        """See ``HostCopier``."""
        through_scratch = Way(self._gather, self._scatter)
        if self.groups[group].row_bytes < STRAIGHT_ROW_BYTES:
            return [through_scratch]

        def gather(group: int, blocks: Sequence[int], slots: Slots, after: Event | None) -> Event | None:
            return self._copy_straight(Lane.STORE, group, blocks, slots, after, least_bytes=0)

        def scatter(group: int, slots: Slots, blocks: Sequence[int], after: Event | None) -> Event | None:
            return self._copy_straight(Lane.LOAD, group, blocks, slots, after, least_bytes=0)

        return [through_scratch, Way(gather, scatter, is_straight=True)]

    def go_straight_no_more(self) -> None:
        """See ``HostCopier``."""
        self._lanes.copies_rows = False

    def _straight(self, group: int, blocks: Sequence[int], slots: Slots, least_bytes: int) -> list[_Rectangle]:
        """Return copies of rows that need no scratch; none where they would have less than
        ``least_bytes`` on average, or too small rows, or the slots are on the GPU."""
        layers, found = self.groups[group], list[_Rectangle]()
        far_apart = any(stack.blocks.stride(1) > _MOST_PITCH for stack in layers.stacks)
        if not self._lanes.copies_rows or slots.memory.on_gpu or far_apart or layers.row_bytes < STRAIGHT_ROW_BYTES:
            return found
        assert HEADER_BYTES + layers.payload_bytes <= slots.memory.slot_sizes[slots.size_class], "slots of another size"
        for run, neighbours in _runs(slots):
            found += layers.rectangles(blocks[run], neighbours.data_ptr() + HEADER_BYTES, neighbours.stride(0))
        return found if layers.payload_bytes * len(blocks) >= least_bytes * len(found) else []

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
        for of_blocks, of_slots, row_bytes, count in copies:
            ways = (of_blocks, of_slots) if lane is Lane.LOAD else (of_slots, of_blocks)
            if not self._lanes.copy_rows(lane, *ways, row_bytes, count, pinned=not slots.memory.is_pageable):
                logger.warning("CUDA refused to copy rows of blocks: from now on all are gathered")
                self.go_straight_no_more()
                self._lanes.record(lane).synchronize()  # what has begun is not in the event of the gather
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
