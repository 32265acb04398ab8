# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk replay --json`` prints: one object, whose shape changes only with ``json_version``.

Bytes and blocks are integers, shares are of 1; ``null``: there is nothing to say it of, or it was not measured::

    json_version       1
    kvdisk_version     of the command
    trace              name, form, block_tokens, requests, references (blocks of all prompts), tokens (of all prompts),
                       distinct_blocks, longest_prompt_blocks, notes (sentences)
    block_bytes        of one block, as given
    slot_bytes         of its slot on NVMe, header included
    io_directory       null: no bytes were moved
    references_per_second, seconds, processes
                       of the manager's runs together
    runs[]             policy      name, as in the table
                       model       null: the real manager; else what it was compared with
                       setting     of the manager's runs: eviction, cpu_admission, nvme_admission, store_policy,
                                   cpu and nvme (room as given, blocks it holds, slots), gpu_blocks
                       room        given, blocks: what the models get
                       hit_rate, hit_blocks_rate
                                   tokens and blocks that hit, of all
                       hit_tokens, hit_blocks
                                   by tier: gpu, cpu, nvme; a model's under its one tier
                       written_blocks, written_bytes, read_blocks, read_bytes
                                   to and from NVMe (of a model: its one tier)
                       write_amplification
                                   written_blocks / distinct blocks of the trace
                       written_per_hit
                                   written_blocks / blocks that hit in that tier
                       evicted_blocks
                                   by tier
                       refused     offers by reason: reuse, room, budget; left_cpu_*: what left the CPU tier unwritten
                       failed      loads, stores; with I/O also wrong_bytes: blocks loaded that were not what was stored
                       waits_s     of requests that loaded, from their arrival to the end of the load: count, mean,
                                   median, p99, most; null without I/O
                       seconds
"""

from __future__ import annotations

import statistics
from typing import Any

from kvdisk import __version__
from kvdisk.blocks import Tier
from kvdisk.cli.replay.capacity import Room
from kvdisk.cli.replay.run import Outcome, Replayed
from kvdisk.cli.replay.tiers import Setting, make_geometry

JSON_VERSION = 1


def as_json(replayed: Replayed) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    trace = replayed.trace
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "trace": {
            "name": trace.name,
            "form": trace.form,
            "block_tokens": trace.block_tokens,
            "requests": len(trace.requests),
            "references": trace.references,
            "tokens": trace.tokens,
            "distinct_blocks": trace.distinct,
            "longest_prompt_blocks": trace.longest,
            "notes": list(trace.notes),
        },
        "block_bytes": replayed.block_bytes,
        "slot_bytes": slot_bytes_of(replayed),
        "io_directory": replayed.io_directory,
        "references_per_second": round(replayed.rate),
        "seconds": round(replayed.seconds, 3),
        "processes": replayed.processes,
        "runs": [_run(replayed, outcome) for outcome in replayed.outcomes],
    }


def slot_bytes_of(replayed: Replayed) -> int:
    """Return what one block takes on the drive."""
    return make_geometry(replayed.trace, replayed.block_bytes).slot_sizes[0]


def name_of(outcome: Outcome) -> str:
    """Return a run's name: a model's, or the manager's policies, those that the run has a use for."""
    if outcome.rival is not None:
        return outcome.rival.name
    setting = outcome.setting
    assert setting is not None
    parts = [setting.eviction]
    if setting.nvme.slots:
        parts.append(setting.nvme_admission)
    if setting.cpu.slots:
        parts.append(f"cpu {setting.cpu.text}")
        if setting.cpu_admission != "all":
            parts.append(f"cpu {setting.cpu_admission}")
    if setting.store_policy != "on_compute":
        parts.append(setting.store_policy)
    return ", ".join(parts)


def _run(replayed: Replayed, outcome: Outcome) -> dict[str, Any]:
    trace, slot_bytes = replayed.trace, slot_bytes_of(replayed)
    served = outcome.hit_blocks.get(Tier.NVME, 0)
    return {
        "policy": name_of(outcome),
        "model": None if outcome.rival is None else outcome.rival.model,
        "setting": None if outcome.setting is None else _setting(outcome.setting),
        "room": {"given": outcome.room.text, "blocks": outcome.room.blocks},
        "hit_rate": outcome.tokens / trace.tokens,
        "hit_blocks_rate": outcome.blocks / trace.references,
        "hit_tokens": _by_tier(outcome.hit_tokens),
        "hit_blocks": _by_tier(outcome.hit_blocks),
        "written_blocks": outcome.written,
        "written_bytes": outcome.written * slot_bytes,
        "read_blocks": outcome.read,
        "read_bytes": outcome.read * slot_bytes,
        "write_amplification": outcome.written / trace.distinct,
        "written_per_hit": outcome.written / served if served else None,
        "evicted_blocks": None if outcome.evicted is None else _by_tier(outcome.evicted),
        "refused": outcome.refused,
        "failed": outcome.failed,
        "waits_s": waits_of(outcome),
        "seconds": round(outcome.seconds, 3),
    }


def waits_of(outcome: Outcome) -> dict[str, float] | None:
    """Return how long requests waited for their loads; None where nothing was measured."""
    waits_s = sorted(outcome.waits_s)
    if not waits_s:
        return None
    return {
        "count": len(waits_s),
        "mean": statistics.fmean(waits_s),
        "median": statistics.median(waits_s),
        "p99": waits_s[min(len(waits_s) - 1, len(waits_s) * 99 // 100)],
        "most": waits_s[-1],
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "eviction": setting.eviction,
        "cpu_admission": setting.cpu_admission,
        "nvme_admission": setting.nvme_admission,
        "store_policy": setting.store_policy,
        "cpu": _room(setting.cpu),
        "nvme": _room(setting.nvme),
        "gpu_blocks": setting.gpu_blocks,
    }


def _room(room: Room) -> dict[str, Any]:
    return {"given": room.text, "blocks": room.blocks, "slots": room.slots}


def _by_tier(counts: dict[Tier, int]) -> dict[str, int]:
    return {tier.name.lower(): count for tier, count in counts.items()}
