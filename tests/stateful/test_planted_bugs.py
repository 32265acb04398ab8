# SPDX-License-Identifier: Apache-2.0
"""The state machine is tested too: it must catch each of these bugs, planted in the sources of the
real manager."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
from machines import plant, search
from support import manager_sizes as on
from support.manager_parts import Sizes

from kvdisk.manager import (
    catalog,
    demand,
    demotions,
    eviction,
    jobs,
    loads,
    lookup,
    manager,
    neighbours,
    pool,
    prefetch,
    remote,
    requests,
    reuse,
    settlement,
    store_policy,
    stores,
    write_budget,
)


class Bug(NamedTuple):
    """``old`` becomes ``new`` in a module; one of these sizes shows it.

    ``pins``: it gives back pins that are not there.
    """

    module: ModuleType
    old: str
    new: str
    sizes: tuple[Sizes, ...] = on.ON_COMPUTE_SIZES
    pins: bool = False


def late_slots_freed(kind: str, sizes: tuple[Sizes, ...]) -> Bug:
    """Jobs of a kind are settled as if nothing of them were late."""
    new = """
        known, forgotten = {**self._records, **self._zombies}, JobKind.KIND
        for at in [at for at in report.released if at not in known or known[at].job.kind is forgotten]:
            del report.released[at]
        for at in [at for at in report.results if known[at].job.kind is forgotten]:
            report.results[at].late, report.results[at].late_ranks = set(), 0
        ended = Ended([], [], [])"""
    return Bug(jobs, "\n        ended = Ended([], [], [])", new.replace("KIND", kind), sizes)


BUGS = {
    # -- jobs --
    "settled when the first rank answered": Bug(
        jobs,
        """
            assert record is not None, f"job {job_id} answered more than once per rank, or never planned"
            record.ranks += result.ranks""",
        """
            if record is None:
                continue
            record.ranks = self._rank_count""",
    ),
    "one rank's failure ignored": Bug(
        jobs,
        "            for position, reason in result.failed.items():",
        """            record.failed.clear()
            for position, reason in result.failed.items():""",
        (on.CPU_ONLY, on.NVME_ONLY),
    ),
    "source reused before its copy has ended": Bug(jobs, "        return found\n", "        return ()\n"),
    "fence forgotten for a window that moves on": Bug(
        jobs,
        "self._context.watch(blocks)",
        "self._context.watch([move.block for move in record.job.moves if move.key[-2:] == bytes(2)])",
        (on.WINDOW,),
    ),
    "block zeroed before the hook left sound": Bug(jobs, "if block in overwritten:", "if False:", (on.CPU_ONLY,)),
    "sources let go when the first rank has copied": Bug(
        jobs, "if record.copied == self._rank_count:", "if record.copied:", (on.NVME_ONLY,)
    ),
    "late slots freed when the first rank released them": Bug(
        jobs,
        """
            assert record is not None, f"job {job_id} was released more than once per rank, or nothing of it was late"
            record.released += ranks""",
        """
            if record is None:
                continue
            record.released = record.late_ranks""",
        (on.WINDOW,),
    ),
    "idle engine that waits for late moves": Bug(
        jobs,
        """
        return len(self._records)

    def count""",
        """
        return len(self._records) + len(self._zombies)

    def count""",
        (on.WINDOW, on.ONE_GROUP),
    ),
    "late slots of a load freed": late_slots_freed("LOAD", (on.NVME_ONLY,)),
    "late slots of a demotion freed": late_slots_freed("DEMOTE", on.ON_COMPUTE_SIZES),
    "late slots of a store freed": late_slots_freed("STORE", (on.NVME_REUSE,)),
    "late slots of a promotion freed": late_slots_freed("PROMOTE", on.QUEUE_SIZES),
    # -- settlement --
    "failed store left ready": Bug(
        settlement,
        """
        is_store = record.job.kind is JobKind.STORE""",
        """
        is_store = record.job.kind is JobKind.STORE
        if is_store:
            record.failed = {at: why for at, why in record.failed.items() if why is Reason.CANCELLED}""",
    ),
    "failed position promised again": Bug(
        settlement,
        "request.limit_loads(detail.position * self._geometry.groups[detail.group].block_tokens)",
        "pass",
        (on.WINDOW, on.ONE_GROUP),
    ),
    "pins of late moves given back twice": Bug(
        settlement,
        """
            if not late:
                spent""",
        """
            if True:
                spent""",
        pins=True,
    ),
    "pins of late moves never given back": Bug(
        settlement, "for at in sorted(record.late, reverse=True):", "for at in ():"
    ),
    "neighbour's segment closed under a late read": Bug(
        settlement,
        """
        if not late:
            self._neighbours""",
        """
        if True:
            self._neighbours""",
        (on.REUSE_CPU, on.NVME_ONLY),
    ),
    "failed promotion left ready": Bug(
        settlement,
        "            self._end_load_of_request(record, now)",
        """            self._end_load_of_request(record, now)
        else:
            record.failed = {}""",
        on.QUEUE_SIZES,
    ),
    "source of a failed promotion kept": Bug(
        settlement,
        "if reason is not None and self._is_bad(row, tier, reason):",
        "if record.job.kind is JobKind.LOAD and reason is not None and self._is_bad(row, tier, reason):",
        on.QUEUE_SIZES,
    ),
    # -- loads and reading ahead --
    "read without a pin": Bug(loads, "catalog.pin(rows, source)", "pass", (on.ONE_GROUP, *on.QUEUE_SIZES), pins=True),
    "waiting for an answer without end": Bug(loads, "if not self._is_over(request, now):", "if True:"),
    "waiting for a load without end": Bug(
        loads,
        "return started_s is not None and now - started_s >= self._config.lookup_wait_s",
        "return False",
        (on.NVME_ONLY, on.QUEUE_WINDOW),
    ),
    "neighbour's block kept under a generation of its own": Bug(
        loads, "catalog.add((read.key,), (read.generation,),", "catalog.add((read.key,), (read.generation + 1,),"
    ),
    "lookup remembered after an eviction": Bug(
        lookup,
        "held = (local_tokens, catalog.losses, hint_changes)",
        "held = (local_tokens, 0, hint_changes)",
        (on.ONE_GROUP,),
    ),
    "reading ahead without bound": Bug(
        prefetch, "total[size_class] // PREFETCH_DIVISOR", "total[size_class]", on.QUEUE_SIZES
    ),
    "reading ahead for those that run": Bug(prefetch, "self._waiting.pop(request, None)", "pass", on.QUEUE_SIZES),
    "slots ahead never given back": Bug(prefetch, "self._taken.subtract(ahead)", "pass", on.QUEUE_SIZES),
    "reading ahead what the tier refuses": Bug(
        prefetch, " and self._landing.admission.admits((read.key,))[0]:", ":", (on.QUEUE_REUSE,)
    ),
    "block read a second time": Bug(loads, "if not landing or hit <= local_tokens:", "if True:", on.QUEUE_SIZES),
    "block loaded a second time": Bug(loads, "if self._enabled:", "if False:", (on.NVME_ONLY,)),
    "load that has ended still waited for": Bug(
        loads, "job = self._jobs.pop(job_id, None)", "job = None and self._jobs", on.QUEUE_SIZES
    ),
    # -- stores and their policies --
    "refused block never offered again": Bug(
        stores,
        "request.due = [(offer.group, offer.position) for offer in refused]",
        "request.due = []",
        (on.NVME_ONLY, on.NVME_REUSE, on.WINDOW),
    ),
    "refused block offered every step": Bug(
        requests, "return released <= self.released or now < self.retry_s", "return False"
    ),
    "refused free block offered every step": Bug(
        stores, "or self._free_back_off.holds(self._state.released, now)", "", (on.SPILLOVER,)
    ),
    "free blocks stored and not watched": Bug(
        stores, "if watched:", "if watched and request is not None:", on.SPILLOVER_SIZES
    ),
    "blocks that the step zeroes saved": Bug(
        stores, "0 if block in overwritten else block for", "block for", (on.ON_PREEMPTION_WINDOW,)
    ),
    "blocks saved that are not full": Bug(
        stores,
        """
        if request.stale or not request.held_blocks:""",
        """
        request.held_tokens += 2
        if request.stale or not request.held_blocks:""",
        on.ON_PREEMPTION_SIZES,
    ),
    "victim's blocks copied after they were overwritten": Bug(
        manager, "self._urgent.append(job_id)", "pass", on.ON_PREEMPTION_SIZES
    ),
    "reset that keeps the epoch": Bug(manager, "self._state.epoch = epoch", "return"),
    "blocks stored though nobody was preempted": Bug(
        store_policy,
        """
        ``keys``: of all the group's blocks. After a preemption a request begins at 0 again.
        \"""
        return ()""",
        """
        \"""
        return range(start, stop)""",
        on.ON_PREEMPTION_SIZES,
    ),
    "free block offered again though nobody reached it": Bug(
        store_policy,
        "        offers = []",
        """        self._offered.clear()
        offers = []""",
        on.SPILLOVER_SIZES,
    ),
    # -- tiers --
    "slot reused before its deletion is committed": Bug(
        pool, "self._limbo.append((ticket, ranges))", "self._change(ranges, LIMBO, FREE)", (on.QUEUE, on.ONE_GROUP)
    ),
    "demotion without a pin": Bug(demotions, "catalog.pin(rows, source)", "pass", pins=True),
    "index written when planned": Bug(
        demotions,
        "        self._jobs.append(record.job.id)",
        """        self._jobs.append(record.job.id)
        self._lower._record(rows, 0)""",
    ),
    "refused block not asked before it leaves": Bug(
        demotions, "set(self._queue(admitted))", "set()", on.ADMISSION_SIZES
    ),
    "refusal of NVMe never asked again": Bug(
        demotions,
        """
        lacking = [row for row in rows if""",
        """
        asked = self.__dict__.setdefault("asked", set())
        rows = [row for row in rows if (keys[row], self._catalog.generations[row]) not in asked]
        asked.update((keys[row], self._catalog.generations[row]) for row in rows)
        lacking = [row for row in rows if""",
    ),
    "head evicted before its tail": Bug(
        eviction, "self._tails(found) if count", "[row for _, row in self._policy.proposals()] if count"
    ),
    "parent not found again after a gap": Bug(
        catalog,
        "        rows, is_placeholder = self._rows_of(keys), self._is_placeholder",
        """        for key in [key for key in keys if self.find(key) < 0]:
            self._rows.pop(key, None)
        rows, is_placeholder = self._rows_of(keys), self._is_placeholder""",
    ),
    "one request counted twice": Bug(demand, "start = request.counted[group]", "start = 0", (on.REUSE_CPU,)),
    "counts that survive a reset": Bug(
        reuse,
        """
        self._tags, self._times = array""",
        """
        if hasattr(self, "_tags"):
            return
        self._tags, self._times = array""",
        (on.REUSE_CPU,),
    ),
    "uses that rise along a chain": Bug(
        reuse,
        """
        return kin

    def _raise""",
        """
        place, _ = self._find(number_of(keys[stop - 1]))
        self._marks[place] = min(255, 2 * self._marks[place])
        return kin

    def _raise""",
        (on.REUSE_CPU,),
    ),
    "pinned copy evicted": Bug(catalog, "states[row] == READY and pins[row] == 0", "states[row] == READY"),
    "budget overdrawn": Bug(
        write_budget, "self._bytes -= count * block_bytes", "self._bytes -= count // 2 * block_bytes", (on.NVME_BUDGET,)
    ),
    "budget that a restart fills": Bug(
        write_budget, "self._bytes = 0.0", "self._bytes = float(self.burst_bytes)", (on.NVME_BUDGET,)
    ),
    # -- the remote store --
    "bad block of the remote store loaded again": Bug(
        remote, "            self._rejected[move.key] = None", "            pass", (on.REMOTE_ONLY,)
    ),
    "remote store asked after the weights changed": Bug(remote, "self._index = None\n", "return\n", (on.REMOTE_ONLY,)),
    "sent to the remote store whoever wanted it": Bug(
        remote, "if not self.admission.is_open:", "if False:", (on.REMOTE_REUSE,)
    ),
    "copy sent without a pin": Bug(
        remote, "            catalog.pin(rows, self.source)", "            pass", (on.REMOTE_ONLY,)
    ),
    # -- neighbours --
    "neighbour's copy that failed asked for again": Bug(
        neighbours, """self._stats.add("foreign_failures")""", "return", (on.NVME_BUDGET, on.BUDGET, on.NVME_ONLY)
    ),
    "neighbour's block served after the weights changed": Bug(neighbours, "self._neighbours = None", "return"),
    "neighbour's segment closed under a load": Bug(
        neighbours,
        "self._users[number] += 1",
        """self._users[number] += 1
        if self._users[number] == 1:
            self._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=self._open[number])""",
    ),
    "neighbour's segment never closed": Bug(neighbours, "if self._users[slot.segment] == 0:", "if False:"),
}


RARE = (
    "sources let go when the first rank has copied",
    "late slots freed when the first rank released them",
    "failed position promised again",
    "pins of late moves given back twice",
    "neighbour's segment closed under a late read",
)
"""The search for these takes longer than for all others together."""


@pytest.mark.parametrize("name", RARE)
def test_a_bug_still_fits_the_sources(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, BUGS[name].module, BUGS[name].old, BUGS[name].new)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.torture if name in RARE else ()) for name in BUGS]
)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    plant(monkeypatch, bug.module, bug.old, bug.new)
    if bug.pins:
        plant(
            monkeypatch,
            catalog,
            "            assert pins[row] > 0\n            pins[row] -= 1",
            "            pins[row] -= pins[row] > 0",
        )
    with pytest.raises((AssertionError, KeyError, IndexError, ExceptionGroup)):
        search(bug.sizes)
