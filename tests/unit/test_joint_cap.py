# SPDX-License-Identifier: Apache-2.0
"""Homes with a joint cap: together they never exceed it, and one that starts leaves what the
others will take over."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.index_conformance import record_of
from test_cap import MIB, Engine, allocated, ids

from kvdisk.device import paths
from kvdisk.device import store as store_module
from kvdisk.device.cap import BLANK_INDEX_BYTES, ORPHAN_SPARED_S
from kvdisk.device.control import JOINT_CAP, JointCap, read_record
from kvdisk.device.store import Store
from kvdisk.index.lmdb_tables import LmdbTables
from kvdisk.index.map_size import STEP_BYTES, planned_bytes
from kvdisk.index.packed import Operation, Table
from kvdisk.index.records import encode_block

ALL = JointCap("a server", 15 * MIB)
"""For 14 segments of two ranks, with what surrounds them."""


def start(
    path: Path, names: str, *, share: int = 8 * MIB, joint: JointCap | None = ALL, now: int = 0, index_bytes: int = 0
) -> list[Engine]:
    """Start engines one after the other, each of a namespace of its own."""
    return [Engine(path, name, cap_bytes=share, index_bytes=index_bytes, joint=joint, now=now) for name in names]


def stop(engines: list[Engine]) -> list[str]:
    return [engine.leave() for engine in engines]


def test_ranks_that_start_one_after_the_other_find_what_each_had(path):
    """Also where the first one fills its share before the second one starts."""
    ranks = start(path, "ab")
    assert [rank.fill() for rank in ranks] == [7, 7]
    stop(ranks)
    first = start(path, "a", now=1)
    assert first[0].next == 7
    assert first[0].fill() == 0
    second = start(path, "b", now=2)
    assert second[0].next == 7, "it has taken over what it had"
    assert len(ids(path)) == 2
    stop(first + second)


def test_more_owners_than_shares_never_exceed_it(path):
    """Four ranks come while two of before still live: as if a rank were killed, and its processes
    had not ended."""
    two = start(path, "ab")
    assert [rank.fill() for rank in two] == [7, 7]
    four = start(path, "cdef", share=4 * MIB)
    assert [rank.fill() for rank in four] == [0] * 4
    assert allocated(path) <= ALL.nvme_bytes
    stop(two)
    made = [0] * 4
    for turn in range(40):
        made[turn % 4] += four[turn % 4].makes()
        assert allocated(path) <= ALL.nvme_bytes
    assert made == [3] * 4
    assert ids(path) == {rank.home.id for rank in four}
    stop(four)


def test_an_index_counts_whole_from_the_first_segment_on(path):
    """Three were started, which have not written yet: with room for two indexes, two get segments,
    and the third one does once another has gone."""
    ranks = start(path, "abc", index_bytes=5 * MIB)
    assert [rank.fill() for rank in ranks] == [2, 2, 0]
    for rank in ranks[:2]:
        (rank.home.index_path / "data.mdb").write_bytes(bytes(5 * MIB))
    assert allocated(path) <= ALL.nvme_bytes
    ranks[0].leave()
    assert ranks[2].fill() == 2
    assert allocated(path) <= ALL.nvme_bytes
    assert ranks[0].home.id not in ids(path)
    stop(ranks[1:])


@pytest.mark.parametrize("why", ["it has grown", "other hosts", "a drive is gone"])
def test_an_index_that_may_have_records_counts_whole(path, tmp_path, why):
    """Also where no segment is seen."""
    drives = [path, tmp_path / "other"] if why == "a drive is gone" else [path]
    first = Store.open(drives).acquire_home(
        b"a" * 32, {"geometry": 1}, 8 * MIB, index_bytes=5 * MIB, joint=ALL, spread=why == "other hosts"
    )
    if why == "it has grown":
        (first.index_path / "data.mdb").write_bytes(bytes(BLANK_INDEX_BYTES))
    elif why == "a drive is gone":
        shutil.rmtree(drives[1])
    ranks = start(path, "b", index_bytes=5 * MIB) + start(path, "c", index_bytes=5 * MIB)
    assert [rank.fill() for rank in ranks] == [2, 0]
    first.release()
    assert ranks[1].fill() == 2
    stop(ranks)


def test_a_new_index_is_less_than_it_counts_with_before_a_segment(tmp_path):
    """Also one that was made anew: its first step is there."""
    tables = LmdbTables(tmp_path / "index", MIB)
    tables.append(Table.BLOCKS, [])
    tables.commit([Operation(Table.BLOCKS, *encode_block(record_of(1)))])
    assert planned_bytes(1) == STEP_BYTES <= (tmp_path / "index" / "data.mdb").stat().st_blocks * 512
    assert paths.allocated_bytes(tmp_path / "index") <= BLANK_INDEX_BYTES
    tables.close()


def test_of_what_they_left_the_oldest_goes(path):
    """Not what another rank is about to take over."""
    old = start(path, "cd", share=4 * MIB, now=1)
    assert [rank.fill() for rank in old] == [3, 3]
    gone = stop(old)
    ranks = start(path, "ab", share=4 * MIB, now=2)
    assert [rank.fill() for rank in ranks] == [3, 3]
    later = stop(ranks)
    first = start(path, "a", now=3)
    assert first[0].fill() == 4, "its share is 8 MiB now"
    assert allocated(path) <= ALL.nvme_bytes
    assert later[1] in ids(path)
    assert len({*gone} & ids(path)) == 1
    stop(first)


def test_others_take_no_room_that_it_has_left(path):
    """An engine beside them may fill its own cap, and what nobody's cap covers."""
    ranks, stranger = start(path, "ab"), start(path, "s", joint=None, now=1)
    assert [rank.fill() for rank in ranks] == [7, 7]
    left = ranks[1].leave()
    assert stranger[0].fill() == 7
    assert left in ids(path)
    ranks[0].leave()  # the last: nobody covers what they left
    for now_s, is_left in ((ORPHAN_SPARED_S - 1, True), (ORPHAN_SPARED_S + 1, False)):
        assert stranger[0].keep(now_s)
        assert (left in ids(path)) is is_left
    assert ids(path) == {stranger[0].home.id}
    stop(stranger)


def test_a_lower_one_holds_from_the_first_start_on(path):
    ranks = start(path, "ab")
    assert [rank.fill() for rank in ranks] == [7, 7]
    stop(ranks)
    lower = JointCap(ALL.name, 10 * MIB)
    ranks = start(path, "a", share=5 * MIB, joint=lower, now=1)
    ranks += start(path, "b", share=5 * MIB, joint=lower, now=1)
    assert ranks[1].fill() == 2, "the first one's files are not cut here"
    assert allocated(path) <= lower.nvme_bytes
    assert read_record(ranks[1].home.path).joint_cap == lower
    stop(ranks)


def test_upkeep_gives_up_what_a_lower_one_has_no_room_for(path):
    ranks = start(path, "ab", now=1)
    assert [rank.fill() for rank in ranks] == [7, 7]
    left = ranks[1].leave()
    lower = JointCap(ALL.name, 10 * MIB)
    home = ranks[0].home
    home.record = replace(home.record, description=home.record.description | {JOINT_CAP: lower._asdict()})
    for now_s, is_left in ((ORPHAN_SPARED_S, True), (ORPHAN_SPARED_S + 1, False)):
        assert ranks[0].keep(now_s) is not is_left
        assert (left in ids(path)) is is_left
    ranks[0].leave()


def test_a_start_waits_for_the_owner_before(path):
    """Whose processes may be ending: it takes over what they had, where there is no room for
    more."""
    ranks = start(path, "ab")
    assert [rank.fill() for rank in ranks] == [7, 7]
    ending = threading.Timer(0.3, ranks[0].leave)
    ending.start()
    again = start(path, "a")
    assert again[0].next == 7
    ending.join()
    stop([ranks[1], *again])


def test_a_start_goes_on_beside_an_owner_that_lives(path, monkeypatch):
    """It makes no segment before there is room."""
    monkeypatch.setattr(store_module, "JOINT_WAIT_S", 0.2)
    ranks = start(path, "ab")
    assert [rank.fill() for rank in ranks] == [7, 7]
    beside = start(path, "a")
    assert beside[0].fill() == 0
    ranks[0].leave()
    assert beside[0].fill() == 7
    assert allocated(path) <= ALL.nvme_bytes
    stop([ranks[1], *beside])


def test_each_member_takes_over_what_it_had(path):
    """As with MLA: all ranks are of one namespace, and one of them writes."""
    members = [JointCap("a server", 15 * MIB, f"rank {rank}") for rank in range(3)]
    ranks = [Engine(path, "a", cap_bytes=15 * MIB, joint=member) for member in members]
    assert ranks[0].fill() == 14
    stop(ranks)
    ranks = [Engine(path, "a", cap_bytes=15 * MIB, joint=member, now=1) for member in reversed(members)]
    assert [rank.next for rank in ranks] == [0, 0, 14]
    assert allocated(path) <= 15 * MIB
    stop(ranks)
    alone = Engine(path, "a", cap_bytes=15 * MIB, now=2)
    assert alone.next == 14, "the fullest"
    alone.leave()


@pytest.mark.parametrize(
    "said", [None, 7, {}, {"name": "x"}, {"name": 1, "nvme_bytes": 5}, {"name": "x", "nvme_bytes": -1}]
)
def test_what_is_no_joint_cap_counts_as_none(path, said):
    """HOME may be anybody's."""
    engine = start(path, "a", joint=None)[0]
    engine.home.record.description[JOINT_CAP] = said
    engine.home.mark_used()
    assert read_record(engine.home.path).joint_cap is None
    assert engine.fill() == 7
    engine.leave()
