# SPDX-License-Identifier: Apache-2.0
"""How often blocks were used: counted by the manager, kept in USES, and read back at the next start."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_stores import run
from rebuild_stores import CAP, home_path, make_store, start
from support.fake_engine import FakeEngine
from support.fake_ranks import FakeRank
from support.fake_requests import key_of
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.assembly import SchedulerParts
from kvdisk.blocks import Slot, Tier, make_block_key
from kvdisk.config import Config
from kvdisk.device.cap import USES_OVERHEAD_BYTES
from kvdisk.device.control import USES_FILE
from kvdisk.device.uses import UNIT_BYTES, UNIT_RECORDS, UsesFile, UsesUnit, read_uses
from kvdisk.errors import DeviceError
from kvdisk.geometry import Geometry, GroupGeometry, uses_bytes_for
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.uses import COUNT_INTERVAL_S, Uses

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)


# -- what counts as a use ----------------------------------------------------------------------


class Served:
    """An engine with an NVMe tier of twelve blocks and, if wanted, a CPU tier of eight before it."""

    def __init__(self, cpu_slots: int) -> None:
        config = Config(
            store_dirs=(Path("/nowhere"),), nvme_bytes=1, cpu_bytes=int(cpu_slots > 0), nvme_admission="all"
        )
        sizes = Sizes(GEOMETRY, config, 40, (cpu_slots,) if cpu_slots else (), (12,), 1, ())
        ranks, index = [FakeRank(0)], MemoryIndex()
        self.engine = FakeEngine(GEOMETRY, sizes.block_count, ranks)
        self.rank, self.index, self.requests = ranks[0], index, 0
        self.parts = ManagerParts.make(sizes, self.engine, index, 0)
        self.watch = ManagerWatch(sizes, self.parts, self.engine, ranks, index)

    def step(self) -> None:
        self.engine.schedule(8)
        self.engine.forward()
        while self.rank.runnable:
            self.rank.run_job(self.rank.runnable[0])
        self.engine.update()
        self.index.flush(1)
        self.engine.now += 1

    def settle_in(self) -> None:
        """Have the first segment made: stores begin when it is there."""
        self.engine.add("request 0", "qqx", 1)
        for _ in range(8):
            self.step()

    def serve(self, text: str) -> list[tuple[int, int]]:
        """Serve a prompt; return uses and last use of its blocks on NVMe."""
        self.requests += 1
        request = self.engine.add(f"request {self.requests}", text, 1)
        keys = [key_of(request, GEOMETRY.groups[0], position) for position in range(len(text) // 2)]
        while request.id in self.engine.requests:
            request.finishing = True
            self.step()
        for _ in range(8):
            self.step()
        return [self.uses(key) for key in keys]

    def uses(self, key: Any) -> tuple[int, int]:
        catalog, nvme = self.parts.catalog, self.parts.manager._tiers.get(Tier.NVME)
        assert nvme is not None
        row = catalog.find(key)
        assert row >= 0 and catalog.readable(row, Tier.NVME)
        nvme.uses.count_all()
        slot, view = catalog.slot(row, Tier.NVME), nvme.uses.view
        place = view.places[slot.segment][0] + slot.index
        assert view.generations[place] == catalog.generations[row]
        return int(view.uses[place]), int(view.last_use_s[place])


@pytest.mark.parametrize("cpu_slots", [0, 8])
@pytest.mark.parametrize("cold", [False, True], ids=["in the GPU's cache", "in the tier"])
def test_each_request_that_finds_a_block_counts_once(cpu_slots, cold):
    served = Served(cpu_slots)
    served.settle_in()
    assert served.serve("aabbx") == [(0, 0), (0, 0)], "the request that made it is no use"
    for times in (1, 2, 3):
        if cold:
            served.engine.pool.forget_all()
        before_s = int(served.engine.now)
        (uses, last_use_s), *others = served.serve("aaccx" if times == 3 else "aabbx")
        assert uses == times
        assert before_s <= last_use_s <= served.engine.now
    assert others == [(0, 0)], "cc came with the last"


# -- counting ----------------------------------------------------------------------------------


class Counted:
    """A catalog with NVMe copies, and a naive count beside ``Uses``."""

    def __init__(self, segments: Sequence[tuple[int, int]] = ((3, 300), (7, 20))) -> None:
        self.catalog = Catalog()
        self.uses = Uses(self.catalog)
        self.uses.add_segments(segments)
        self.free = [Slot(segment, index) for segment, count in segments for index in range(count)]
        self.generation = 0
        self.rows: list[int] = []
        self.expected: dict[Slot, tuple[int, int]] = {}

    def store(self, rng: random.Random) -> None:
        slot = self.free.pop(rng.randrange(len(self.free)))
        self.generation += 1
        row = self.catalog.add(make_block_key(self.generation.to_bytes(32, "big"), 0), self.generation, 0, None)
        self.catalog.begin((row,), Tier.NVME, (slot,))
        self.catalog.finish([row], Tier.NVME)
        self.uses.begin([row])
        self.rows.append(row)
        self.expected[slot] = (self.generation, 0)

    def use(self, rng: random.Random) -> None:
        row = rng.choice(self.rows)
        self.uses.log.extend([row])
        slot = self.catalog.slot(row, Tier.NVME)
        generation, count = self.expected[slot]
        self.expected[slot] = (generation, count + 1)

    def drop(self, rng: random.Random) -> None:
        row = self.rows.pop(rng.randrange(len(self.rows)))
        (slot,) = self.catalog.drop((row,), Tier.NVME)
        self.free.append(slot)
        del self.expected[slot]

    def found(self) -> dict[Slot, tuple[int, int]]:
        view, found = self.uses.view, {}
        for slot in self.expected:
            place = view.places[slot.segment][0] + slot.index
            found[slot] = (int(view.generations[place]), int(view.uses[place]))
        return found


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_one_by_one_however_rows_and_slots_change_hands(seed):
    counted, rng = Counted(), random.Random(seed)
    now = 0.0
    for _ in range(3000):
        act = rng.choice(["store", "store", "use", "use", "use", "use", "drop", "count"])
        if act == "count":
            now += rng.choice([0.1, COUNT_INTERVAL_S])
            counted.uses.count(now, 1000 + int(now))
        elif (act == "store" and counted.free) or not counted.rows:
            counted.store(rng)
        elif act != "store":
            getattr(counted, act)(rng)
    counted.uses.count_all()
    assert counted.found() == counted.expected
    assert max(count for _, count in counted.expected.values()) > 2


def test_segments_come_and_go_and_share_places():
    counted, rng = Counted(), random.Random(1)
    for _ in range(50):
        counted.store(rng)
    for slot in [slot for slot in counted.expected if slot.segment == 7]:
        del counted.expected[slot]
    length = len(counted.uses.view.generations)
    counted.uses.drop_segment(7)
    counted.uses.add_segments([(9, 20), (10, 600)])
    assert counted.uses.view.places[9] == (2 * UNIT_RECORDS, 20), "where segment 7 was"
    assert len(counted.uses.view.generations) == length + 3 * UNIT_RECORDS
    counted.uses.count_all()
    assert counted.found() == counted.expected
    assert not counted.uses.view.generations[2 * UNIT_RECORDS : 3 * UNIT_RECORDS].any()


def test_only_what_has_changed_is_taken_and_in_parts():
    counted, rng = Counted(), random.Random(1)
    for _ in range(320):
        counted.store(rng)
    counted.uses.count_all()
    units, segments = counted.uses.take_changed()
    assert sorted((unit.segment, unit.first, len(unit.uses)) for unit in units) == [
        (3, 0, 253),
        (3, 253, 47),
        (7, 0, 20),
    ]
    assert segments == {3, 7}
    assert counted.uses.take_changed()[0] == []
    counted.uses.log.extend([counted.catalog.rows_in(Tier.NVME, 7)[0]])
    counted.uses.count_all()
    (unit,) = counted.uses.take_changed()[0]
    assert (unit.segment, int(unit.uses.sum())) == (7, 1)
    counted.uses.want_all()
    assert len(counted.uses.take_changed()[0]) == 3


class Trap(np.ndarray[Any, Any]):
    """An array that tells somebody before it is read, or written, at places."""

    told: Callable[[str], None] | None = None

    def __getitem__(self, where: Any) -> Any:
        self._tell("read")
        return super().__getitem__(where)

    def __setitem__(self, where: Any, value: Any) -> None:
        self._tell("write")
        super().__setitem__(where, value)

    @staticmethod
    def _tell(what: str) -> None:
        told, Trap.told = Trap.told, None
        if told is not None:
            told(what)
            Trap.told = told


@pytest.mark.parametrize("turns", range(4))
def test_a_writer_beside_the_scheduler_never_sees_another_blocks_uses(turns):
    """Whatever happens between two of a thread's accesses: each of its own is told to the other."""
    counted, rng = Counted([(3, 10)]), random.Random(2)
    counted.store(rng)
    counted.uses.log.extend(counted.rows * 3)
    counted.uses.count_all()
    view = counted.uses.view
    counted.uses.view = view._replace(generations=view.generations.view(Trap), uses=view.uses.view(Trap))
    slot = counted.catalog.slot(counted.rows[0], Tier.NVME)
    left = turns % 2

    def check() -> None:
        counted.uses.want_all()
        (unit,) = counted.uses.take_changed()[0]
        generation, uses = (np.asarray(column).tolist()[slot.index] for column in (unit.generations, unit.uses))
        assert generation != counted.generation or uses in {0, 3 * (generation % 2)}

    def turn() -> None:
        """The block leaves, and the next one comes to its slot: every other one is used three times."""
        counted.drop(rng)
        counted.free = [slot]
        counted.store(rng)
        if counted.generation % 2:
            counted.uses.log.extend(counted.rows * 3)
        counted.uses.count_all()

    def turn_sometimes(what: str) -> None:
        nonlocal left
        left -= 1
        if what == "read" and left < 0:
            turn()

    try:
        Trap.told = lambda what: check() if what == "write" else None
        for _ in range(2 + turns // 2):
            turn()
        Trap.told = turn_sometimes
        check()
    finally:
        Trap.told = None


# -- the file ----------------------------------------------------------------------------------


def unit(segment: int, first: int, count: int, *, generation: int = 5, uses: int = 1) -> UsesUnit:
    generations = np.arange(generation, generation + count).astype(np.uint64)
    return UsesUnit(segment, first, generations, np.full(count, uses, np.uint32), np.full(count, 77, np.uint32))


def said(path: Path) -> dict[tuple[int, int], tuple[int, int]] | None:
    units = read_uses(path / USES_FILE)
    return (
        None if units is None else {(each.segment, each.first): (len(each.uses), int(each.uses[0])) for each in units}
    )


def test_the_file_has_what_was_written_and_only_that_is_written(tmp_path, monkeypatch):
    file = UsesFile(tmp_path)
    assert file.recall({}) == []
    assert file.write([], frozenset(), 1000) and not (tmp_path / USES_FILE).exists()
    assert not file.write([unit(1, 0, 253), unit(1, 253, 9), unit(4, 0, 20)], frozenset({1, 4}), 1000)
    status = (tmp_path / USES_FILE).stat()
    assert (status.st_size, status.st_mode & 0o777) == (4 * UNIT_BYTES, 0o600)
    assert status.st_size <= uses_bytes_for(253 + 9 + 20, 2)
    assert said(tmp_path) == {(1, 0): (253, 1), (1, 253): (9, 1), (4, 0): (20, 1)}
    written: list[int] = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(at) or pwrite(fd, data, at))
    assert file.write([unit(1, 253, 9, uses=8)], frozenset({1, 4}), 1000)
    assert written == [2 * UNIT_BYTES]
    assert file.write([unit(9, 0, 3, uses=6), unit(11, 0, 3)], frozenset({1, 9, 11}), 1000), "4 gives its place away"
    assert said(tmp_path) == {(1, 0): (253, 1), (1, 253): (9, 8), (9, 0): (3, 6), (11, 0): (3, 1)}
    assert (tmp_path / USES_FILE).stat().st_size == 5 * UNIT_BYTES
    again = UsesFile(tmp_path)
    found = again.recall({1: 262, 9: 3, 11: 4})
    assert [(each.segment, each.first) for each in found] == [(1, 0), (1, 253), (9, 0)], "11 has other slots now"
    assert again.write([unit(11, 0, 4, uses=3)], frozenset({1, 9, 11}), 1000)
    assert said(tmp_path) == {(1, 0): (253, 1), (1, 253): (9, 8), (9, 0): (3, 6), (11, 0): (4, 3)}


def test_every_byte_is_where_it_is_said_to_be(tmp_path):
    file = UsesFile(tmp_path)
    file.recall({})
    file.write([unit(0x01020304, 253, 2, generation=0x1122334455667788)], frozenset({0x01020304}), 0x0A0B0C0D)
    data = (tmp_path / USES_FILE).read_bytes()
    head, body = data[:UNIT_BYTES], data[UNIT_BYTES:]
    assert head[:16].hex() == "4b56445553455300" + "0100" + "fd00" + "1000" + "0000"
    assert body[:32].hex() == "4b56445553455500" + "0100" + "0200" + "04030201" + "fd000000" + "0d0c0b0a" + 16 * "0"
    assert body[32:48].hex() == "8877665544332211" + "01000000" + "4d000000"
    assert not any(body[64:4088]) and not any(head[16:4088])


@pytest.mark.parametrize("how", ["text", "directory", "pipe", "link", "gone", "version", "cut", "empty"])
def test_a_damaged_file_is_ignored_and_replaced(tmp_path, how):
    home = tmp_path / "home"
    home.mkdir()
    file, path, elsewhere = UsesFile(home), home / USES_FILE, tmp_path / "elsewhere"
    file.recall({})
    units = [unit(1, 0, 3), unit(2, 0, 3)]
    file.write(units, frozenset({1, 2}), 1000)
    data = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
        (path / "inside").write_text("")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link":
        elsewhere.write_bytes(data)
        path.symlink_to(elsewhere)
    elif how != "gone":
        new = {"text": b"junk", "version": data[:8] + b"\2" + data[9:], "cut": data[: UNIT_BYTES + 9], "empty": b""}
        path.write_bytes(new[how])
    if how == "cut":
        assert read_uses(path) == []
    else:
        assert read_uses(path) is None
        assert not file.write(units[:1], frozenset({1, 2}), 1000), "all others are wanted, too"
    assert file.write(units, frozenset({1, 2}), 1000)
    assert said(home) == {(1, 0): (3, 1), (2, 0): (3, 1)}
    assert sorted(item.name for item in home.iterdir()) == [USES_FILE]
    assert not elsewhere.exists() or elsewhere.read_bytes() == data, "no symlink is followed"


def test_what_cannot_be_written_is_a_device_error_and_wanted_again(tmp_path):
    file = UsesFile(tmp_path / "gone")
    assert file.recall({1: 3}) == []
    with pytest.raises(DeviceError):
        file.write([unit(1, 0, 3)], frozenset({1}), 1000)


# -- from one engine to the next ---------------------------------------------------------------


def use(parts: SchedulerParts, rows: list[int], now_s: int) -> None:
    assert parts.nvme is not None
    parts.nvme.uses.now_s = now_s
    parts.nvme.uses.log.extend(rows)


def counts(parts: SchedulerParts) -> dict[Slot, tuple[int, int]]:
    assert parts.nvme is not None
    view, catalog = parts.nvme.uses.view, parts.manager._catalog
    found = {}
    for row in catalog.rows_in(Tier.NVME):
        slot = catalog.slot(row, Tier.NVME)
        place = view.places[slot.segment][0] + slot.index
        if view.uses[place]:
            found[slot] = (int(view.uses[place]), int(view.last_use_s[place]))
    return found


def test_uses_survive_a_restart_and_a_rebuild(tmp_path):
    path = tmp_path / "store"
    make_store(path)
    parts = start(path)
    rows = parts.manager._catalog.rows_in(Tier.NVME)
    first, second = (parts.manager._catalog.slot(row, Tier.NVME) for row in rows[:2])
    use(parts, [rows[0], rows[1], rows[0]], 5000)
    parts.close()
    parts = start(path)
    assert counts(parts) == {first: (2, 5000), second: (1, 5000)}
    use(parts, rows[:1], 6000)
    parts.close()
    expected = {first: (3, 6000), second: (1, 5000)}
    (home_path(path) / "index" / "data.mdb").unlink()  # rebuilt from the headers, which have the generations
    parts = start(path)
    assert counts(parts) == expected
    assert parts.nvme is not None and parts.nvme.uses.take_changed()[0] == [], "nothing has changed"
    parts.close()
    found = json.loads(run("inspect", path, "--json").stdout)
    assert found["reuse"]["blocks"] == [18, 1, 0, 1, 0, 0, 0, 0, 0]
    (prefix, *_) = found["namespaces"][0]["prefixes"]["tree"]
    assert (prefix["first_uses"] or prefix["last_uses"], prefix["last_use_s"] in {5000, 6000}) == (3, True)


def test_another_block_in_the_slot_begins_anew(tmp_path):
    path = tmp_path / "store"
    make_store(path)
    parts = start(path)
    rows = parts.manager._catalog.rows_in(Tier.NVME)
    use(parts, rows, 5000)
    slot, generation = parts.manager._catalog.slot(rows[0], Tier.NVME), parts.manager._catalog.generations[rows[0]]
    parts.close()
    file = UsesFile(home_path(path))
    counts_of = dict.fromkeys(range(4), 8)
    (unit_of,) = [each for each in file.recall(counts_of) if each.segment == slot.segment]
    assert unit_of.generations[slot.index] == generation
    others = unit_of.generations + (np.arange(len(unit_of.generations)) == slot.index).astype(np.uint64)
    file.write([unit_of._replace(generations=others)], frozenset(counts_of), 5000)
    parts = start(path)
    assert slot not in counts(parts) and len(counts(parts)) == 19
    parts.close()
    restored = {each.segment: each for each in read_uses(home_path(path) / USES_FILE) or ()}
    assert (restored[slot.segment].generations[slot.index], restored[slot.segment].uses[slot.index]) == (generation, 0)


def test_the_file_stays_within_the_homes_budget(tmp_path):
    path = tmp_path / "store"
    make_store(path)
    parts = start(path)
    assert parts.home is not None and parts.nvme is not None and parts.index is not None
    layout = parts.nvme.segments._layout
    geometry = parts.nvme._geometry
    segments = sum(layout.most_segments(geometry))
    most = uses_bytes_for(layout.most_slots(geometry), segments)
    assert layout.index_bytes + sum(layout.class_bytes) + most <= CAP - (128 << 10) + USES_OVERHEAD_BYTES
    assert most > USES_OVERHEAD_BYTES
    parts.close()
