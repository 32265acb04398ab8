# SPDX-License-Identifier: Apache-2.0
"""Tests at start, while no block is used yet, whether copies move the right bytes on this machine.
So a driver or a GPU that moves others ends the start, and not a request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvdisk.errors import ConfigError
from kvdisk.geometry import HEADER_BYTES
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import HostCopier, LayerBlocks, Way
from kvdisk.worker.copier_base import Slots

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Event

logger = logging.getLogger("kvdisk.worker")

_MOST_SLOTS = 3
"""Slots of each group that take part at most."""


def check_copies(copier: HostCopier, staging: Arena, size_classes: Sequence[int]) -> None:
    """Copy blocks of each group to slots and back, by each way, and compare the bytes.

    The first blocks and the last one take part, and have their own bytes again at the end.
    ``staging``: not used yet. ``size_classes``: of each group's slots in it. The model's thread
    calls this before a mover has the copier. A straight way that fails is given up, with a warning.
    Raises ConfigError where blocks cannot be copied otherwise.
    """
    staging.await_pinned()
    _wait(copier.compute_done())  # for what the model's thread did with the blocks
    try:
        with ThreadPoolExecutor(1, "kvdisk-copy-check") as thread:
            thread.submit(_check, copier, staging, size_classes).result()
    except (RuntimeError, OSError) as error:  # torch's, of CUDA and of a full GPU
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"kvdisk cannot copy between the model's KV blocks and host memory: {why}") from error


def _check(copier: HostCopier, staging: Arena, size_classes: Sequence[int]) -> None:
    with copier.thread():
        for group, layers in enumerate(copier.groups):
            if not layers.payload_bytes:
                continue  # a stage of a pipeline may have no layer of a group
            for way in copier.ways(group):
                if _brings_all(copier, way, group, staging, size_classes[group]):
                    continue
                if not way.is_straight:
                    raise ConfigError(
                        "copies between the model's KV blocks and host memory bring wrong bytes on this machine "
                        f"(KV-cache group {group}): kvdisk cannot be used."
                    )
                logger.warning("CUDA copied wrong rows of blocks: from now on all are gathered.")
                copier.go_straight_no_more()


def _brings_all(copier: HostCopier, way: Way, group: int, staging: Arena, size_class: int) -> bool:
    """Return whether a few blocks have their bytes after a copy to slots, and from there to other
    blocks."""
    layers = copier.groups[group]
    each, last = layers.per_slot, layers.block_count - 1
    most = min(_MOST_SLOTS, staging.slot_counts[size_class], layers.block_count // each)
    if not most:
        return True  # no slot can be filled
    blocks = [*range(most * each - 1), last]
    slots, payload = list(range(most)), slice(HEADER_BYTES, HEADER_BYTES + layers.payload_bytes)
    before = _read(layers, blocks)
    numbers = np.random.default_rng(group).integers(0, 256, before.shape, np.uint8)
    expected, targets, in_slots = torch.from_numpy(numbers), blocks[::-1], staging.tensor(size_class)[: len(slots)]
    try:
        _write(layers, blocks, expected)
        copied = way.gather(group, blocks, Slots(staging, size_class, slots), copier.compute_done())
        if copied is None:
            return True  # it does not go this way, and not later
        copied.synchronize()
        if not torch.equal(in_slots[:, payload], expected):
            return False
        _write(layers, blocks, expected.bitwise_not())
        copied = way.scatter(group, Slots(staging, size_class, slots), targets, copier.compute_done())
        if copied is None:
            return True
        copied.synchronize()
        return bool(torch.equal(_read(layers, targets), expected))
    finally:
        _write(layers, blocks, before)
        in_slots.zero_()
        _wait(copier.compute_done())


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _read(layers: LayerBlocks, blocks: Sequence[int]) -> torch.Tensor:
    """Return the payloads of blocks, in host memory of their own. It uses no index kernel."""
    found = torch.stack([torch.cat([layer[block].cpu() for layer in layers.layers]) for block in blocks])
    return found.view(-1, layers.payload_bytes)


def _write(layers: LayerBlocks, blocks: Sequence[int], payloads: torch.Tensor) -> None:
    for block, payload in zip(blocks, payloads.view(len(blocks), layers.block_bytes), strict=True):
        parts = payload.split([int(layer.shape[1]) for layer in layers.layers])
        for layer, part in zip(layers.layers, parts, strict=True):
            layer[block].copy_(part)
