# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify``: what it finds in stores that are whole, damaged, in use, on several drives,
and how it says so."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from cli_stores import json_of, refused, run_here
from rebuild_stores import GEOMETRY, end, hold, home_path, key_of, make_store, start, write_block

from kvdisk.blocks import Slot
from kvdisk.cli import verify
from kvdisk.cli.verify import Verdict, verify_store
from kvdisk.device import segment as segment_room
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.base import BlockRecord
from kvdisk.index.reader_process import IndexContent, read_indexes

BLOCKS, SLOTS = 20, 40
SMALL, WIDE = (group.slot_bytes for group in GEOMETRY.groups)
BYTES = 2 * (10 * SMALL + 10 * WIDE)
GENERATION = 1_700_000_000_000_000_011
"""Of the first block of segment 2; those behind it follow."""


def verified(*arguments: object, code: int = 0) -> dict:
    return json_of("verify", *arguments, code=code)


def change(path: Path, offset: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new)


def file_in(path: Path, rank: int = 1, segment: int = 2) -> Path:
    return home_path(path) / "segments" / str(segment) / f"rank{rank}.kv"


# -- what is wrong, and what is not ------------------------------------------------------------


def test_a_store_that_is_whole(path):
    make_store(path)
    found = verified(path)
    assert (found["json_version"], found["ok"], found["stopped"], found["wrong"]) == (2, True, False, [])
    assert found["totals"] == {
        "engine_stores": 1, "blocks": BLOCKS, "slots": SLOTS, "read_bytes": BYTES, "wrong_slots": 0, "changed_slots": 0,
    }  # fmt: skip
    (home,) = found["engine_stores"]
    assert (home["owner"], home["problems"], home["notes"], home["gone"]) == ("stopped", [], [], False)
    said = " ".join(run_here("verify", path).stdout.split())
    assert f"Holds {BLOCKS} blocks in 1 engine store Read {SLOTS} slots, 480.0 KiB in" in said
    assert "Result all good" in said


def flip(path: Path, offset: int, slot: int) -> None:
    at = slot_offset(SMALL, slot) + offset
    change(file_in(path), at, bytes([file_in(path).read_bytes()[at] ^ 1]))


def test_every_slot_and_file_that_is_wrong(path, monkeypatch):
    """Five slots of one file, of which 2 and 3 have the two kinds of checksum; one that the drive
    does not read; and three files. A file is one finding, however many parts it is read in."""
    make_store(path)
    home = hold(path)
    write_block(home, Slot(2, 0), key_of(200), GENERATION, parent=key_of(999), ranks=[1])
    write_block(home, Slot(2, 1), key_of(999), GENERATION + 1, parent=key_of(200), ranks=[1])
    home.close(clean=False)
    flip(path, HEADER_BYTES + 3999, slot=2)
    flip(path, HEADER_BYTES, slot=3)
    change(file_in(path), slot_offset(SMALL, 4), bytes(HEADER_BYTES))
    file_in(path, 0, 1).unlink()
    shutil.copy(file_in(path, 0, 3), file_in(path, 1, 3))
    os.truncate(file_in(path, 0, 3), slot_offset(WIDE, 3))
    real = os.preadv

    def preadv(fd, views, offset):
        bad = slot_offset(SMALL, 2)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("/0/rank1.kv") and offset <= bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(verify, "PART_BYTES", 2 * WIDE)
    found = verified(path, code=1)
    wanted = (
        (0, 1, 2, "read", "it cannot be read: Input/output error"),
        (1, 0, None, "file", "no such file"),
        (2, 1, 0, "parent", "its header names the parent "),
        (2, 1, 1, "key", "its header names the key "),
        (2, 1, 2, "checksum", "its payload does not have the checksum"),
        (2, 1, 3, "checksum", "its payload does not have the checksum"),
        (2, 1, 4, "header", "all zeros"),
        (3, 0, None, "file", "too few for its 8 slots"),
        (3, 1, None, "file", "rank is 0"),
    )
    shown = run_here("verify", path, "--all").stdout
    for wrong, (segment, rank, slot, check, words) in zip(found["wrong"], wanted, strict=True):
        file = file_in(path, rank, segment)
        where = {"engine_store": home_path(path).name, "drive": 0, "segment": segment, "rank": rank, "path": str(file)}
        key = None if slot is None else key_of(100 * segment + slot).hex()
        offset = None if slot is None else slot_offset(SMALL, slot)
        where |= {"slot": slot, "check": check, "key": key, "offset_bytes": offset, "slots": 5 if slot is None else 1}
        assert wrong == wrong | where and words in wrong["what"]
        at = ", all of its 5 blocks" if slot is None else f" slot {slot}"
        assert f"drive 0 segment {segment} rank {rank}{at}: {wrong['what']}" in shown
    assert found["totals"]["wrong_slots"] == found["engine_stores"][0]["wrong_slots"] == 6 + 3 * 5
    assert found["totals"]["read_bytes"] == BYTES - 3 * 5 * WIDE and found["engine_stores"][0]["problems"] == []


@pytest.mark.parametrize(
    ("damage", "words", "slots"),
    [
        (lambda data: os.truncate(data, 2 * 4096), "reading it ended in SIG", 0),
        (os.unlink, "its index is missing", 0),
        (lambda data: change(data, data.stat().st_size - 1, b"x"), "kvdisk repair", SLOTS),
    ],
)
def test_an_index_that_is_damaged(path, damage, words, slots):
    make_store(path)
    damage(home_path(path) / "index" / "data.mdb")
    found = verified(path, code=1)
    (problem,) = found["engine_stores"][0]["problems"]
    assert words in problem and found["totals"]["slots"] == slots
    assert f"engine store {home_path(path).name[:8]}: {problem}" in run_here("verify", path).stdout
    assert "To do   run kvdisk repair" in run_here("verify", path).stdout
    assert run_here("verify", path).stdout.splitlines()[-1].startswith("Result  "), "what matters is last"
    assert run_here("repair", path).exit_code == 0
    assert verified(path)["totals"]["slots"] == SLOTS


# -- drives and samples ------------------------------------------------------------------------


def test_every_drive(tmp_path):
    dirs = [tmp_path / "a", tmp_path / "b"]
    make_store(dirs, 4, drives=2)
    assert verified(*dirs)["totals"]["slots"] == SLOTS
    found = verified(dirs[0], code=1)
    assert found["totals"]["wrong_slots"] == 20
    assert {(one["check"], one["drive"], one["path"]) for one in found["wrong"]} == {("file", 1, None)}
    assert "drive 1 was not looked at, name its directory too" in found["wrong"][0]["what"]
    (file,) = (dirs[1] / "homes").glob("*/segments/3/rank0.kv")
    change(file, slot_offset(WIDE, 4) + HEADER_BYTES, b"flipped")
    (wrong,) = verified(*dirs, code=1)["wrong"]
    assert (wrong["drive"], wrong["segment"], wrong["slot"], wrong["path"]) == (1, 3, 4, str(file))


def test_a_sample_is_told_and_can_be_repeated(path):
    make_store(path)
    change(file_in(path), slot_offset(SMALL, 2), b"x")
    for seed, code in ((0, 1), (1, 0)):  # 5 of 20 blocks, one with that one and one without
        hit = verified(path, "--sample", "25 %", "--seed", seed, code=code)
        assert (hit["totals"]["slots"], hit["sample_percent"], hit["seed"]) == (10, 25.0, seed)
    shown = run_here("verify", path, "--sample", "0.01").stdout
    assert "0.01 % of the blocks, seed " in shown and "2 slots, " in shown, "one block at least"
    assert "--sample is a percentage above 0" in refused("verify", path, "--sample=nan")
    assert "there is no engine store aaaa" in refused("verify", path, "--engine-store", "a" * 32)


# -- while it changes --------------------------------------------------------------------------


def verdict_while(path: Path, act) -> Verdict:
    """Verify, and act when the indexes have been read and the slots have not."""
    return verify_store([path], watch=lambda done_bytes, _: None if done_bytes else act())


def evict(parts) -> None:
    for change_index in (
        lambda: parts.index.delete([(0, key_of(202))]),
        lambda: write_block(parts.home, Slot(2, 2), key_of(555), GENERATION + 100),
        lambda: parts.index.put([BlockRecord(0, key_of(555), Slot(2, 2), GENERATION + 100)]),
    ):
        change_index()
        assert parts.index.flush(600)


def drop(parts) -> None:
    parts.index.delete([(0, key_of(200 + slot)) for slot in range(5)])
    assert parts.index.flush(600)
    for rank in range(2):
        segment_room.drop_segment(parts.home, 2, rank)


@pytest.mark.parametrize(("act", "changed_slots"), [(evict, 2), (drop, 10)])
def test_what_changes_while_it_is_read_is_not_wrong(path, act, changed_slots):
    make_store(path)
    parts = start(path)
    verdict = verdict_while(path, lambda: act(parts))
    (home,) = verdict.engine_stores
    assert (verdict.ok, home.owner, home.changed_slots, home.slots) == (True, "alive", changed_slots, SLOTS)
    assert verified(path)["totals"]["slots"] == SLOTS - changed_slots * (act is drop)
    end(parts)


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_leaves_and_comes_back_while_its_slot_is_read_is_not_wrong(path, monkeypatch, late):
    """Its record is then the same as before; what was read of it was half written. ``late``: also
    when it was read again, and it is back before the index is."""
    make_store(path)
    parts, file, at = start(path), file_in(path), slot_offset(WIDE, 2) + HEADER_BYTES
    sound = file.read_bytes()[at : at + 1]
    change(file, at, b"x" if sound != b"x" else b"y")

    def write(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes and not late:
            change(file, at, sound)

    def read_late(index_paths: list[Path]) -> list[IndexContent]:
        change(file, at, sound)
        return read_indexes(index_paths)

    monkeypatch.setattr(verify, "read_indexes", read_late)
    verdict = verify_store([path], watch=write)
    assert verdict.ok and verdict.engine_stores[0].changed_slots == 1
    end(parts)


def test_a_home_that_is_taken_over_while_it_is_read_is_read_again(path):
    make_store(path)
    owners = []
    verdict = verdict_while(path, lambda: owners or owners.append(start(path)))
    before, after = verdict.engine_stores
    assert verdict.ok and before.gone and not after.gone
    assert (before.changed_slots, after.slots, after.owner) == (SLOTS, SLOTS, "alive")
    end(owners[0])


def test_an_index_that_cannot_be_read_again_clears_nothing_and_ctrl_c_leaves_what_was_found(path, monkeypatch):
    make_store(path)
    change(file_in(path, 0, 0), slot_offset(SMALL, 2), b"x")

    def stop(done_bytes: int = 1, total_bytes: int = 0) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(verify, "PART_BYTES", 2 * WIDE)
    for again in (verify.read_indexes, lambda _paths: stop()):  # also a second one, while the index is read once more
        monkeypatch.setattr(verify, "read_indexes", again)
        verdict = verify_store([path], watch=stop)
        assert verdict.stopped and not verdict.ok
        assert [(one.segment, one.slot) for one in verdict.wrong] == [(0, 2)]
        assert 0 < verdict.engine_stores[0].slots < SLOTS
    monkeypatch.undo()
    verdict = verdict_while(path, lambda: os.truncate(home_path(path) / "index" / "data.mdb", 2 * 4096))
    assert [(one.segment, one.slot) for one in verdict.wrong] == [(0, 2)] and not verdict.stopped


def test_a_report_fits_a_screen_with_the_result_last(path, monkeypatch):
    """However much is wrong; ``--all`` lists it."""
    make_store(path)
    for segment in range(4):
        for rank in range(2):
            change(file_in(path, rank, segment), slot_offset(SMALL, 0), bytes(30 * HEADER_BYTES))
    monkeypatch.setenv("COLUMNS", "80")
    found = verified(path, code=1)
    assert len(found["wrong"]) > 12
    for options, whole in (([], False), (["--all"], True)):
        lines = run_here("verify", path, *options).stdout.splitlines()
        rows = sum(-(-len(line) // 80) or 1 for line in lines)
        assert (rows <= 24) is not whole
        assert lines[-1].startswith("Result  ") and "wrong" in lines[-1]
        assert any(line.startswith("  … and ") for line in lines) is not whole
        assert sum("  ✗ " in line for line in lines) >= (len(found["wrong"]) if whole else 2)
