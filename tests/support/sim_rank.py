# SPDX-License-Identifier: Apache-2.0
"""One rank of a simulation: the real mover without its thread, over real tensors and arenas and a
simulated drive."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvdisk.assembly import WorkerHalf
from kvdisk.blocks import BlockKey, JobId, Slot, Tier, group_of
from kvdisk.config import Config
from kvdisk.device.header import SlotIdentity, check_slot
from kvdisk.geometry import HEADER_BYTES, Geometry, Namespace
from kvdisk.messages import NO_BLOCK, Job, JobKind, JobResult, Report
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import HostCopier, Lane, LayerBlocks
from kvdisk.worker.copier_base import Event, Passed, Slots
from kvdisk.worker.direct import Direct
from kvdisk.worker.gpu_staging import GpuStaging
from kvdisk.worker.mover import Mover
from kvdisk.worker.resources import Resources
from kvdisk.worker.runner import Runner
from support.addressed_device import AddressedDevice, CpuLanes
from support.fake_engine import StepWork
from support.fake_remote import SimObjects, SimRemote
from support.live_model import LiveModel
from support.live_rank import LocalRank
from support.manager_parts import FINGERPRINT, Sizes
from support.sim_drive import Note, SimDevice, SimDrive, SimFiles, Weather

STAGING_SLOTS = 3
PART_SLOTS = 2
TURNS_OF_WORK = 10_000


def staging_is_free(runner: Runner) -> bool:
    """Whether no part has staging."""
    memories = runner._resources.memories
    return all(tuple(map(len, free)) == memories[at].slot_counts for at, free in runner._batches._free.items())


class World(NamedTuple):
    """What all rooms of a simulation share. ``straight``: decides what goes straight to the GPU;
    None: nothing does."""

    rng: random.Random
    weather: Weather
    note: Note
    clock: Callable[[], float]
    straight: random.Random | None = None


class _CopyEnd:
    """``Event`` of a copy that ends when the simulation says so."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.ended = False
        self._wait = wait

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self._wait()


class SimCopier(HostCopier):
    """A ``HostCopier`` some of whose copies take their time, as on a GPU; those of a kind end in
    their order.

    ``users(block)``: the jobs that may gather from a GPU block, or scatter into it, by kind of
    copy.
    """

    def __init__(
        self, groups: Sequence[LayerBlocks], world: World, users: Mapping[str, Callable[[int], Sequence[JobId]]]
    ) -> None:
        super().__init__(groups)
        self._users = users
        self._world = world
        self._pending: dict[str, deque[tuple[Callable[[], object], _CopyEnd, Sequence[int]]]] = {
            "gather": deque(),
            "scatter": deque(),
        }

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event:
        now = slots._replace(indices=list(slots.indices))
        return self._begin("gather", list(blocks), partial(super().gather, group, list(blocks), now, after))

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event:
        now = slots._replace(indices=list(slots.indices))
        return self._begin("scatter", list(blocks), partial(super().scatter, group, now, list(blocks), after))

    def hold_model(self) -> None:
        """See ``HostCopier``: before the model goes on, every gather that was started has ended."""
        self._end("gather", len(self._pending["gather"]))

    def settle(self) -> None:
        """See ``HostCopier``."""
        self.end_all()

    def reads(self, block: int) -> bool:
        return any(block in blocks for _, _, blocks in self._pending["gather"])

    def end_one(self) -> None:
        kinds = [kind for kind, pending in self._pending.items() if pending]
        if kinds:
            self._end(self._world.rng.choice(kinds))

    def end_all(self) -> None:
        for kind in self._pending:
            self._end(kind, len(self._pending[kind]))

    def _begin(self, kind: str, blocks: Sequence[int], copy: Callable[[], object]) -> Event:
        slow = self._world.weather.slow_copies
        if not self._pending[kind] and (not slow or self._world.rng.random() >= slow):
            self._run(kind, blocks, copy)
            return Passed()
        event = _CopyEnd(lambda: self._end(kind, until=event))
        self._pending[kind].append((copy, event, blocks))
        return event

    def _end(self, kind: str, count: int = 1, until: _CopyEnd | None = None) -> None:
        pending = self._pending[kind]
        while pending and (count > 0 if until is None else not until.ended):
            copy, event, blocks = pending.popleft()
            self._run(kind, blocks, copy)
            event.ended = True
            count -= 1

    def _run(self, kind: str, blocks: Sequence[int], copy: Callable[[], object]) -> None:
        for block in blocks:
            assert block == NO_BLOCK or self._users[kind](block), (
                f"a {kind} touches block {block}, and its job has been reported"
            )
        copy()


class _SlowEvent:
    """An event that has come when it is asked often enough."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self._rng = rng
        self._weather = weather
        self._ended = False

    def query(self) -> bool:
        self._ended = self._ended or self._rng.random() >= self._weather.slow_copies
        return self._ended

    def synchronize(self) -> None:
        self._ended = True


class SimLanes(CpuLanes):
    """What they are given is done at once, and known to be done later."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        super().__init__()
        self._rng = rng
        self._weather = weather

    def record(self, lane: Lane | None) -> Event:
        return _SlowEvent(self._rng, self._weather)


def draw_direct(geometry: Geometry, slots: int, rng: random.Random, weather: Weather) -> Direct | None:
    """Return what a start may have chosen: for one process all sizes, for another some or none, for
    each direction.

    ``slots``: of staging, for each size class. ``rng``: of nothing else, so that a run without is
    what it was.
    """
    every = range(len(geometry.slot_sizes))
    loads, stores = (frozenset(at for at in every if rng.random() < rng.choice((0.0, 0.5, 1.0))) for _ in range(2))
    if not loads | stores:
        return None
    staging = GpuStaging(geometry.slot_sizes, [slots] * len(every), SimLanes(rng, weather))
    return Direct(staging, loads, stores)


class SimRank(LocalRank):
    """See the module. Plans come in and reports go out as for any rank; in between ``stir`` lets
    something happen.

    ``drive`` outlives the rank.
    """

    drive: SimDrive
    _files: SimFiles
    device: SimDevice
    copier: SimCopier

    def __init__(
        self, sizes: Sizes, model: LiveModel, rank: int, drive: SimDrive, world: World, remote: SimRemote | None = None
    ) -> None:
        self.drive = drive
        self.objects = None if remote is None else SimObjects(remote.contents, world.weather, world.rng)
        self.sizes = sizes
        self._world = world
        self._right: dict[tuple[Tier, Slot], tuple[object, bytes]] = {}
        """What ``check_slot`` found right last of a slot: what was asked, and the bytes."""
        self.seen: Counter[str] = Counter()
        """What became of moves, by kind of job."""
        super().__init__(sizes.config, model, rank, sizes.block_count, self._make)
        self.mover = self._parts.mover

    def _make(self, config: Config, _: LiveModel, rank: int, layers: list[list[torch.Tensor]]) -> WorkerHalf:
        geometry, world = self.sizes.geometry, self._world
        users = {"gather": self.readers_of, "scatter": self.writers_of}
        self.copier = SimCopier(
            [LayerBlocks(group, sizes.gpu_blocks) for group, sizes in zip(layers, geometry.groups, strict=True)],
            world,
            users,
        )
        files = self._files = SimFiles(self.drive, world.weather, world.rng, world.note)
        self.device = SimDevice(rank, self.drive, files, world.weather, world.rng, world.note)
        self.arena = Arena(geometry.slot_sizes, self.sizes.cpu_slots, pin=False) if self.sizes.has_cpu else None
        staging = Arena(geometry.slot_sizes, [STAGING_SLOTS] * len(geometry.slot_sizes), pin=False)
        rng = world.straight
        direct = None if rng is None else draw_direct(geometry, STAGING_SLOTS, rng, world.weather)
        device = self.device if direct is None else AddressedDevice(self.device)
        arenas = {} if self.arena is None else {Tier.CPU: self.arena}
        mover = Mover(
            Resources(geometry, rank, arenas, staging, self.copier, device, files, direct, self.objects),
            io_deadline_s=config.io_deadline_s,
            fingerprint=FINGERPRINT,
            clock=world.clock,
            batch_bytes=PART_SLOTS * min(geometry.slot_sizes),
            threaded=False,
        )
        return WorkerHalf(mover, (staging,) if self.arena is None else (self.arena, staging))

    # -- steps ---------------------------------------------------------------------------------

    def before_forward(self, work: StepWork) -> None:
        for block in work.new_blocks:
            assert not self.writers_of(block), f"block {block} is given away while rank {self.rank} still writes it"
        super().before_forward(work)

    def forward(self, work: StepWork) -> None:
        for _, block, _ in work.writes:
            assert not self.reads(block), "a block is overwritten while a store reads it"
            assert not self.writers_of(block), "a block is computed while a load writes it"
        super().forward(work)

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        report, loads = super().take_report()
        self.seen["released"] += len(report.released)
        for job_id in report.released:
            self._world.note(f"rank {self.rank} released {job_id}")
        return report, loads

    def _end(self, job: Job, result: JobResult) -> None:
        super()._end(job, result)
        failed = {at: reason.name for at, reason in sorted(result.failed.items())}
        self.seen.update(f"{job.kind.name} {reason}" for reason in failed.values())
        self.seen[f"{job.kind.name} late"] += len(result.late)
        self.seen[f"{job.kind.name} whole"] += not failed
        self._world.note(f"rank {self.rank} ended {job.kind.name} {job.id}: {failed} late {sorted(result.late)}")

    def readers_of(self, block_id: int) -> list[JobId]:
        """Return the stores of a GPU block that the rank has not reported."""
        return self._users(block_id, JobKind.STORE)

    def reads(self, block_id: int) -> bool:
        runner = self.mover._runner
        moves = [
            part.work.job.moves[at] for part in runner._batches.queued if part.route.gathers for at in part.positions
        ]
        moves += [move for work in runner._waiting if work.job.kind is JobKind.STORE for move in work.job.moves]
        inbox = [job for plan, _, _ in self.mover._inbox for job in plan.jobs if job.kind is JobKind.STORE]
        moves += [move for job in inbox for move in job.moves]
        return self.copier.reads(block_id) or any(block_id in move.gpu_blocks for move in moves)

    def writers_of(self, block_id: int) -> list[JobId]:
        """Return the loads into a GPU block that the rank has not reported."""
        return self._users(block_id, JobKind.LOAD)

    def _users(self, block_id: int, kind: JobKind) -> list[JobId]:
        found = [job for job in self._jobs.values() if job.kind is kind]
        return [job.id for job in found if any(block_id in move.gpu_blocks for move in job.moves)]

    # -- time ----------------------------------------------------------------------------------

    def _give_time(self) -> None:
        """Nothing: the simulation does."""

    def stir(self) -> None:
        """Let the mover turn, or end a batch or a copy."""
        what = self._world.rng.randrange(4)
        if what == 0:
            self.device.end_one()
        elif what == 1:
            self.copier.end_one()
        else:
            self._turn()

    def _turn(self) -> bool:
        happened = self.mover.turn()
        if happened:
            self._world.note(f"rank {self.rank} turns")
        return happened

    def look_for_files(self) -> None:
        """Find the files that others have removed, as the thread of files does now and then."""
        found = self._files.give_back()
        if found:
            self.seen["removed files were found"] += 1
            self._world.note(f"rank {self.rank} finds that the files of {found} are gone")
        self.mover._runner._files._removed.put(found)

    def work_off(self) -> None:
        """Do all that can be done; batches that hang do so further on."""
        for _ in range(TURNS_OF_WORK):
            if self.objects is not None:
                self.objects.waits = False
            self.device.release()
            self.copier.end_all()
            if not self._turn():
                if self.objects is not None:
                    self.objects.waits = True
                return
        raise AssertionError(f"the mover of rank {self.rank} never comes to rest")

    def crash(self) -> None:
        """End as a process does that is killed: no copy goes on, some of what is at the device
        does."""
        self.device.crash()
        for arena in self._parts.memory:
            arena.close()

    # -- questions -----------------------------------------------------------------------------

    def slot(self, tier: Tier, slot: Slot, slot_bytes: int) -> memoryview:
        if tier is Tier.NVME:
            return self.drive.slot(slot.segment, slot_bytes, slot.index)
        assert self.arena is not None
        return self.arena.view(*slot)

    def check_slot(self, tier: Tier, slot: Slot, epoch: int, weights: int, key: BlockKey, generation: int) -> None:
        """Assert that a slot holds a block, byte by byte, unless it was damaged on purpose."""
        if (key, generation) in self.drive.damaged:
            return
        geometry = self.sizes.geometry
        group = geometry.groups[group_of(key)]
        view = self.slot(tier, slot, group.slot_bytes)
        where = f"{tier.name} {slot} of rank {self.rank}"
        assert len(view) == group.slot_bytes, f"{where} is not there"
        asked, right = (epoch, weights, key, generation), self._right.get((tier, slot))
        if right is not None and right == (asked, bytes(view)):
            return
        namespace = Namespace(FINGERPRINT, epoch)
        identity = SlotIdentity(namespace, key, generation, group.payload_bytes, self.rank, geometry.rank_count)
        wrong = check_slot(view, identity)
        assert wrong is None, f"{where} is not sealed for {key!r}, generation {generation}: {wrong!r}"
        found = view[HEADER_BYTES : HEADER_BYTES + group.payload_bytes]
        assert found == self._model.content_of(weights, key, self.rank), f"{where} holds other bytes than {key!r}"
        self._right[tier, slot] = asked, bytes(view)

    def check_idle(self) -> None:
        """Assert that nothing is under way, nothing late, and all staging free."""
        runner = self.mover._runner
        assert not self._jobs, f"rank {self.rank} has not reported {sorted(self._jobs)}"
        assert runner.idle and not runner.at_device and not runner.copying
        assert not runner._batches.under_way
        assert staging_is_free(runner), f"staging of rank {self.rank} is not given back"
