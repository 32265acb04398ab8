# SPDX-License-Identifier: Apache-2.0
"""What of a request's prefix can be loaded, whether it is worth it, and the jobs that load it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

from kvdisk.blocks import CPU, NVME, BlockKey, JobId, Slot, Tier
from kvdisk.config import Config
from kvdisk.geometry import Geometry
from kvdisk.manager.accounting import Served
from kvdisk.manager.admission import AdmissionPolicy, Wants
from kvdisk.manager.catalog import ABSENT, READY, Catalog
from kvdisk.manager.chains import NONE
from kvdisk.manager.jobs import JobRecord, MoveDetail, Transfers, make_details
from kvdisk.manager.lookup import first_needed, longest_hit
from kvdisk.manager.neighbours import ForeignCopies
from kvdisk.manager.prefetch import PendingReads
from kvdisk.manager.requests import RequestState
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import Job, JobKind, Move, make_moves

_LOAD = JobKind.LOAD

MOST_BLOCKS = 4
TRIED_ANYWAY = 16
LEAST_STEP_TOKENS = 256
"""Steps of fewer tokens say how fast the engine decodes, not how fast it computes a prompt."""
LONGEST_STEP_S = 5.0
"""What takes longer is a pause between steps."""
_SMOOTHING = 1 / 8
"""Weight of a new observation."""
_SLACK = 0.5
"""Blocks by which the estimate must leave the range of the threshold in use before that changes."""


class LoadPrice:
    """See the module. ``fixed_tokens``: given by the user; None: learn. ``step_tokens``: those of the largest block."""

    def __init__(self, fixed_tokens: int | None, step_tokens: int) -> None:
        self._fixed_tokens = fixed_tokens
        self._step_tokens = step_tokens
        self._rate: float | None = None
        self._seconds: dict[Tier, float] = {}
        self._least = {CPU: 0, NVME: 0}
        self._last_step: tuple[float, int] | None = None
        self._sent_s: dict[JobId, float] = {}

    def may_refuse(self, tokens: int) -> bool:
        """Whether a hit is so short that ``is_worth`` has to be asked."""
        bound = MOST_BLOCKS * self._step_tokens if self._fixed_tokens is None else self._fixed_tokens
        return tokens < bound

    def is_worth(self, tokens: int, tier: Tier, arrival: int) -> bool:
        """Whether to load a hit. ``tier``: the slowest that it comes from; ``arrival``: the request's number."""
        if self._fixed_tokens is not None:
            return tokens >= self._fixed_tokens
        return tokens >= self._least[tier] or arrival % TRIED_ANYWAY == 0

    def least_tokens(self, tier: Tier) -> int:
        """Return the shortest hit that is loaded from a tier."""
        return self._least[tier] if self._fixed_tokens is None else self._fixed_tokens

    def stepped(self, now: float, tokens: int, jobs: tuple[Job, ...]) -> None:
        """A step begins that computes so many tokens, and sends these jobs out; the one before has ended."""
        if self._fixed_tokens is not None:
            return
        last, self._last_step = self._last_step, (now, tokens)
        if last is not None and last[1] >= LEAST_STEP_TOKENS and 0 < now - last[0] <= LONGEST_STEP_S:
            rate = last[1] / (now - last[0])
            self._rate = rate if self._rate is None else self._rate + (rate - self._rate) * _SMOOTHING
            self._update()
        for job in jobs:
            if job.kind is _LOAD:
                self._sent_s[job.id] = now

    def settled(self, record: JobRecord, now: float) -> None:
        """A load was settled; of one that brought all that it was sent for the time is noted."""
        sent_s = self._sent_s.pop(record.job.id, None)
        if sent_s is None or record.failed or not record.job.moves:
            return
        sources = [move.nvme for move in record.job.moves]
        tier = CPU if sources.count(None) == len(sources) else NVME
        seconds, known = now - sent_s, self._seconds.get(tier)
        # At once down, and slowly up: the quickest of the last loads or so.
        quicker = known is None or seconds <= known
        self._seconds[tier] = seconds if known is None or quicker else known + (seconds - known) * _SMOOTHING
        self._update()

    def _update(self) -> None:
        """Take over what the estimates say, where they have left the range of the thresholds in use."""
        if self._rate is None:
            return
        for tier, seconds in self._seconds.items():
            blocks = min(self._rate * seconds / self._step_tokens, MOST_BLOCKS)
            current = self._least[tier] // self._step_tokens
            if not current - _SLACK <= blocks < current + 1 + _SLACK:
                self._least[tier] = int(blocks) * self._step_tokens


class LoadDraft:
    """See the module. The columns are those of ``Move`` and ``MoveDetail``, all of one length.

    Blocks are added by ``extend``, and then, with what is known of their copies, by ``found`` or ``await_places``.
    """

    def __init__(self) -> None:
        self.keys: list[BlockKey] = []
        self.generations: list[int] = []
        self.blocks: list[int] = []
        self.cpu: list[Slot | None] = []
        self.nvme: list[Slot | None] = []
        self.parents: list[BlockKey | None] = []
        self.rows: list[int] = []
        self.groups: list[int] = []
        self.positions: list[int] = []

    def extend(self, group: int, positions: Sequence[int], keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Add blocks of one group, by their positions in the request. ``keys``, ``blocks``: all of the group's."""
        count, first = len(positions), positions[0]
        assert positions[-1] < min(len(keys), len(blocks)), "a block without a key, or without a place on the GPU"
        if positions[-1] - first == count - 1:  # all in a row, as most are
            self.keys += keys[first : first + count]
            self.blocks += blocks[first : first + count]
        else:
            self.keys += [keys[position] for position in positions]
            self.blocks += [blocks[position] for position in positions]
        self.groups += [group] * count
        self.positions += positions

    def found(self, rows: Sequence[int], tier: Tier, catalog: Catalog) -> None:
        """All blocks added last have copies in one tier, as most have: note their rows and those copies."""
        slots, others = (self.cpu, self.nvme) if tier is CPU else (self.nvme, self.cpu)
        slots += catalog.slots(rows, tier)
        others += [None] * len(rows)
        self.rows += rows
        self.generations += map(catalog.generations.__getitem__, rows)
        self.parents += map(catalog.parents.__getitem__, rows)

    def await_places(self, positions: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """The blocks added last have no row, no slot and generation 0 until ``find`` tells.

        ``keys``: of all the group's. Their parents are the blocks before them in their request.
        """
        count = len(positions)
        self.generations += [0] * count
        self.cpu += [None] * count
        self.nvme += [None] * count
        self.parents += [keys[position - 1] if position else None for position in positions]
        self.rows += [-1] * count

    def find(self, start: int, places: Sequence[int], rows: Sequence[int], tier: Tier, catalog: Catalog) -> None:
        """Note the rows, and the copies in a tier, of blocks, whose places are counted from ``start``."""
        slots = self.cpu if tier is CPU else self.nvme
        columns: tuple[tuple[list[Any], Iterable[Any]], ...] = (
            (self.rows, rows),
            (slots, catalog.slots(rows, tier)),
            (self.generations, map(catalog.generations.__getitem__, rows)),
            (self.parents, map(catalog.parents.__getitem__, rows)),
        )
        for column, values in columns:
            for at, value in zip(places, values, strict=True):
                column[start + at] = value

    def moves(self) -> list[Move]:
        """Return the moves."""
        return make_moves(self.keys, self.generations, self.blocks, self.cpu, self.nvme, self.parents)

    def details(self) -> list[MoveDetail]:
        """Return their details."""
        return make_details(self.rows, self.groups, self.positions)


_LOAD = JobKind.LOAD


class LoadPlanner:
    """Answers lookups and plans loads. ``cpu`` is None where that tier does not exist."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        catalog: Catalog,
        transfers: Transfers,
        served: Served,
        cpu: CpuSpace | None,
        cpu_admission: AdmissionPolicy,
        wants: Wants,
        foreign: ForeignCopies,
        reads: PendingReads,
        price: LoadPrice,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._catalog = catalog
        self._transfers = transfers
        self._served = served
        self._cpu = cpu
        self._cpu_admission = cpu_admission
        self._wants = wants
        self._foreign = foreign
        self._reads = reads
        self._price = price

    def lookup(self, request: RequestState, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """See ``TierManager.lookup``."""
        if request.most_load_tokens == 0:
            return 0
        request.update_keys(self._geometry)
        limit = total_tokens - 1
        if request.load_limit_tokens is not None:
            limit = min(limit, request.load_limit_tokens)
        if request.most_load_tokens is not None:
            limit = min(limit, local_tokens + request.most_load_tokens)
        self._foreign.refresh(request, now)
        known = self._foreign.promised
        hit, coming = request.lookups.hits(
            self._catalog,
            self._geometry,
            request.keys,
            local_tokens,
            limit,
            known,
            self._foreign.changes if known else -1,
        )
        loader = self._loader_of(request, local_tokens, hit, now)
        if loader is not None:
            request.await_load(loader)
        if not request.gave_up_waiting:
            step = self._geometry.step_tokens
            asking = coming < limit // step * step and self._foreign.is_asking(request)
            reader = self._reader_of(request, local_tokens, hit)
            comes = coming > hit or asking or reader is not None or loader is not None
            if comes and self._may_wait(request, now):
                self._reads.promotion_awaited |= reader is JobKind.PROMOTE
                self._served.waits(request, now)
                return None
        tokens = hit - local_tokens
        if tokens <= 0 or (self._price.may_refuse(tokens) and not self._is_worth(request, local_tokens, hit)):
            self._served.found_too_little(tokens)
            tokens = 0
        else:
            request.wait_started_s = None
        request.asked = (local_tokens, limit, tokens)
        if request.waited_since_s is not None:
            self._served.waited(request, now)
        return tokens

    def _needed_keys(self, request: RequestState, local_tokens: int, hit: int) -> list[list[BlockKey]]:
        """Return, group by group, the keys of what a hit needs from outside the GPU."""
        needed = []
        for group in self._geometry.groups:
            first = first_needed(group, local_tokens, hit)
            needed.append(request.keys[group.group][first : hit // group.block_tokens])
        return needed

    def _reader_of(self, request: RequestState, local_tokens: int, hit: int) -> JobKind | None:
        """Return what kind of job is just reading a block of a hit into a CPU slot, where one is."""
        if not self._reads.any or hit <= local_tokens:
            return None
        readers = [self._reads.reader_of(keys) for keys in self._needed_keys(request, local_tokens, hit)]
        return JobKind.PROMOTE if JobKind.PROMOTE in readers else next(filter(None, readers), None)

    def _loader_of(self, request: RequestState, local_tokens: int, hit: int, now: float) -> JobId | None:
        """Return the load of another request after which the GPU will have a part of a hit, if there is one.

        It is looked for once for each load that is waited for, and again when the time for it is over.
        """
        loads, awaited = self._reads.to_gpu, request.awaited_load
        if not loads.any or hit <= local_tokens:
            return None
        if loads.is_out(awaited) and not request.gave_up_waiting and not self._is_over(request, now):
            return awaited
        end = longest_hit(loads, self._geometry, request.keys, local_tokens, hit, coming=False)
        saved = end - local_tokens
        if saved <= 0 or (self._price.may_refuse(saved) and not self._is_worth(request, local_tokens, end)):
            return None
        return loads.loader_of(next(keys[0] for keys in self._needed_keys(request, local_tokens, end) if keys))

    def _is_worth(self, request: RequestState, local_tokens: int, hit: int) -> bool:
        """Whether a short hit is worth its load."""
        catalog, on_cpu = self._catalog, True
        for keys in self._needed_keys(request, local_tokens, hit):
            for row in catalog.find_all(keys):
                on_cpu = on_cpu and row >= 0 and catalog.state(row, CPU) == READY
        return self._price.is_worth(hit - local_tokens, CPU if on_cpu else NVME, request.arrival)

    def _may_wait(self, request: RequestState, now: float) -> bool:
        if request.wait_started_s is None:
            request.wait_started_s = now
        if not self._is_over(request, now):
            return True
        request.gave_up_waiting = True
        self._served.gave_up_waiting()
        return False

    def _is_over(self, request: RequestState, now: float) -> bool:
        started_s = request.wait_started_s
        return started_s is not None and now - started_s >= self._config.lookup_wait_s

    def plan(
        self,
        request: RequestState,
        local_tokens: int,
        external_tokens: int,
        block_ids: Sequence[Sequence[int]],
        epoch: int,
    ) -> None:
        """See ``TierManager.plan_load``. ``epoch``: the current one."""
        end_tokens = local_tokens + external_tokens
        draft = LoadDraft()
        for group in self._geometry.groups:
            blocks = block_ids[group.group]
            # What the engine has given a block is loaded or fails, even where ``lookup`` needed less of a
            # window: the engine would cache a block that nobody wrote under its hash.
            first, end = local_tokens // group.block_tokens, end_tokens // group.block_tokens
            positions: Sequence[int] = range(first, end)
            if 0 in blocks[first:end]:
                positions = [position for position in positions if blocks[position]]
            if positions:
                at = len(draft.keys)
                keys = request.keys[group.group]
                draft.extend(group.group, positions, keys, blocks)
                self._find_sources(draft, at, request.request_id, keys, are_chain=len(positions) == end - first)
        self._leave_cpu_copies(draft, epoch)
        moves, details = draft.moves(), draft.details()
        request.loading = True
        request.wait_started_s = None
        self._served.loaded(request, local_tokens, external_tokens, draft.cpu, draft.nvme, details)
        record = self._transfers.add(
            _LOAD, moves, details, epoch=epoch, request_id=request.request_id, arrival=request.arrival
        )
        request.load_job = record.job.id
        self._reads.to_gpu.begin(record.job)

    def _find_sources(
        self, draft: LoadDraft, start: int, request_id: str, all_keys: Sequence[BlockKey], *, are_chain: bool
    ) -> None:
        """Pin the best copy of each of a draft's blocks from ``start`` on: in the CPU tier, on NVMe, of another home.

        Other homes' blocks have no row, and those that are nowhere no slot either. ``all_keys``: of all of the
        request's blocks of the group. ``are_chain``: each block is the parent of the next.
        """
        catalog, keys = self._catalog, draft.keys[start:]
        rows = catalog.find_chain(keys) if are_chain else catalog.find_all(keys)
        here: Sequence[int] = range(len(rows))
        states, are_ready = catalog.columns(CPU).states, catalog.are_ready(rows)
        # A block without a row has no state either.
        in_memory = bytes(map(states.__getitem__, rows)).count(READY) if are_ready else NONE
        if in_memory in {0, len(rows)}:
            tier = CPU if in_memory else NVME
            catalog.pin(rows, tier)
            draft.found(rows, tier, catalog)
            self._wants.note(keys, request_id)
            return
        draft.await_places(draft.positions[start:], all_keys)
        if not are_ready:
            here = [at for at, row in enumerate(rows) if catalog.is_ready(row)]
            abroad = self._find_abroad(draft, start, {*range(len(rows))}.difference(here))
            keys = [keys[at] for at in sorted({*here, *abroad})]
        on_cpu = [at for at in here if states[rows[at]] == READY]
        on_nvme = [at for at in here if states[rows[at]] != READY]
        for tier, places in ((CPU, on_cpu), (NVME, on_nvme)):
            if places:
                found = rows if len(places) == len(rows) else [rows[at] for at in places]
                catalog.pin(found, tier)
                draft.find(start, places, found, tier, catalog)
        self._wants.note(keys, request_id)

    def _find_abroad(self, draft: LoadDraft, start: int, places: Iterable[int]) -> list[int]:
        """Pin copies of other homes, and return of which blocks there are some. ``places``: counted from ``start``."""
        found = []
        for at in places:
            copy = self._foreign.find(draft.keys[start + at])
            if copy is not None:
                found.append(at)
                draft.generations[start + at], draft.nvme[start + at] = copy.generation, self._foreign.pin(copy)
        return found

    def _leave_cpu_copies(self, draft: LoadDraft, epoch: int) -> None:
        """Let blocks read from NVMe land in CPU slots where admission and room allow; the rest goes through staging."""
        if self._cpu is None or draft.nvme.count(None) == len(draft.nvme):
            return
        catalog = self._catalog
        vacant: list[int] = []
        for at, slot in enumerate(draft.nvme):
            if slot is not None:
                row = draft.rows[at]
                # Another home's block gets a row of its own, unless this engine is just writing or dropping that block.
                absent = catalog.state(row, CPU) == ABSENT if row >= 0 else catalog.find(draft.keys[at]) < 0
                vacant += [at] * absent
        wanted: dict[int, list[int]] = {}
        for at in compress(vacant, self._cpu_admission.admits([draft.keys[at] for at in vacant])):
            wanted.setdefault(self._geometry.size_classes[draft.groups[at]], []).append(at)
        for size_class, places in wanted.items():
            slots = self._cpu.allocate(size_class, len(places))
            for at, slot in zip(places, slots, strict=False):
                draft.cpu[at] = slot
                if draft.rows[at] < 0:
                    draft.rows[at] = catalog.add(draft.keys[at], draft.generations[at], epoch, draft.parents[at])
            rows = [draft.rows[at] for at in places[: len(slots)]]
            catalog.begin_all(rows, CPU, slots)
            self._reads.begin(_LOAD, [draft.keys[at] for at in places[: len(slots)]], rows)
