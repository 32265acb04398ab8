# SPDX-License-Identifier: Apache-2.0
"""A deterministic simulation: the real manager and the real movers of two ranks over drives that
fail, from one seed.

``PYTHONPATH=tests python -m support.simulator --seed N`` runs one; ``--trace`` prints each event.
An engine without a model serves requests; the time, the order in which movers turn and batches end,
what fails, when the index commits, aborts, resets, restarts and kills come from one generator, and
nothing else does. The KV of a block is a pure function of the weights, its text and the rank, so
that every byte that is served, or read by a step, is looked at.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b

from kvdisk.blocks import Tier, group_of, make_block_key
from kvdisk.config import Config
from kvdisk.geometry import HEADER_BYTES
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import CopyState
from support.fake_remote import FakeRemote, SimRemote
from support.life import LONGEST_QUARANTINE_S, Life
from support.live_model import LiveModel, PromptTree
from support.manager_parts import FINGERPRINT, Sizes, WatchedNvmeSpace, two_tiers
from support.manager_watch import check_pins
from support.sim_drive import SimDrive, Weather
from support.sim_rank import SimRank, World

RANKS = 2
ACTIONS = 120
BUDGET_TOKENS = 16
MOST_REQUESTS = 5
_TAIL = 40


def _config(**changes: object) -> Config:
    return two_tiers(io_deadline_s=5.0, store_decode=True, **changes)


_ONE = LiveModel(payload_bytes=200)
_TWO = LiveModel(payload_bytes=2000, windowed=True)
_UNITS = LiveModel(payload_bytes=700, windowed=True, unit=2)
_REMOTE = {"remote": "s3://nowhere", "remote_admission": "all"}
SHAPES = {
    "two tiers": (_ONE, Sizes(_ONE.geometry, _config(), 14, (5,), (4,), 3, ())),
    "a window": (_TWO, Sizes(_TWO.geometry, _config(), 18, (5, 3), (3, 2), 3, ())),
    "reuse": (_ONE, Sizes(_ONE.geometry, _config(nvme_admission="reuse(2)"), 14, (5,), (4,), 2, ())),
    "NVMe only": (_ONE, Sizes(_ONE.geometry, _config(cpu_bytes=0), 14, (), (4,), 3, ())),
    "remote": (_ONE, Sizes(_ONE.geometry, _config(**_REMOTE), 14, (5,), (4,), 3, ())),
    "remote, and a window": (_TWO, Sizes(_TWO.geometry, _config(**_REMOTE), 18, (5, 3), (3, 2), 3, ())),
    "remote and memory only": (
        _ONE,
        Sizes(_ONE.geometry, _config(store_dirs=(), nvme_bytes=None, **_REMOTE), 14, (5,), (), 0, ()),
    ),
    "remote and NVMe only": (_ONE, Sizes(_ONE.geometry, _config(cpu_bytes=0, **_REMOTE), 14, (), (4,), 3, ())),
    "units": (_UNITS, Sizes(_UNITS.geometry, _config(), 18, (8,), (5,), 3, ())),
    "units, NVMe only": (_UNITS, Sizes(_UNITS.geometry, _config(cpu_bytes=0), 18, (), (5,), 3, ())),
    "memory only": (_ONE, Sizes(_ONE.geometry, _config(store_dirs=(), nvme_bytes=None), 14, (5,), (), 0, ())),
}
"""Models and sizes by name; a seed picks one."""
PICKS = ("two tiers", "two tiers", "a window", "a window", "reuse", "NVMe only", "NVMe only", "memory only")
"""The names, as often as they shall come."""
UNIT_PICKS = ("units", "units, NVMe only")
REMOTE_PICKS = ("remote", "remote, and a window", "remote and memory only", "remote and NVMe only")


class Simulation(Life):
    """One run. ``on_event`` sees each event of the trace. ``straight``: processes move some sizes
    of blocks straight between drive and GPU, and others not. ``hosts``: each rank has a host of its
    own, whose files come and go. ``counts``: how often what happened.
    """

    budget_tokens = BUDGET_TOKENS
    quiet_rounds = 120

    def __init__(
        self,
        seed: int,
        on_event: Callable[[str], None] | None = None,
        *,
        straight: bool = False,
        remote: bool = False,
        units: bool = False,
        hosts: bool = False,
    ) -> None:
        self.seed = seed
        self._option = " --straight" * straight + " --remote" * remote + " --units" * units + " --hosts" * hosts
        self._fate = random.Random(seed) if hosts else None
        """Decides what becomes of each rank's host."""
        self._rng = random.Random(seed)
        self._on_event = on_event
        self._hash = blake2b(digest_size=16)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self.counts: Counter[str] = Counter()
        self._weather = Weather()
        chooser = random.Random(seed) if straight else None
        self._world = World(self._rng, self._weather, self.note, lambda: self.now, chooser)
        self._shape = self._rng.choice(REMOTE_PICKS if remote else UNIT_PICKS if units else PICKS)
        self._model, sizes = SHAPES[self._shape]
        self._tree = PromptTree(3, 6, 26)
        self._pace = self._rng.choice((2, 4, 8, 16))
        self._faults = self._draw_faults()
        lost: set[int] = set()
        self._drives = [SimDrive(lost) for _ in range(RANKS)]
        self._copies: list[list[dict[int, bytearray]]] = [[{}] for _ in range(RANKS)]
        """What was on each drive at some ends of processes."""
        self.counts[self._shape] += 1
        self.note(f"{self._shape}, pace {self._pace}, faults {self._faults}")
        self.begin(sizes, MemoryIndex(max_queued=8))

    def note(self, event: str) -> None:
        self._hash.update(event.encode() + b"\n")
        self._tail.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def _draw_faults(self) -> dict[str, float]:
        """Return what can go wrong in this run: not everything, so that not one fault hides the
        others."""
        rng = self._rng
        faults = {name: rng.choice((0.0, 0.0, 0.03, 0.1, 0.3)) for name in ("eio", "tear", "flip", "files")}
        faults |= {name: rng.choice((0.0, 0.0, 0.1, 0.3, 0.6)) for name in ("hang", "lose")}
        faults["slow_copies"] = rng.choice((0.0, 0.3, 1.0))
        faults["home"] = rng.choice((0.0, 0.0, 0.0, 0.1, 0.5))
        return faults

    def start_ranks(self) -> list[SimRank]:
        remote = self._remote if self.sizes.config.remote else None
        return [
            SimRank(self.sizes, self._model, rank, self._drives[rank], self._world, remote) for rank in range(RANKS)
        ]

    def make_remote(self) -> FakeRemote:
        self._remote = SimRemote(FINGERPRINT, RANKS)
        return self._remote

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> str:
        """Run to the end; return the digest of every event, the same for the same seed.

        Raises AssertionError, with the last events, and how to repeat it, in its notes.
        """
        try:
            for _ in range(ACTIONS):
                name = self._rng.choices(_NAMES, _WEIGHTS)[0]
                self.counts[name] += 1
                self.note(f"-- {name} at {self.now:.2f}")
                _ACTIONS[name][1](self)
                if self._fate is not None and self._fate.random() < 0.03:
                    self._remove_a_file(self._fate)
                self.watch.check()
                check_pins(self.parts)
            self._end()
        except BaseException as error:
            error.add_note(
                f"Seed {self.seed}: "
                f"PYTHONPATH=tests python -m support.simulator --trace --seed {self.seed}{self._option}"
            )
            error.add_note("The last events:\n" + "\n".join(self._tail))
            raise
        return self._hash.hexdigest()

    def _end(self) -> None:
        """Everything works, and every request ends: first while some batches still hang, then
        without."""
        self.note("-- the end")
        self._weather.clear_up()
        if self._fate is not None:
            for rank in self.ranks:
                rank.look_for_files()
        self._run_until_quiet()
        for rank in self.ranks:
            rank.device.let_go()
        self.end_round()
        self._run_until_quiet()
        for rank in self.ranks:
            rank.check_idle()
        assert not self.parts.transfers._zombies, "a zombie is left, and no device has anything to do"
        self._must_work()
        self._must_survive_a_restart()
        self._count_life()
        for rank in self.ranks:
            rank.close()

    def _must_work(self) -> None:
        """What is stored now is loaded."""
        self.advance(LONGEST_QUARANTINE_S)
        prompt = "".join(self._rng.choices("uvwxy", k=17))
        for _ in range(4):
            loaded = self._serve(prompt)
        nvme = self.parts.nvme
        if self.parts.cpu is not None or (nvme is not None and nvme.works):
            assert loaded, f"nothing is stored or loaded any more: {prompt}"

    def _must_survive_a_restart(self) -> None:
        """What the index names is loaded by the next process."""
        if self.parts.nvme is None or not self.parts.nvme.works or self.engine.weights:
            return
        prompt = "".join(self._rng.choices("uvwxy", k=17))
        for _ in range(2):
            self._serve(prompt)
        self._end_process()
        self.succeed()
        keys = {record.key for record in self.index.blocks()}
        named = all(
            make_block_key(prompt[:end].encode(), group.group) in keys
            for group in self.sizes.geometry.groups
            for end in range(group.block_tokens, 17, group.block_tokens)
        )
        loaded = self._serve(prompt)
        self.note(f"the index names all: {named}, and {loaded} blocks were loaded")
        self.counts["restarted, and loaded"] += named
        assert loaded or not named, f"nothing of {prompt} was loaded after a restart"

    def _serve(self, prompt: str) -> int:
        """Run one request to its end, with nothing on the GPU before; return how many blocks were
        loaded."""
        self.engine.pool.forget_all()
        before = self.parts.manager.stats.counts.get("loaded_blocks", 0)
        self.come(prompt, 0, finishing=True)
        self._run_until_quiet()
        return self.parts.manager.stats.counts.get("loaded_blocks", 0) - before

    def _run_until_quiet(self) -> None:
        # Movers without threads have stood still, and nothing may have been heard of them for long.
        self.finish_step()
        self.end_round()
        self.finish()

    # -- time ----------------------------------------------------------------------------------

    def drift(self) -> None:
        """Let movers, devices and copies go on a little."""
        for _ in range(self._rng.randrange(self._pace + 1)):
            self._rng.choice(self.ranks).stir()

    def _step(self) -> None:
        self.remote.answer()
        self.run_step(self._rng.choice((4, BUDGET_TOKENS, BUDGET_TOKENS)))

    def _wait(self) -> None:
        self.advance(self._rng.choice((0.01, 0.06, 0.3, 1.0, 2.5, 6.0, 6.0, 61.0)))

    # -- requests ------------------------------------------------------------------------------

    def _ask(self) -> None:
        if len(self.engine.requests) < MOST_REQUESTS:
            outputs = self._rng.randrange(self.sizes.most_outputs + 1)
            self.come(self._tree.draw(self._rng), outputs, finishing=self._rng.random() < 0.7)

    def _abort(self) -> None:
        if self.engine.queued:
            request = self._rng.choice(self.engine.queued)
            self.note(f"{request.id} is aborted, {request.status.value}")
            self.engine.abort(request)

    def _let_all_finish(self) -> None:
        for request in self.engine.queued:
            request.finishing = True

    def _forget(self) -> None:
        self.engine.pool.forget_all()

    # -- what goes wrong -----------------------------------------------------------------------

    def _change_weather(self) -> None:
        self._weather.clear_up()
        if self._rng.random() < 0.7:
            for name, likelihood in self._faults.items():
                setattr(self._weather, name, likelihood)
            full = [rank for rank in range(RANKS) if self._rng.random() < 0.2]
            self._weather.full = frozenset(full)

    def _let_one_go(self) -> None:
        self._rng.choice(self.ranks).device.let_go()

    def _commit(self) -> None:
        fails = self._rng.random() < 0.1
        self.index.commit(self._rng.randrange(1, 6), fail=fails)
        if not fails:
            self.index.refuse_puts = False

    def _damage(self) -> None:
        """A bit of a copy changes, or on a drive another block arrives in its place, and nobody
        says so.

        In memory not while a job uses it: nobody could tell, once it was verified.
        """
        contents = self._remote.contents
        if contents:
            name, at = self._rng.choice(sorted(contents)), self._rng.randrange(HEADER_BYTES + 200)
            contents[name] = contents[name][:at] + bytes([contents[name][at] ^ 1]) + contents[name][at + 1 :]
            self.note(f"{name} is damaged: byte {at}")
        catalog = self.parts.catalog
        copies = [
            (row, tier)
            for row in catalog.rows()
            for tier in (Tier.CPU, Tier.NVME)
            if catalog.state(row, tier) == CopyState.READY and (tier is Tier.NVME or not catalog.pins(row, tier))
        ]
        if not copies:
            return
        row, tier = self._rng.choice(copies)
        rank, key, slot = self._rng.choice(self.ranks), catalog.keys[row], catalog.slot(row, tier)
        slot_bytes = self.sizes.geometry.groups[group_of(key)].slot_bytes
        byte = self._rng.choice((self._rng.randrange(HEADER_BYTES), HEADER_BYTES + self._rng.randrange(200)))
        other = self._rng.randrange(8)
        if tier is Tier.CPU:
            rank.slot(tier, slot, slot_bytes)[byte] ^= 1
        elif slot.segment not in rank.drive.files:
            return
        elif other < 4:
            rank.drive.misdirect(slot.segment, slot_bytes, slot.index, other)
        else:
            rank.drive.flip(slot.segment, slot_bytes, slot.index, byte)
        rank.drive.damaged.add((key, catalog.generations[row]))
        self.note(f"{tier.name} {slot} of rank {rank.rank} is damaged: byte {byte}, or by slot {other}")

    def _end_process(self) -> None:
        """The process ends in order: the ranks finish what the devices have begun, then the index
        commits."""
        for rank in self.ranks:
            rank.close()
        assert self.index.flush(0.0)
        self._count_life()

    def _restart(self) -> None:
        self._end_process()
        self._go_on()

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.crash()
        self._count_life()
        self._go_on()

    def _go_on(self) -> None:
        """Another process finds what is on the drives; its cap may be smaller."""
        if self._fate is not None:
            self._change_hosts(self._fate)
        self.succeed(max(1, self.sizes.segments - self._rng.randrange(2)))

    def _change_hosts(self, fate: random.Random) -> None:
        """A host is replaced, or comes back with what it had some lives ago, or has lost files."""
        for rank, (drive, copies) in enumerate(zip(self._drives, self._copies, strict=True)):
            drive.forget_removed()
            drive.lost.clear()
            copies.append({segment: bytearray(file) for segment, file in drive.files.items()})
            what = fate.choice(("kept", "kept", "kept", "replaced", "old", "files lost"))
            if what == "replaced":
                drive.replace({})
            elif what == "old":
                drive.replace(fate.choice(copies))
            elif what == "files lost":
                drive.replace({segment: file for segment, file in drive.files.items() if fate.random() < 0.6})
            self.counts[f"host {what}"] += 1
            self.note(f"the host of rank {rank} is {what}: {sorted(drive.files)}")

    def _remove_a_file(self, fate: random.Random) -> None:
        """Somebody removes a file that a rank has open, which finds it gone now or later."""
        rank = fate.choice(self.ranks)
        if rank.drive.files and fate.random() < 0.5:
            segment = fate.choice(sorted(rank.drive.files))
            rank.drive.remove(segment)
            self.note(f"the file of segment {segment} of rank {rank.rank} is removed")
        else:
            rank.look_for_files()

    def _count_life(self) -> None:
        self.counts.update(self.parts.manager.stats.counts)
        if isinstance(self.parts.nvme, WatchedNvmeSpace):
            self.counts["segments came back"] += self.parts.nvme.came_back
        for rank in self.ranks:
            self.counts.update(rank.device.seen)
            self.counts.update(rank.seen)
            self.counts.update(rank.objects.seen if rank.objects is not None else {})
        self.counts["preempted"] += self.watch.preempted


_ACTIONS: dict[str, tuple[float, Callable[[Simulation], None]]] = {
    "a step": (50, Simulation._step),
    "a request comes": (18, Simulation._ask),
    "time for transfers": (10, Simulation.drift),
    "a commit": (10, Simulation._commit),
    "a wait": (8, Simulation._wait),
    "requests finish": (4, Simulation._let_all_finish),
    "an abort": (2, Simulation._abort),
    "the GPU forgets": (12, Simulation._forget),
    "other weather": (4, Simulation._change_weather),
    "a device lets go": (3, Simulation._let_one_go),
    "damage": (4, Simulation._damage),
    "a reset": (0.5, Simulation.change_weights),
    "a restart": (0.8, Simulation._restart),
    "a kill": (0.8, Simulation._kill),
}
_NAMES = tuple(_ACTIONS)
_WEIGHTS = tuple(weight for weight, _ in _ACTIONS.values())


def run_seeds(
    first: int,
    count: int,
    *,
    straight: bool = False,
    remote: bool = False,
    units: bool = False,
    hosts: bool = False,
) -> Counter[str]:
    """Run so many seeds; return what happened in all of them together."""
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        simulation = Simulation(seed, straight=straight, remote=remote, units=units, hosts=hosts)
        simulation.run()
        total.update(simulation.counts)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--straight", action="store_true", help="move some blocks straight between drive and GPU")
    parser.add_argument("--remote", action="store_true", help="share blocks in a remote store")
    parser.add_argument("--units", action="store_true", help="let two of the engine's blocks be one")
    parser.add_argument("--hosts", action="store_true", help="have each rank's host be replaced, or lose files")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the trace says more
    for seed in range(options.seed, options.seed + options.count):
        simulation = Simulation(
            seed,
            print if options.trace else None,
            straight=options.straight,
            remote=options.remote,
            units=options.units,
            hosts=options.hosts,
        )
        digest = simulation.run()
        print(f"seed {seed}: {digest} {dict(sorted(simulation.counts.items()))}")


if __name__ == "__main__":
    main()
