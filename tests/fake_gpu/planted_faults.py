# SPDX-License-Identifier: Apache-2.0
"""Faults of the CUDA path, planted through seams, each with the traffic that must see it:
``python -m fake_gpu.planted_faults [--only WORDS] [--seeds N]`` prints who sees which, and by what.

Most are waits that are missing or in the wrong place: with them a GPU nearly always does the right
thing.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from support.planting import Plant, Planter

from fake_gpu import traffic
from kvdisk.assembly import WorkerHalf
from kvdisk.geometry import contiguous_runs
from kvdisk.manager.jobs import StoreSources
from kvdisk.worker import arena as arena_module
from kvdisk.worker import copier as copier_module
from kvdisk.worker import copy_check
from kvdisk.worker import gpu_staging as gpu_staging_module
from kvdisk.worker.backend import Progress
from kvdisk.worker.block_copies import BlockCopies
from kvdisk.worker.copier import CudaCopier, CudaLanes, Lane, LayerBlocks, _Numbers
from kvdisk.worker.copier_base import Event, Passed
from kvdisk.worker.gpu_staging import GpuStaging
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import Batch, Leg
from kvdisk.worker.runner import Runner

Real = Callable[..., Any]
STORES, LOADS = (Lane.STORE, Lane.STORE_BESIDE), (Lane.LOAD, Lane.LOAD_BESIDE)
SEEDS = 20
HANGS_S = 600
REFUSED = "refused at start"


@dataclass(frozen=True, slots=True)
class Fault:
    """``traffic``: variants, each of which sees it if kvdisk does not try its copies at the start.
    ``refused``: that trial refuses to start with it. ``harmless``: why none of the traffic sees it,
    though all of that comes to it; "": it is seen."""

    plant: Plant
    traffic: tuple[str, ...] = ("scratch",)
    refused: bool = False
    harmless: str = ""


# -- how they are planted --------------------------------------------------------------------------


def instead(owner: Any, name: str, fake: Callable[..., Any]) -> Plant:
    """Call ``fake`` with the real function, and what that is called with."""
    return lambda planter: planter.replace(owner, name, fake)


def within(outer: Any, outer_name: str, owner: Any, name: str, fake: Callable[..., Any]) -> Plant:
    """The same, only while ``outer``'s method runs."""
    return lambda planter: planter.replace_in(outer, outer_name, owner, name, fake)


def nothing(owner: Any, name: str, result: object = None) -> Plant:
    """Do nothing, and return ``result``."""
    return lambda planter: planter.skip(owner, name, result)


def changed_after(owner: Any, name: str, act: Callable[..., None]) -> Plant:
    """Do something after a method, with what that was called with."""

    def fake(real: Real, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        act(*args)
        return result

    return lambda planter: planter.replace(owner, name, fake)


# -- what the lanes wait for -----------------------------------------------------------------------


def forget_after(real: Real, copier: CudaCopier, group: int, first: Any, second: Any, _after: Event | None) -> Any:
    return real(copier, group, first, second, None)


def copy_straight_at_once(real: Real, *args: Any, **kwargs: Any) -> Any:
    *most, _after = args[:6]
    return real(*most, None, *args[6:], **kwargs)


def wait_unless(lanes: Sequence[Lane]) -> Callable[..., Any]:
    """Wait on other lanes, and on the model's stream."""
    return lambda real, each, lane, event: None if lane in lanes else real(each, lane, event)


def mark_nothing(_real: Real, _copier: CudaCopier) -> Event:
    event: Event = torch.cuda.Event(blocking=True)
    return event


def wait_on_current(_real: Real, lanes: CudaLanes, _lane: Lane | None, event: Event) -> None:
    torch.cuda.current_stream(lanes.device).wait_event(event)


def record_current(real: Real, lanes: CudaLanes, _lane: Lane | None) -> Any:
    return real(lanes, None)


def on_default_stream(real: Real, *args: Any) -> Any:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return real(*args)


def mark_a_step_late(planter: Planter) -> None:
    marks: list[Event] = []

    def compute_done(real: Real, copier: CudaCopier) -> Event:
        marks.append(real(copier))
        return marks[-2:][0]

    planter.replace(CudaCopier, "compute_done", compute_done)


def reuse_events(planter: Planter) -> None:
    """Take one of four events, the next each time."""
    events = cycle([torch.cuda.Event(blocking=True) for _ in range(4)])

    def record(_real: Real, lanes: CudaLanes, lane: Lane | None) -> Any:
        event = next(events)
        event.record(lanes._streams[lane] if lane else torch.cuda.current_stream(lanes.device))
        return event

    planter.replace(CudaLanes, "record", record)


# -- what the model waits for ----------------------------------------------------------------------


def hold_for(*waited: Lane) -> Callable[..., None]:
    def hold_model(_real: Real, copier: CudaCopier) -> None:
        for lane in waited:
            copier._lanes.wait(None, copier._lanes.record(lane))

    return hold_model


def hold_too_soon(planter: Planter) -> None:
    """Hold the model before the copies have begun that it must wait for."""
    hold = CudaCopier.hold_model

    def protect(real: Real, mover: Mover, plan: Any) -> None:
        hold(cast(CudaCopier, mover._copier))
        real(mover, plan)

    planter.replace_in(Mover, "protect", CudaCopier, "hold_model", lambda *_: None)
    planter.replace(Mover, "protect", protect)


def forget_fences(mover: Mover, *_: Any) -> None:
    mover._fenced.clear()


def forget_urgent(mover: Mover, plan: Any) -> None:
    mover._fenced.difference_update(plan.urgent)


def lift_what_comes(real: Real, mover: Mover) -> None:
    """Take what the mover's thread has not taken in for what has begun."""
    with mover._changed:
        mover._fenced = {job_id for job_id in mover._fenced if not mover._runner.has_launched(job_id)}
        mover._changed.notify_all()
    real(mover)


def forget_windows(sources: StoreSources, record: Any) -> None:
    """Watch no blocks but those of the first group."""
    from kvdisk.blocks import group_of

    blocks = [block for move in record.job.moves if group_of(move.key) for block in move.gpu_blocks]
    sources._context.unwatch([block for block in blocks if block in sources._records])
    for block in blocks:
        sources._records.pop(block, None)


# -- where a copy ends -----------------------------------------------------------------------------


def end_at(place: slice) -> Callable[..., Any]:
    """Take the end of some of the lanes for that of all."""
    return lambda real, copier, used: real(copier, list(used)[place])


def end_on_others(real: Real, copier: CudaCopier, used: Any) -> Any:
    """Look at the lanes of the other direction."""
    return real(copier, [(LOADS if lane in STORES else STORES)[0] for lane in used])


def end_before(lanes: Sequence[Lane]) -> Callable[..., Any]:
    """Take the point where a copy begins for its end."""

    def start(real: Real, copier: CudaCopier, *args: Any) -> Event:
        event = copier._end_of(lanes)
        real(copier, *args)
        return event

    return start


def end_before_the_link(planter: Planter) -> None:
    """A store ends with its kernels: its copies over the link go on."""
    ends: list[Event] = []

    def link_copies(real: Real, *args: Any) -> Any:
        event: Any = torch.cuda.Event(blocking=True)
        event.record()
        ends.append(event)
        return real(*args)

    def gather(real: Real, *args: Any) -> Event:
        real(*args)
        return ends[-1]

    planter.replace(copier_module, "_link_copies", link_copies)
    planter.replace(CudaCopier, "_gather", gather)


def end_before_the_kernels(planter: Planter) -> None:
    """A load ends with its copies over the link: its last kernels go on."""
    ends: list[Event] = []

    def put(real: Real, numbers: _Numbers, values: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = real(numbers, values)
        ends.append(numbers._lanes.record(numbers._lane))
        return found

    def scatter(real: Real, *args: Any) -> Event:
        real(*args)
        return ends[-1]

    planter.replace(_Numbers, "put", put)
    planter.replace(CudaCopier, "_scatter", scatter)


def over_when_begun(*legs: Leg) -> Plant:
    def has_ended(real: Real, copies: BlockCopies, batch: Batch, copied: Event) -> Any:
        return real(copies, batch, Passed() if batch.leg in legs else copied)

    return instead(BlockCopies, "_has_ended", has_ended)


def copied_too_soon(planter: Planter) -> None:
    planter.skip(Runner, "_is_gathering", False)


# -- memory that is used again ---------------------------------------------------------------------


def forget_reads(numbers: _Numbers, _values: Sequence[int]) -> None:
    numbers._read = [None, None]


def put_at_the_start(real: Real, numbers: _Numbers, values: Sequence[int]) -> Any:
    numbers._filled = 0
    return real(numbers, values)


def remember_numbers(planter: Planter) -> None:
    """Take the last numbers for others that are as many."""
    known: dict[_Numbers, tuple[int, torch.Tensor]] = {}

    def put(real: Real, numbers: _Numbers, values: Sequence[int]) -> torch.Tensor:
        if numbers not in known or known[numbers][0] != len(values):
            known[numbers] = len(values), real(numbers, values)
        return known[numbers][1]

    planter.replace(_Numbers, "put", put)


def share_numbers(copier: CudaCopier, *_: Any) -> None:
    copier._numbers = dict.fromkeys(Lane, copier._numbers[Lane.STORE])


def share_scratch(*pairs: tuple[Lane, Lane]) -> Callable[..., None]:
    def share(copier: CudaCopier, *_: Any) -> None:
        copier._scratch.update((one, copier._scratch[other]) for one, other in pairs)

    return share


def make_scratch_each_time(real: Real, *args: Any) -> Iterator[Any]:
    for turn, part, some, scratch in real(*args):
        yield turn, part, some, torch.empty_like(scratch)


def share_sums(staging: GpuStaging, *_: Any) -> None:
    staging._payload_sums = dict.fromkeys((Lane.STORE, Lane.LOAD), staging._payload_sums[Lane.STORE])


def give_back_at(leg: Leg) -> Plant:
    """Lend a batch's staging again as soon as one of its legs has begun."""

    def note(real: Real, runner: Runner, progress: Progress) -> Any:
        ended, batch = real(runner, progress), progress.batch
        if not ended and batch.leg is leg:
            runner._batches.give_back(batch)
            batch.staging = []
        return ended

    return instead(Runner, "_note", note)


def give_back_what_is_late(real: Real, runner: Runner, now_s: float) -> Any:
    happened = real(runner, now_s)
    for batch in runner._batches.under_way:
        if batch.late:
            runner._batches.give_back(batch)
            batch.staging = []
    return happened


def close_at_once(planter: Planter) -> None:
    planter.replace(Runner, "await_copies", lambda _real, runner: runner.halt())


def release_first(*, on_gpu: bool) -> Callable[..., None]:
    def close(real: Real, half: WorkerHalf) -> None:
        for memory in half.memory:
            if memory.on_gpu is on_gpu:
                memory.close()
        real(half)

    return close


def leave_the_thread(_real: Real, mover: Mover) -> None:
    with mover._changed:
        mover._closing = True
        mover._changed.notify_all()


# -- GPU staging -----------------------------------------------------------------------------------


def end_before_headers(real: Real, staging: GpuStaging, *args: Any) -> Event:
    event = staging._lanes.record(Lane.STORE)
    real(staging, *args)
    return event


def end_before_sums(real: Real, staging: GpuStaging, *args: Any) -> Event:
    event = staging._lanes.record(args[-1])
    real(staging, *args)
    return event


# -- pieces, rows ----------------------------------------------------------------------------------


def runs_across_pieces(_real: Real, slots: Any, most: int) -> Iterator[tuple[int, int]]:
    return iter(contiguous_runs(slots.indices, most))


def runs_one_too_far(_real: Real, slots: Any, most: int) -> Iterator[tuple[int, int]]:
    piece = slots.memory.piece_slots(slots.size_class)
    for start, count in contiguous_runs(slots.indices, most):
        at, end = start, start + count
        while at < end:
            some = min(end - at, piece - slots.indices[at] % piece + 1)
            yield at, some
            at += some


def leave_the_last_row(real: Real, *args: Any) -> Iterator[Any]:
    for of_blocks, of_slots, row_bytes, count in real(*args):
        yield of_blocks, of_slots, row_bytes, count - (count > 3)


def stay_on_the_first_gpu(_real: Real, _copier: CudaCopier) -> Any:
    return torch.inference_mode()


def copy_rows_beside(real: Real, lanes: CudaLanes, *args: Any, **kwargs: Any) -> Any:
    """Use the streams of the lanes that nobody asks for the end."""
    others = copy.copy(lanes)
    others._streams = {**lanes._streams, **{pair[0]: lanes._streams[pair[1]] for pair in (STORES, LOADS)}}
    return real(others, *args, **kwargs)


def put_all_first(real: Real, *args: Any) -> Iterator[Any]:
    """Take the start of a slot for the place of each of its blocks."""
    for _place, slots, blocks in real(*args):
        yield 0, slots, blocks


# -- sleep -----------------------------------------------------------------------------------------


def leave_at_once(_real: Real, copies: BlockCopies) -> None:
    copies._unmapped = True


def return_too_soon(copies: BlockCopies) -> None:
    copies._unmapped = False


# -- failures --------------------------------------------------------------------------------------


def unless_full_with(change: Callable[..., Any]) -> Plant:
    def plant(planter: Planter) -> None:
        for module in (copier_module, gpu_staging_module):
            planter.replace(module, "unless_full", change)

    return plant


def go_on_while_one_begins(_real: Real, copies: BlockCopies, job_ids: Any) -> None:
    copies.given_up.update(job_ids)


def take_refused_rows(real: Real, *args: Any, **kwargs: Any) -> bool:
    real(*args, **kwargs)
    return True


FAULTS: dict[str, Fault] = {
    # -- what the lanes wait for --
    "gathers do not wait for the model": Fault(instead(CudaCopier, "_gather", forget_after)),
    "scatters do not wait for the model": Fault(instead(CudaCopier, "_scatter", forget_after)),
    "straight copies do not wait for the model": Fault(
        instead(CudaCopier, "_copy_straight", copy_straight_at_once), ("straight",)
    ),
    "of a gather's lanes the second does not wait for the model": Fault(
        within(CudaCopier, "_gather", CudaLanes, "wait", wait_unless([Lane.STORE_BESIDE]))
    ),
    "of a scatter's lanes the second does not wait for the model": Fault(
        within(CudaCopier, "_scatter", CudaLanes, "wait", wait_unless([Lane.LOAD_BESIDE]))
    ),
    "the model's work is marked by an event that nobody records": Fault(
        instead(CudaCopier, "compute_done", mark_nothing)
    ),
    "the model's work is marked on the default stream": Fault(instead(CudaCopier, "compute_done", on_default_stream)),
    "the model's work is marked a step late": Fault(mark_a_step_late),
    "lanes do not wait for zeroed scratch": Fault(
        within(CudaCopier, "__init__", CudaLanes, "wait", wait_unless(list(Lane))),
        ("scratch", "closes"),
        harmless="the trial at the start waits for the stream that zeroes it, and so has the engine before a home is"
        " open, without which nothing is loaded; stores wait for that stream anyway",
    ),
    "events are used again while they are pending": Fault(reuse_events),
    "numbers go by another stream than their lane": Fault(instead(_Numbers, "put", on_default_stream), refused=True),
    "waits go to the current stream instead of the lane": Fault(
        instead(CudaLanes, "wait", wait_on_current), ("straight",), refused=True
    ),
    "ends are those of the current stream instead of the lane": Fault(
        instead(CudaLanes, "record", record_current), refused=True
    ),
    "what a fence copies does not wait for the model": Fault(
        within(Mover, "protect", CudaCopier, "compute_done", lambda *_: None), ("on-preemption",)
    ),
    # -- what the model waits for --
    "the model is not held": Fault(nothing(CudaCopier, "hold_model"), ("scratch", "straight")),
    "the model is held for the first lane only": Fault(instead(CudaCopier, "hold_model", hold_for(Lane.STORE))),
    "the model is held for the second lane only": Fault(instead(CudaCopier, "hold_model", hold_for(Lane.STORE_BESIDE))),
    "the model is held for loads instead of stores": Fault(instead(CudaCopier, "hold_model", hold_for(*LOADS))),
    "the default stream is held instead of the model": Fault(instead(CudaCopier, "hold_model", on_default_stream)),
    "protect does not hold the model": Fault(
        within(Mover, "protect", CudaCopier, "hold_model", lambda *_: None), ("scratch", "straight")
    ),
    "the model is held before the copies have begun": Fault(hold_too_soon),
    "stores are not fenced": Fault(changed_after(Mover, "submit", forget_fences)),
    "what a preemption saves is not fenced": Fault(changed_after(Mover, "submit", forget_urgent), ("on-preemption",)),
    "a fence is lifted while its stores are queued": Fault(nothing(Runner, "has_launched", True), ("long",)),
    "a fence is lifted before its store has been taken in": Fault(
        instead(Mover, "_publish", lift_what_comes), ("on-preemption",)
    ),
    "a fence is never planned": Fault(
        instead(StoreSources, "take_fence", lambda real, sources, _blocks: real(sources, ()) and ())
    ),
    "blocks that a window leaves are not fenced": Fault(
        changed_after(StoreSources, "add", forget_windows), ("windows",)
    ),
    "stores that were given up begin all the same": Fault(nothing(BlockCopies, "give_up"), ("hasty",)),
    "a step goes on while a copy that was given up begins": Fault(
        instead(BlockCopies, "give_up", go_on_while_one_begins), ("hasty",)
    ),
    "what is zeroed before kvdisk hears of it is stored": Fault(
        instead(StoreSources, "take_fence", lambda real, sources, _blocks: real(sources, ())), ("zeroes",)
    ),
    # -- where a copy ends --
    "the end of a copy is that of its first lane": Fault(instead(CudaCopier, "_end_of", end_at(slice(1)))),
    "the end of a copy is that of its last lane": Fault(instead(CudaCopier, "_end_of", end_at(slice(-1, None)))),
    "the end of a copy is looked for on the other direction's lane": Fault(
        instead(CudaCopier, "_end_of", end_on_others), refused=True
    ),
    "the end of a gather is where it begins": Fault(
        instead(CudaCopier, "_gather", end_before(STORES)), ("windows",), refused=True
    ),
    "the end of a scatter is where it begins": Fault(
        instead(CudaCopier, "_scatter", end_before(LOADS)), ("windows",), refused=True
    ),
    "a store ends before its copies over the link": Fault(end_before_the_link, ("windows",), refused=True),
    "a load ends before its kernels": Fault(end_before_the_kernels, ("windows",), refused=True),
    "a copy is over when it has begun": Fault(over_when_begun(*Leg)),
    "a gather is over when it has begun": Fault(over_when_begun(Leg.GATHER), ("scratch", "straight")),
    "a scatter is over when it has begun": Fault(over_when_begun(Leg.SCATTER), ("scratch", "straight")),
    "stores are said to be copied too soon": Fault(copied_too_soon, ("long-drive-alone",)),
    # -- memory that is used again --
    "numbers are overwritten while they are read": Fault(changed_after(_Numbers, "put", forget_reads)),
    "numbers always go to the same place": Fault(instead(_Numbers, "put", put_at_the_start), ("windows",)),
    "numbers are those of the last batch of as many blocks": Fault(remember_numbers, ("windows",)),
    "all lanes have the same room for numbers": Fault(changed_after(CudaCopier, "__init__", share_numbers)),
    "all lanes have the same scratch": Fault(
        changed_after(CudaCopier, "__init__", share_scratch(*((lane, Lane.STORE) for lane in Lane))), refused=True
    ),
    "both lanes of loads have the same scratch": Fault(
        changed_after(CudaCopier, "__init__", share_scratch((Lane.LOAD_BESIDE, Lane.LOAD))), refused=True
    ),
    "stores and loads have the same scratch": Fault(
        changed_after(CudaCopier, "__init__", share_scratch(*zip(LOADS, STORES, strict=True)))
    ),
    "scratch is made for each copy and given away at once": Fault(
        instead(CudaCopier, "_parts", make_scratch_each_time)
    ),
    "staging is lent again while a scatter reads it": Fault(give_back_at(Leg.SCATTER), ("drive-alone",)),
    "staging is lent again while a gather writes it": Fault(give_back_at(Leg.GATHER), ("drive-alone",)),
    "staging is lent again while a drive writes it": Fault(give_back_at(Leg.WRITE), ("drive-alone",)),
    "staging is lent again while a drive is late with it": Fault(
        instead(Runner, "_give_up_late", give_back_what_is_late), ("hangs", "hangs-staged")
    ),
    "the arena goes before its copies end": Fault(close_at_once, ("closes",)),
    "arenas go before the mover": Fault(instead(WorkerHalf, "close", release_first(on_gpu=False)), ("closes",)),
    "GPU staging goes before the mover": Fault(
        instead(WorkerHalf, "close", release_first(on_gpu=True)),
        ("closes-staged",),
        harmless="it has a pool of its own, which no other tensor gets memory of; what gives that back, cudaFree, waits"
        " for all work, and a transfer of a drive keeps it until it has ended",
    ),
    "memory goes while the mover's thread runs": Fault(instead(Mover, "close", leave_the_thread), ("closes",)),
    "memory stays registered": Fault(nothing(arena_module, "_unregister")),
    # -- GPU staging --
    "headers are written before they are in front": Fault(
        instead(GpuStaging, "_start_headers", end_before_headers), ("staged",)
    ),
    "sums are read before they are there": Fault(
        instead(GpuStaging, "_start_sums", end_before_sums), ("staged",), refused=True
    ),
    "a slot is verified when its sums have begun": Fault(over_when_begun(Leg.SUM), ("staged",)),
    "headers are over when they have begun": Fault(over_when_begun(Leg.SEAL), ("staged",)),
    "sums are asked for on another stream": Fault(
        within(GpuStaging, "_start_sums", CudaLanes, "on", lambda *_: torch.cuda.stream(None)), ("staged",)
    ),
    "sums of stores and loads have the same scratch": Fault(
        changed_after(GpuStaging, "__init__", share_sums), ("staged",)
    ),
    "lanes do not wait for staging's zeros": Fault(
        within(GpuStaging, "__init__", CudaLanes, "wait", wait_unless(list(Lane))),
        ("staged",),
        harmless="the trial of the way straight waits for the stream that made them, before any lane has work there",
    ),
    "GPU staging is lent again while a scatter reads it": Fault(give_back_at(Leg.SCATTER), ("staged",)),
    "the drive goes on before staging's work has ended": Fault(
        nothing(GpuStaging, "settle"), ("staged",), refused=True
    ),
    # -- pieces, rows, captures, GPUs --
    "copies cross pieces that were pinned apart": Fault(
        instead(copier_module, "_slot_runs", runs_across_pieces), ("pieces", "pieces-straight")
    ),
    "copies go one slot beyond a piece": Fault(
        instead(copier_module, "_slot_runs", runs_one_too_far), ("pieces", "pieces-straight")
    ),
    "all blocks of a slot lie at its start": Fault(instead(LayerBlocks, "places", put_all_first), ("units",)),
    "a straight copy leaves its last row": Fault(
        instead(LayerBlocks, "rectangles", leave_the_last_row), ("straight-together",)
    ),
    "straight copies go by the lane beside": Fault(instead(CudaLanes, "copy_rows", copy_rows_beside), ("straight",)),
    "the mover's thread ends the model's captures": Fault(nothing(copier_module, "relax_captures"), ("captures",)),
    "pinning ends the model's captures": Fault(nothing(arena_module, "relax_captures"), ("captures",)),
    "the mover's thread works on the first GPU": Fault(
        instead(CudaCopier, "thread", stay_on_the_first_gpu), ("second-gpu",)
    ),
    "memory is pinned for the first GPU": Fault(
        within(arena_module.Arena, "_pin", torch.cuda, "set_device", lambda *_: None), ("second-gpu",)
    ),
    # -- sleep, and switched off --
    "a sleep does not wait for copies": Fault(instead(BlockCopies, "leave_gpu", leave_at_once), ("sleeps",)),
    "copies begin in a sleep": Fault(changed_after(BlockCopies, "leave_gpu", return_too_soon), ("sleeps-drive-alone",)),
    "what has not begun before a sleep is stored after it": Fault(
        within(Mover, "leave_gpu", BlockCopies, "give_up", lambda *_: None), ("sleeps",)
    ),
    "nothing is loaded after a sleep": Fault(nothing(BlockCopies, "return_to_gpu"), ("sleeps",)),
    "the model is not held when kvdisk is switched off": Fault(
        within(Mover, "halt", CudaCopier, "hold_model", lambda *_: None), ("halts",)
    ),
    "stores begin when kvdisk has been switched off": Fault(
        within(Mover, "halt", BlockCopies, "give_up", lambda *_: None), ("halts",)
    ),
    # -- failures --
    "what has begun when memory ends is not waited for": Fault(
        unless_full_with(lambda real, lanes, _used, start: real(lanes, (), start)), ("kernels-fail",)
    ),
    "of what has begun when memory ends only the first lane is waited for": Fault(
        unless_full_with(lambda real, lanes, used, start: real(lanes, used[:1], start)), ("kernels-fail",)
    ),
    "a copy that found no memory is taken for one that went": Fault(
        unless_full_with(lambda real, *args: real(*args) or Passed()), ("kernels-fail",)
    ),
    "what has begun when rows are refused is not waited for": Fault(
        within(CudaCopier, "_copy_straight", CudaLanes, "synchronize", lambda *_: None), ("rows-refused",)
    ),
    "what a copy has begun that fails half-way is not waited for": Fault(
        nothing(CudaCopier, "settle"), ("copies-refused",)
    ),
    "the error of a refused copy stays": Fault(nothing(copier_module, "forget_error"), ("rows-refused",)),
    "refused rows are taken for copied ones": Fault(
        instead(CudaLanes, "copy_rows", take_refused_rows), ("rows-refused",)
    ),
}


# -- who sees it -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """``reached``: how often the traffic came to the fault. ``seeds``: how many of them were run,
    the last of which saw it where ``by`` is not empty. ``said``: what it said."""

    reached: int = 0
    seeds: int = 0
    by: tuple[str, ...] = ()
    said: str = ""


def run_planted(name: str, variant: traffic.Variant, seeds: int, directory: str, *, tries: bool, by: str) -> Seen:
    """Plant a fault in this process, for good; run traffic until it sees it, or for so many
    seeds. "": plant nothing. ``tries``: whether kvdisk tries its copies at the start. ``by``: what
    must see it; "": whatever."""
    planter = Planter(pytest.MonkeyPatch())
    if not tries:
        planter.skip(copy_check, "check_copies")
    if name:
        FAULTS[name].plant(planter)
        planter.reached = 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(dir=directory) as store:
            outcome = traffic.run_seed(seed, variant, store)
        if not outcome.is_right and (not by or by in _by(outcome)):
            return Seen(planter.reached, seed + 1, _by(outcome), str(outcome))
    return Seen(planter.reached, seeds)


def _by(outcome: traffic.Outcome) -> tuple[str, ...]:
    """Say by what an outcome is wrong."""
    refused = "ConfigError" in outcome.error
    wrong = outcome.wrong_bytes or "wrong bytes" in outcome.error
    found = {
        "bytes": wrong,
        "order": outcome.races > 0,
        "host": outcome.violations > 0,
        "checksums": outcome.unverified > 0,
        "pinned": outcome.left_pinned > 0,
        REFUSED: refused,
        "error": bool(outcome.error) and not wrong and not refused,
    }
    return tuple(each for each, is_so in found.items() if is_so)


def _serve(
    connection: Connection, name: str, variant: traffic.Variant, seeds: int, directory: str, told: str, **how: Any
) -> None:
    descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    connection.send(run_planted(name, variant, seeds, directory, **how))
    connection.close()
    os._exit(0)  # threads that a fault has left waiting end with it


def see(
    name: str, variant: traffic.Variant, directory: Path, seeds: int = SEEDS, *, tries: bool = False, by: str = ""
) -> Seen:
    """Run ``run_planted`` in a process of its own, which a fault may end."""
    context: Any = multiprocessing.get_context("spawn" if variant.environment else "forkserver")
    if not variant.environment:
        context.set_forkserver_preload([__name__])  # the runtime looks at its variables as torch is imported
    ours, theirs = context.Pipe(duplex=False)
    told = directory / "told"
    process = context.Process(
        target=_serve, args=(theirs, name, variant, seeds, str(directory), str(told)), kwargs={"tries": tries, "by": by}
    )
    with patch.dict(os.environ, variant.environment):
        process.start()
    theirs.close()
    try:
        seen: Seen = ours.recv()
    except EOFError:
        process.join()
        text = told.read_text(errors="replace") if told.exists() else ""
        return Seen(-1, 0, ("crash",), f"exit code {process.exitcode}\n{text[-3000:]}")
    process.join()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults with these words in their names, or variants")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tries", action="store_true", help="let kvdisk try its copies at the start")
    options = parser.parse_args()
    for name, fault in FAULTS.items():
        for each in fault.traffic:
            if options.only not in name and options.only != each:
                continue
            if each not in traffic.VARIANTS:
                print(f"{name} | {each}: not there", flush=True)
                continue
            began_s = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                seen = see(name, traffic.VARIANTS[each], Path(directory), options.seeds, tries=options.tries)
            by = " and ".join(seen.by) or "NOT SEEN"
            took_s = time.monotonic() - began_s
            print(f"{name} | {each} | {by}, seed {seen.seeds}, reached {seen.reached}, {took_s:.1f} s", flush=True)
            if "error" in seen.by or "crash" in seen.by:
                print("    " + "\n    ".join(seen.said.splitlines()[-4:])[:600], flush=True)


if __name__ == "__main__":
    main()
