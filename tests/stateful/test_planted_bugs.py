# SPDX-License-Identifier: Apache-2.0
"""The state machine is tested too: it must catch each of these bugs of the real manager, which are
planted through its methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from machines import search
from support import manager_sizes as on
from support.low_bounds import lower_bounds, lower_shares
from support.manager_parts import Sizes
from support.planting import Plant, Planter

from kvdisk.blocks import Tier
from kvdisk.manager import prefetch
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import READY, Catalog
from kvdisk.manager.copies import Copies
from kvdisk.manager.demand import Demand
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.hit_lookup import HitLookup
from kvdisk.manager.jobs import StoreSources, Transfers
from kvdisk.manager.load_jobs import GpuLoads, LoadJobs
from kvdisk.manager.manager import TierManager
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.pool import AWAITING, FREE, SlotPool
from kvdisk.manager.prefetch import Promotions
from kvdisk.manager.remote import BadObjects, RemoteCopies
from kvdisk.manager.requests import BackOff, RequestState
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.room import Room
from kvdisk.manager.settlement import Settlement
from kvdisk.manager.shares import FreeTenants
from kvdisk.manager.step_work import Kind
from kvdisk.manager.store_policy import OnPreemption, Spillover
from kvdisk.manager.stores import StorePlanner, _Due
from kvdisk.manager.victims import Victims
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import JobKind, Reason

Real = Callable[..., Any]


class Bug(NamedTuple):
    """``plant`` has the manager do wrong; one of these sizes shows it."""

    plant: Plant
    sizes: tuple[Sizes, ...] = on.ON_COMPUTE_SIZES


def before(owner: type, name: str, act: Callable[..., None]) -> Plant:
    """Do something before a method, with what that is called with."""

    def fake(real: Real, *args: Any, **kwargs: Any) -> Any:
        act(*args)
        return real(*args, **kwargs)

    return lambda planter: planter.replace(owner, name, fake)


def after(owner: type, name: str, act: Callable[..., None]) -> Plant:
    """Do something after a method, likewise."""

    def fake(real: Real, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        act(*args)
        return result

    return lambda planter: planter.replace(owner, name, fake)


def instead(owner: type, name: str, fake: Callable[..., Any]) -> Plant:
    """Call ``fake`` with the real method, and what that is called with."""
    return lambda planter: planter.replace(owner, name, fake)


def nothing(owner: type, name: str, result: object = None) -> Plant:
    """Do nothing, and return ``result``."""
    return lambda planter: planter.skip(owner, name, result)


def without_pins(outer: type, name: str) -> Plant:
    """Pin nothing in a method; who gives the pins back finds none."""

    def unpin(_real: Real, catalog: Catalog, rows: Any, tier: Tier) -> None:
        pins = catalog.columns(tier).pins
        for row in rows:
            pins[row] -= pins[row] > 0

    def plant(planter: Planter) -> None:
        for pin in ("pin", "pin_many"):
            planter.replace_in(outer, name, Catalog, pin, lambda *_: None)
        planter.replace(Catalog, "unpin", unpin)

    return plant


# -- files -----------------------------------------------------------------------------------------


def hide_what_is_dropped(_real: Real, nvme: NvmeSpace) -> None:
    nvme._catalog.hide(nvme.tier, frozenset(nvme._ending))


# -- jobs ------------------------------------------------------------------------------------------


def settle_with_the_first_answer(transfers: Transfers, report: Any) -> None:
    for job_id in list(report.results):
        if job_id in transfers:
            report.results[job_id].ranks = transfers.rank_count
        else:
            del report.results[job_id]


def forget_failures_of_others(transfers: Transfers, report: Any) -> None:
    for job_id in report.results:
        if job_id in transfers:
            transfers._records[job_id].failed.clear()


def end_copies_with_the_first(transfers: Transfers, report: Any) -> None:
    for job_id in report.copied:
        record = transfers._records.get(job_id)
        if record is not None:
            report.copied[job_id] = 0 if record.copied else transfers.rank_count


def release_with_the_first(transfers: Transfers, report: Any) -> None:
    for job_id in list(report.released):
        record = transfers._records.get(job_id) or transfers._zombies.get(job_id)
        if record is None:
            del report.released[job_id]
        else:
            report.released[job_id] = record.late_ranks - record.released


def free_late_slots_of(kind: JobKind) -> Plant:
    """Settle jobs of a kind as if nothing of them were late."""

    def act(transfers: Transfers, report: Any) -> None:
        known = {**transfers._records, **transfers._zombies}
        for at in [at for at in report.released if at not in known or known[at].job.kind is kind]:
            del report.released[at]
        for at in [at for at in report.results if known[at].job.kind is kind]:
            report.results[at].late, report.results[at].late_ranks = set(), 0

    return before(Transfers, "absorb", act)


def unwatch_moving_windows(sources: StoreSources, record: Any) -> None:
    sources._context.unwatch([move.gpu_blocks[0] for move in record.job.moves if move.key[-2:] != bytes(2)])


def forget_fence(real: Real, *args: Any) -> tuple[int, ...]:
    real(*args)
    return ()


# -- settlement, loads -----------------------------------------------------------------------------


def keep_failed_stores(_settlement: Settlement, record: Any, *_: Any) -> None:
    if record.job.kind is JobKind.STORE:
        record.failed = {at: why for at, why in record.failed.items() if why is Reason.CANCELLED}


def keep_failed_promotions(_settlement: Settlement, record: Any, *_: Any) -> None:
    if record.job.kind is JobKind.PROMOTE:
        record.failed = {}


def keep_sources_of_promotions(real: Real, copies: Copies, record: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if record.job.kind is JobKind.PROMOTE:
            patch.setattr(Copies, "_is_bad", lambda *_: False)
        real(copies, record)


def take_and_close(real: Real, neighbours: NeighbourCopies, key: Any) -> Any:
    taken = real(neighbours, key)
    if taken is not None and neighbours._users[taken[1].segment] == 1:
        neighbours._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=neighbours._open[taken[1].segment])
    return taken


def never_close(_real: Real, neighbours: NeighbourCopies, slot: Any) -> None:
    neighbours._users[slot.segment] -= 1


def give_another_generation(planter: Planter) -> None:
    planter.replace_in(
        Copies,
        "begin_arrivals",
        Catalog,
        "add",
        lambda real, catalog, keys, generations, *rest: real(catalog, keys, [each + 1 for each in generations], *rest),
    )


def forget_losses(real: Real, catalog: Catalog, *args: Any) -> None:
    losses = catalog.losses
    real(catalog, *args)
    catalog.losses = losses


def load_later_parts_from_anywhere(planter: Planter) -> None:
    lower_shares(planter.patch, 1, Kind.LOADS)
    planter.replace_in(
        LoadJobs, "_reads", Copies, "take_from_others", lambda real, copies, read, _tiers=None: real(copies, read)
    )


def admit_all_while_reading_ahead(planter: Planter) -> None:
    every = {AdmissionPolicy, *AdmissionPolicy.__subclasses__()}
    for policy in [each for each in every if "admits" in vars(each)]:
        planter.replace_in(Promotions, "_plan", policy, "admits", lambda _real, _self, keys: [True] * len(keys))


# -- stores ----------------------------------------------------------------------------------------


def forget_refused(_stores: StorePlanner, together: Sequence[_Due], *_: Any) -> None:
    for due in together:
        due.request.due = []


def store_unwatched(planter: Planter) -> None:
    planter.replace_in(
        StorePlanner,
        "plan_free",
        StorePlanner,
        "store",
        lambda real, *args, **_kwargs: real(*args, watched=False),
    )


def forget_whose_long_loads_are(planter: Planter) -> None:
    lower_bounds(planter.patch)
    planter.replace_in(StorePlanner, "_look_at", FreeTenants, "note", lambda *_: None)


def forget_whose_states_are(planter: Planter) -> None:
    planter.replace_in(StorePlanner, "plan_states", FreeTenants, "note", lambda *_: None)


def read_parts_without_pins(planter: Planter) -> None:
    lower_shares(planter.patch, 1, Kind.LOADS)
    without_pins(LoadJobs, "_find")(planter)


def load_parts_that_are_too_old(planter: Planter) -> None:
    lower_shares(planter.patch, 1, Kind.LOADS)
    planter.skip(Copies, "let_go_unreadable", [])


def hold_more(_victims: Victims, request: RequestState, *_: Any) -> None:
    request.held_tokens += 2


def plan_without_urgent_jobs(real: Real, *args: Any, **kwargs: Any) -> Any:
    plan = real(*args, **kwargs)
    return plan._replace(urgent=()) if hasattr(plan, "_replace") else replace(plan, urgent=())


def keep_the_epoch(real: Real, manager: TierManager, epoch: int) -> None:
    old = manager._state.epoch
    real(manager, epoch)
    manager._state.epoch = old


# -- tiers -----------------------------------------------------------------------------------------


def free_at_once(pool: SlotPool, *_: Any) -> None:
    while pool._awaiting:
        pool._change(pool._awaiting.popleft()[1], AWAITING, FREE)


def write_the_index_when_planned(planter: Planter) -> None:
    def plan_job(real: Real, demotions: Demotions, wanted: Any) -> Any:
        planned, ended = len(demotions._transfers), real(demotions, wanted)
        if len(demotions._transfers) > planned:
            record = list(demotions._transfers._records.values())[-1]
            demotions._lower._record([detail.row for detail in record.details])
        return ended

    planter.replace(Demotions, "_plan_job", plan_job)


def propose_heads(real: Real, order: TailFirst, *args: Any) -> Any:
    return [row for _, row in order._policy.proposals()] if args else real(order)


def count_again(_demand: Demand, request: RequestState, group: int, _stop: int) -> None:
    request.counted[group] = 0


def clear_once(real: Real, history: ReuseHistory) -> None:
    if not hasattr(history, "_tags"):
        real(history)


def evict_pinned(_real: Real, catalog: Catalog, tier: Tier) -> Callable[[int], bool]:
    states = catalog.columns(tier).states
    return lambda row: states[row] == READY


def spend_half(real: Real, budget: WriteBudget, count: int, block_bytes: int) -> bool:
    spent: bool = real(budget, count // 2, block_bytes)
    return spent


def fill_at_start(budget: WriteBudget, *_: Any) -> None:
    budget._bytes = float(budget.burst_bytes)


# -- the remote store ------------------------------------------------------------------------------


def send_whatever(planter: Planter) -> None:
    every = {AdmissionPolicy, *AdmissionPolicy.__subclasses__()}
    for policy in [each for each in every if "admits" in vars(each)]:
        planter.replace_in(RemoteCopies, "offer", policy, "admits", lambda _real, _self, keys: [True] * len(keys))


BUGS = {
    # -- jobs --
    "what cannot be opened now given up": Bug(
        instead(NvmeSpace, "_set_aside", lambda _, nvme, spec, now: nvme._drop_segment(spec)), (on.NVME_ONLY,)
    ),
    "what cannot be opened now promised": Bug(instead(NvmeSpace, "_hide", hide_what_is_dropped), (on.NVME_ONLY,)),
    "settled when the first rank answered": Bug(before(Transfers, "absorb", settle_with_the_first_answer)),
    "one rank's failure ignored": Bug(
        before(Transfers, "absorb", forget_failures_of_others), (on.CPU_ONLY, on.NVME_ONLY)
    ),
    "source reused before its copy has ended": Bug(instead(StoreSources, "take_fence", forget_fence)),
    "fence forgotten for a window that moves on": Bug(after(StoreSources, "add", unwatch_moving_windows), (on.WINDOW,)),
    "block zeroed before the hook left sound": Bug(
        instead(StoreSources, "take_fence", lambda real, sources, _overwritten: real(sources, ())), (on.CPU_ONLY,)
    ),
    "sources let go when the first rank has copied": Bug(
        before(Transfers, "absorb", end_copies_with_the_first), (on.NVME_ONLY,)
    ),
    "late slots freed when the first rank released them": Bug(
        before(Transfers, "absorb", release_with_the_first), (on.WINDOW,)
    ),
    "idle engine that waits for late moves": Bug(
        instead(Transfers, "__len__", lambda real, transfers: real(transfers) + len(transfers._zombies)),
        (on.WINDOW, on.ONE_GROUP),
    ),
    "late slots of a load freed": Bug(free_late_slots_of(JobKind.LOAD), (on.NVME_ONLY,)),
    "late slots of a demotion freed": Bug(free_late_slots_of(JobKind.DEMOTE)),
    "late slots of a store freed": Bug(free_late_slots_of(JobKind.STORE), (on.NVME_REUSE,)),
    "late slots of a promotion freed": Bug(free_late_slots_of(JobKind.PROMOTE), on.QUEUE_SIZES),
    # -- settlement --
    "failed store left ready": Bug(before(Settlement, "_end_write", keep_failed_stores)),
    "failed position promised again": Bug(nothing(RequestState, "limit_loads"), (on.WINDOW, on.ONE_GROUP)),
    "pins of late moves never given back": Bug(nothing(Copies, "release")),
    "failed promotion left ready": Bug(before(Settlement, "_end_read", keep_failed_promotions), on.QUEUE_SIZES),
    "source of a failed promotion kept": Bug(instead(Copies, "end_reads", keep_sources_of_promotions), on.QUEUE_SIZES),
    # -- loads and reading ahead --
    "read without a pin": Bug(without_pins(LoadJobs, "_find_few"), (on.ONE_GROUP, *on.QUEUE_SIZES)),
    "part of a long load read without a pin": Bug(read_parts_without_pins, (on.ONE_GROUP, *on.QUEUE_SIZES)),
    "waiting without end": Bug(nothing(HitLookup, "_is_over", False), (on.NVME_ONLY, on.QUEUE_WINDOW)),
    "neighbour's block kept under a generation of its own": Bug(give_another_generation),
    "lookup remembered after an eviction": Bug(instead(Catalog, "_change", forget_losses), (on.ONE_GROUP,)),
    "lookup remembered whatever one tier gets or loses": Bug(
        instead(Catalog, "changes", lambda real, catalog, _tiers=None: real(catalog)), (on.LIMITED,)
    ),
    "lookup remembered though blocks grow too old": Bug(instead(Catalog, "limit_ages", forget_losses), (on.AGES,)),
    "block loaded that is too old": Bug(load_parts_that_are_too_old, (on.LONG_SIZES["ages"],)),
    "later part of a load from a tier that is left out": Bug(load_later_parts_from_anywhere, (on.LONG_SIZES["ages"],)),
    "reading ahead without bound": Bug(lambda planter: planter.set(prefetch, "PREFETCH_DIVISOR", 1), on.QUEUE_SIZES),
    "reading ahead for those that run": Bug(nothing(Promotions, "leave"), on.QUEUE_SIZES),
    "reading ahead what the tier refuses": Bug(admit_all_while_reading_ahead, (on.QUEUE_REUSE,)),
    "block read a second time": Bug(nothing(HitLookup, "_is_being_read", False), on.QUEUE_SIZES),
    "block loaded a second time": Bug(nothing(GpuLoads, "begin"), (on.NVME_ONLY,)),
    "load that has ended still waited for": Bug(nothing(GpuLoads, "end"), on.QUEUE_SIZES),
    # -- stores and their policies --
    "refused block never offered again": Bug(
        after(StorePlanner, "_offer", forget_refused), (on.NVME_ONLY, on.NVME_REUSE, on.WINDOW)
    ),
    "refused block offered every step": Bug(nothing(BackOff, "holds", False)),
    "free blocks stored and not watched": Bug(store_unwatched, on.SPILLOVER_SIZES),
    "blocks that the step zeroes saved": Bug(
        instead(Victims, "save", lambda real, victims, request, _overwritten, now: real(victims, request, (), now)),
        (on.ON_PREEMPTION_WINDOW,),
    ),
    "blocks saved that are not full": Bug(before(Victims, "save", hold_more), on.ON_PREEMPTION_SIZES),
    "victim's blocks copied after they were overwritten": Bug(
        instead(TierManager, "take_plan", plan_without_urgent_jobs), on.ON_PREEMPTION_SIZES
    ),
    "reset that keeps the epoch": Bug(instead(TierManager, "reset", keep_the_epoch)),
    "blocks stored though nobody was preempted": Bug(
        instead(OnPreemption, "reached", lambda _real, _self, _request, _keys, start, stop: range(start, stop)),
        on.ON_PREEMPTION_SIZES,
    ),
    "free block offered again though nobody reached it": Bug(
        before(Spillover, "free_offers", lambda policy, _context: policy._offered.clear()), on.SPILLOVER_SIZES
    ),
    "blocks of a long load that are nobody's": Bug(forget_whose_long_loads_are, (on.LONG_SIZES["shares"],)),
    "states that are nobody's": Bug(forget_whose_states_are, (on.STATES_SPILLOVER,)),
    # -- tiers --
    "slot reused before its deletion is committed": Bug(
        after(SlotPool, "retain", free_at_once), (on.QUEUE, on.ONE_GROUP)
    ),
    "demotion without a pin": Bug(without_pins(Demotions, "_plan_job")),
    "index written when planned": Bug(write_the_index_when_planned),
    "refused block not asked before it leaves": Bug(
        instead(Room, "offer_before_eviction", lambda _real, _self, rows: list(rows)), on.ADMISSION_SIZES
    ),
    "head evicted before its tail": Bug(instead(TailFirst, "_tails", propose_heads)),
    "one request counted twice": Bug(before(Demand, "reach", count_again), (on.REUSE_CPU,)),
    "counts that survive a reset": Bug(instead(ReuseHistory, "clear", clear_once), (on.REUSE_CPU,)),
    "pinned copy evicted": Bug(instead(Catalog, "evictable_in", evict_pinned)),
    "budget overdrawn": Bug(instead(WriteBudget, "spend", spend_half), (on.NVME_BUDGET,)),
    "budget that a restart fills": Bug(after(WriteBudget, "__init__", fill_at_start), (on.NVME_BUDGET,)),
    # -- the remote store --
    "bad block of the remote store loaded again": Bug(
        instead(BadObjects, "may_be_read", lambda *_: True), (on.REMOTE_QUEUE,)
    ),
    "remote store asked after the weights changed": Bug(nothing(RemoteCopies, "stop"), (on.REMOTE_ONLY,)),
    "sent to the remote store whoever wanted it": Bug(send_whatever, (on.REMOTE_REUSE,)),
    "copy sent without a pin": Bug(without_pins(RemoteCopies, "_plan_job"), (on.REMOTE_ONLY,)),
    "copy sent from a drive without a pin": Bug(without_pins(RemoteCopies, "_plan_job"), (on.REMOTE_NVME,)),
    # -- neighbours --
    "neighbour's copy that failed asked for again": Bug(
        nothing(NeighbourCopies, "reject"), (on.NVME_BUDGET, on.BUDGET, on.NVME_ONLY)
    ),
    "neighbour's block served after the weights changed": Bug(nothing(NeighbourCopies, "stop")),
    "neighbour's segment closed under a load": Bug(instead(NeighbourCopies, "take", take_and_close)),
    "neighbour's segment never closed": Bug(instead(NeighbourCopies, "unpin", never_close)),
}


def test_every_bug_has_its_places():
    for bug in BUGS.values():
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(Planter(patch))


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.torture
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planter = Planter(monkeypatch)
    BUGS[name].plant(planter)
    with pytest.raises((AssertionError, KeyError, IndexError, ExceptionGroup)):
        search(BUGS[name].sizes)
    assert planter.reached
