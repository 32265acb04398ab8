# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a model fit into so many bytes, by the engine's own arithmetic; and what a store wrote lately."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvdisk.blocks import group_of
from kvdisk.cli.block_reader import read_blocks, unpack
from kvdisk.config import Config
from kvdisk.device.cap import HOME_OVERHEAD_BYTES, uses_charge_bytes
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.errors import ConfigError, CorruptRecord
from kvdisk.geometry import Geometry
from kvdisk.index.lmdb_index import map_bytes_for
from kvdisk.manager.segments import NvmeLayout

DAY_S = 86400


class Fit(NamedTuple):
    """What fits into a tier. ``tokens``: with the KV of all their KV-cache groups. ``blocks``: of all groups together.

    ``used_bytes``: payloads of so many tokens, on all ranks; the rest of ``capacity_bytes`` is headers, padding, index,
    and what no whole segment or block fits into.
    """

    capacity_bytes: int
    tokens: int
    blocks: int
    used_bytes: int


class WriteRate(NamedTuple):
    """What a store's engines wrote lately, as far as it is still there. ``seconds``: the time looked back on."""

    bytes_per_day: int
    seconds: int


def token_bytes(geometry: Geometry, parts: int) -> float:
    """Return the bytes of KV of one token on so many parts: ranks in memory, parts on the drive."""
    return sum(group.payload_bytes / group.block_tokens for group in geometry.groups) * parts


def fit_cpu(geometry: Geometry, cpu_bytes: int) -> Fit:
    """Return what fits into the CPU tier of ``cpu_bytes``, over all ranks. Raises ConfigError where nothing does."""
    slots = geometry.cpu_slots(cpu_bytes)
    if cpu_bytes and not all(slots):
        largest = max(geometry.slot_sizes) * geometry.rank_count
        raise ConfigError(f"cpu_bytes {cpu_bytes} holds no block of each kind; one needs up to {largest} bytes.")
    return _fit(geometry, slots, cpu_bytes, geometry.rank_count)


def fit_nvme(geometry: Geometry, nvme_bytes: int, drive_count: int, segment_bytes: int | None = None) -> Fit:
    """Return what fits into the NVMe tier. Raises ConfigError where nothing does."""
    budget_bytes = max(0, nvme_bytes - HOME_OVERHEAD_BYTES)
    wanted_bytes = segment_bytes or Config().segment_bytes
    layout = NvmeLayout.make(budget_bytes, wanted_bytes, geometry, map_bytes_for, uses_charge_bytes, drive_count)
    return _fit(geometry, layout.class_slots(geometry), nvme_bytes, geometry.part_count)


def _fit(geometry: Geometry, slots: Sequence[int], capacity_bytes: int, parts: int) -> Fit:
    """Count tokens all of whose blocks have slots. ``slots``: by size class."""
    per_token = [0.0] * len(slots)
    for group, size_class in zip(geometry.groups, geometry.size_classes, strict=True):
        per_token[size_class] += 1 / group.block_tokens
    tokens = int(min(count / needed for count, needed in zip(slots, per_token, strict=True)))
    tokens -= tokens % geometry.step_tokens
    blocks = sum(tokens // group.block_tokens for group in geometry.groups)
    return Fit(capacity_bytes, tokens, blocks, round(tokens * token_bytes(geometry, parts)))


def measure_writes(directories: Sequence[Path], now_s: int | None = None) -> WriteRate | None:
    """Return what a store's engines wrote in the last 24 hours, from when its blocks were stored; None: nothing.

    At least so much: blocks that have left in the meantime do not count. Of a store that is younger the time since its
    first home was made counts. Raises as ``list_homes``.
    """
    now_s = int(time.time()) if now_s is None else now_s
    summaries = [summary for summary in list_homes(directories) if summary.record is not None]
    written = 0
    began_s = now_s
    for summary, index in zip(summaries, read_blocks([one.index_path for one in summaries]), strict=True):
        assert summary.record is not None
        began_s = min(began_s, summary.record.created_s)
        try:
            shape = HomeShape.of(summary.record.fingerprint, summary.record.description)
        except CorruptRecord:
            continue
        for packed in index.blocks:
            block = unpack(packed)
            if now_s - DAY_S <= block.stored_s <= now_s and (group := group_of(block.key)) < len(shape.groups):
                written += shape.groups[group].slot_bytes * shape.rank_count
    seconds = min(DAY_S, max(1, now_s - began_s))
    return WriteRate(round(written * DAY_S / seconds), seconds) if written else None
