# SPDX-License-Identifier: Apache-2.0
"""Copies between vLLM's blocks and arena slots.

vLLM: the layers of a group lie at a regular distance in one allocation, so that all layers of many
blocks are one strided view, and one index operation copies them all: ``LayerBlocks`` finds such
stacks. Layers that do not fit a stack become stacks of their own, one operation each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, contiguous_runs, round_up
from kvdisk.worker.arena import SlotMemory


class Event(Protocol):
    """A point in a stream of device work, such as the end of a copy: a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Passed:
    """``Event`` of what has ended already."""

    def query(self) -> bool:
        """See ``Event``."""
        return True

    def synchronize(self) -> None:
        """See ``Event``."""


class Slots(NamedTuple):
    """Slots of one size class."""

    memory: SlotMemory
    size_class: int
    indices: Sequence[int]


class Stack(NamedTuple):
    """Layers at a regular distance: uint8 (num_blocks, layer count, layer_bytes).

    ``offset``: bytes into the payload.
    """

    blocks: torch.Tensor
    offset: int


class LayerBlocks:
    """The blocks of one KV-cache group.

    ``layers``: per layer a uint8 tensor of shape (num_blocks, layer_bytes), contiguous in the
    second dimension, with any stride in the first. A payload is the layers' bytes one after the
    other, in this order, and padding, which no copy touches; without layers all of it is. The
    tensors are vLLM's; they must live as long as copies are asked for.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        for layer in layers:
            assert layer.dtype == torch.uint8, layer.dtype
            assert layer.dim() == 2 and layer.stride(1) == 1, (layer.shape, layer.stride())
            assert layer.shape[0] == layers[0].shape[0], "layers of one group have the same blocks"
            assert layer.device == layers[0].device
        self.payload_bytes = sum(int(layer.shape[1]) for layer in layers)
        self.stacks: list[Stack] = []
        start = offset = 0
        while start < len(layers):
            count = _regular_count(layers[start:])
            first = layers[start]
            layer_bytes = int(first.shape[1])
            distance = layers[start + 1].storage_offset() - first.storage_offset() if count > 1 else layer_bytes
            shape, strides = (first.shape[0], count, layer_bytes), (first.stride(0), distance, 1)
            self.stacks.append(Stack(first.as_strided(shape, strides, first.storage_offset()), offset))
            start += count
            offset += count * layer_bytes
        self._word = _widest_word(self.stacks)

    def widened(self, part: torch.Tensor) -> torch.Tensor:
        """View a stack, or its part of slots, as the largest integers that divide it: faster."""
        return part.view(self._word)


def _widest_word(stacks: Sequence[Stack]) -> torch.dtype:
    sizes = [
        size
        for stack in stacks
        for size in (stack.blocks.shape[2], stack.blocks.storage_offset(), *stack.blocks.stride()[:2])
    ]
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return words[math.gcd(8, *sizes)]


def _regular_count(layers: Sequence[torch.Tensor]) -> int:
    """Return how many of the first layers form one strided view (at least 1)."""
    first = layers[0]
    distance = 0
    for count, layer in enumerate(layers):
        step = layer.storage_offset() - layers[count - 1].storage_offset() if count else 0
        distance = step if count == 1 else distance
        if (
            layer.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or (layer.shape, layer.stride()) != (first.shape, first.stride())
            or (count and (step != distance or step <= 0))
        ):
            return count
    return len(layers)


def _payload_part(slots: torch.Tensor, stack: Stack) -> torch.Tensor:
    """Return a stack's part of slots (n, slot_bytes), as uint8 (n, layer count, layer_bytes)."""
    _, count, layer_bytes = stack.blocks.shape
    start = HEADER_BYTES + stack.offset
    return slots[:, start : start + count * layer_bytes].unflatten(1, (count, layer_bytes))


def _runs(slots: Slots) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield runs of neighbouring slots: which of ``slots``, and their bytes (count, slot_bytes)."""
    every = slots.memory.tensor(slots.size_class)
    for start, count in contiguous_runs(slots.indices, len(slots.indices)):
        first = slots.indices[start]
        yield slice(start, start + count), every[first : first + count]


class HostCopier:
    """Moves whole blocks between vLLM's tensors and slots of an arena. This one is the CPU
    platform's: it copies at once, on the mover's thread.

    ``groups``: the blocks of each KV-cache group, in order of their index. Only the payload of
    slots takes part, though a gather may overwrite their headers. From a call until the event that
    it returns has passed, the copier owns the slots and blocks. ``compute_done`` and ``hold_model``
    are called on the model's thread, all else on the mover's.
    """

    def __init__(self, groups: Sequence[LayerBlocks]) -> None:
        self._groups = tuple(groups)

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
            for stack in self._groups[group].stacks:
                torch.index_select(stack.blocks, 0, at[run], out=_payload_part(target, stack))
        return Passed()

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event:  # noqa: ARG002
        """Start copying slots to as many GPU blocks, once ``after`` has passed.

        A forward pass launched once the copy is done sees them.
        """
        at = np.array(blocks)
        for run, source in _runs(slots):
            for stack in self._groups[group].stacks:
                stack.blocks.numpy()[at[run]] = _payload_part(source, stack).numpy()
        return Passed()


class Lane(Enum):
    """The two streams of device work; each runs in order, beside the other."""

    STORE = "store"
    LOAD = "load"


class CudaLanes:
    """The streams of a CUDA device (None: the calling thread's current one), and what else
    ``CudaCopier`` needs of it. Tests have one that works at once.

    ``device``: where vLLM's blocks and the scratch are.
    """

    device: torch.device

    def __init__(self, device: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        self._streams = {lane: torch.cuda.Stream(self.device) for lane in Lane}

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


class CudaCopier(HostCopier):
    """The copier of an accelerator: pinned arena, vLLM's blocks, and scratch between them.

    ``groups``: on ``lanes.device``. ``gpu_scratch_bytes``: device memory for scratch, half for each
    lane, though never less than the largest slot. The scratch holds whole slots, so that neighbours
    in the arena move in one copy. What is larger goes in parts, whose order a lane keeps.
    """

    def __init__(self, groups: Sequence[LayerBlocks], lanes: CudaLanes, gpu_scratch_bytes: int) -> None:
        super().__init__(groups)
        self._lanes = lanes
        largest = max(HEADER_BYTES + round_up(group.payload_bytes, ALIGNMENT) for group in groups)
        self.scratch_bytes = max(gpu_scratch_bytes // 2, largest)
        # Zeros, so that headers and padding that a gather copies out hold no stale bytes.
        self._scratch = {lane: torch.zeros(self.scratch_bytes, dtype=torch.uint8, device=lanes.device) for lane in Lane}
        zeroed = lanes.record(None)
        for lane in Lane:
            lanes.wait(lane, zeroed)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """See ``HostCopier``."""
        device = self._lanes.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
            yield

    def compute_done(self) -> Event | None:
        """See ``HostCopier``."""
        return self._lanes.record(None)

    def hold_model(self) -> None:
        """See ``HostCopier``."""
        self._lanes.wait(None, self._lanes.record(Lane.STORE))

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event:
        """See ``HostCopier``."""
        layers = self._groups[group]
        with self._lanes.on(Lane.STORE):
            if after is not None:
                self._lanes.wait(Lane.STORE, after)
            at = self._lanes.numbers(blocks)
            for part, some, scratch in self._parts(Lane.STORE, slots):
                for stack in layers.stacks:
                    target = layers.widened(_payload_part(scratch, stack))
                    torch.index_select(layers.widened(stack.blocks), 0, at[part], out=target)
                for run, neighbours in _runs(some):
                    neighbours.copy_(scratch[run], non_blocking=True)
            return self._lanes.record(Lane.STORE)

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event:
        """See ``HostCopier``. The blocks' earlier owner has ended with ``after``."""
        layers = self._groups[group]
        with self._lanes.on(Lane.LOAD):
            at = self._lanes.numbers(blocks)
            for part, some, scratch in self._parts(Lane.LOAD, slots):
                for run, neighbours in _runs(some):
                    scratch[run].copy_(neighbours, non_blocking=True)
                if after is not None and part.start == 0:
                    self._lanes.wait(Lane.LOAD, after)
                for stack in layers.stacks:
                    target = layers.widened(stack.blocks)
                    target.index_copy_(0, at[part], layers.widened(_payload_part(scratch, stack)))
            return self._lanes.record(Lane.LOAD)

    def _parts(self, lane: Lane, slots: Slots) -> Iterator[tuple[slice, Slots, torch.Tensor]]:
        """Yield as many slots as fit the scratch: which, and their scratch (count, slot_bytes)."""
        slot_bytes = slots.memory.slot_sizes[slots.size_class]
        most = self.scratch_bytes // slot_bytes
        for start in range(0, len(slots.indices), most):
            some = slots._replace(indices=slots.indices[start : start + most])
            count = len(some.indices)
            scratch = self._scratch[lane][: count * slot_bytes].view(count, slot_bytes)
            yield slice(start, start + count), some, scratch
