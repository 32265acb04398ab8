# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify``: what it finds in stores that are whole, damaged, in use, on several drives,
and how it says so."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from cli_stores import run, run_here
from rebuild_stores import GEOMETRY, end, hold, home_path, key_of, make_store, start, write_block

from kvdisk.blocks import Slot
from kvdisk.cli import verify
from kvdisk.cli.verify import Verdict, verify_store
from kvdisk.device import segment as segment_room
from kvdisk.device import verify as device_verify
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.base import BlockRecord

BLOCKS, SLOTS = 20, 40
SMALL, WIDE = (group.slot_bytes for group in GEOMETRY.groups)
BYTES = 2 * (10 * SMALL + 10 * WIDE)
GENERATION = 1_700_000_000_000_000_013
"""Of the third block of segment 2."""


def verified(*arguments: object, code: int = 0) -> dict:
    done = run_here("verify", *arguments, "--json")
    assert (done.exit_code, done.stderr) == (code, "")
    found = json.loads(done.stdout)
    assert found["ok"] is (code == 0)
    return found


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
    assert (found["json_version"], found["ok"], found["stopped"], found["wrong"]) == (1, True, False, [])
    assert found["totals"] == {
        "homes": 1, "blocks": BLOCKS, "slots": SLOTS, "read_bytes": BYTES, "wrong_slots": 0, "changed_slots": 0,
    }  # fmt: skip
    (home,) = found["homes"]
    assert (home["owner"], home["problems"], home["notes"], home["gone"]) == ("orphan", [], [], False)
    shown = run("verify", path, COLUMNS="80")
    assert shown.returncode == 0 and shown.stderr == "", "no progress where nobody sees it"
    said = " ".join(shown.stdout.split())
    assert f"Holds {BLOCKS} blocks in 1 engine store" in said and f"Read {SLOTS} slots, 480.0 KiB in" in said
    assert "Result all good" in said and "\x1b" not in shown.stdout


def flip(path: Path, offset: int, slot: int = 2) -> None:
    at = slot_offset(SMALL, slot) + offset
    change(file_in(path), at, bytes([file_in(path).read_bytes()[at] ^ 1]))


def rewrite(path: Path, **other: object) -> None:
    home = hold(path)
    block = {"key": key_of(202), "generation": GENERATION, "parent": key_of(201)} | other
    write_block(home, Slot(2, 2), ranks=[1], **block)
    home.close(clean=False)


@pytest.mark.parametrize(
    ("damage", "slot", "check", "words"),
    [
        (lambda path: flip(path, HEADER_BYTES + 3999), 2, "checksum", "its payload does not have the checksum"),
        (lambda path: flip(path, HEADER_BYTES, slot=3), 3, "checksum", "its payload does not have the checksum"),
        (lambda path: flip(path, HEADER_BYTES - 1), 2, "header", "checksum of the header"),
        (lambda path: change(file_in(path), slot_offset(SMALL, 2), bytes(HEADER_BYTES)), 2, "header", "all zeros"),
        (lambda path: rewrite(path, key=key_of(999)), 2, "key", "its header names the key "),
        (lambda path: rewrite(path, parent=key_of(999)), 2, "parent", "its header names the parent "),
    ],
)
def test_a_slot_that_is_wrong(path, damage, slot, check, words):
    """Slots 2 and 3 have the two kinds of checksum."""
    make_store(path)
    damage(path)
    found = verified(path, code=1)
    (wrong,) = found["wrong"]
    where = {"home": home_path(path).name, "drive": 0, "segment": 2, "rank": 1, "path": str(file_in(path))}
    where |= {"slot": slot, "offset_bytes": slot_offset(SMALL, slot), "slots": 1}
    assert wrong == wrong | where | {"epoch": 0, "key": key_of(200 + slot).hex(), "check": check}
    assert words in wrong["what"]
    assert found["totals"]["wrong_slots"] == found["homes"][0]["wrong_slots"] == 1
    assert found["homes"][0]["problems"] == []
    shown = run_here("verify", path).stdout
    assert "1 slot wrong (2 % of those read)" in shown
    assert f"drive 0 segment 2 rank 1 slot {slot}: {wrong['what']}" in shown


def test_what_cannot_be_read_is_wrong_and_what_lies_beside_it_is_not(path, monkeypatch):
    make_store(path)
    bad = slot_offset(SMALL, 2)

    def preadv(fd, views, offset, _real=os.preadv):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("2/rank1.kv") and offset <= bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return _real(fd, views, offset)

    monkeypatch.setattr(device_verify.os, "preadv", preadv)
    (wrong,) = verified(path, code=1)["wrong"]
    assert (wrong["slot"], wrong["check"], wrong["what"]) == (2, "read", "it cannot be read: Input/output error")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (os.unlink, "no such file"),
        (lambda file: os.truncate(file, slot_offset(SMALL, 3)), "too few for its 8 slots"),
        (lambda file: shutil.copy(file.with_name("rank0.kv"), file), "rank is 0"),
    ],
)
def test_a_file_that_cannot_be_used(path, damage, words, monkeypatch):
    """It is one finding, however many parts it is read in."""
    monkeypatch.setattr(verify, "PART_BYTES", 2 * SMALL)
    make_store(path)
    damage(file_in(path))
    found = verified(path, code=1)
    (wrong,) = found["wrong"]
    assert (wrong["check"], wrong["slots"], wrong["slot"], wrong["key"]) == ("file", 5, None, None)
    assert words in wrong["what"]
    assert found["totals"]["wrong_slots"] == 5
    assert found["totals"]["read_bytes"] == BYTES - 5 * SMALL
    assert "segment 2 rank 1, all of its 5 blocks: " in run_here("verify", path).stdout


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
    (problem,) = found["homes"][0]["problems"]
    assert words in problem and found["totals"]["slots"] == slots
    assert f"engine store {home_path(path).name}: {problem}" in run_here("verify", path).stdout
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
    assert run_here("verify", path, "--sample=nan").stderr.startswith("kvdisk: --sample is a percentage above 0")
    assert "has no engine store aaaa" in run_here("verify", path, "--home", "a" * 32).stderr
    shown = run_here("verify", path, "--sample", "0.01").stdout
    assert "Sample" in shown and "0.01 % of the blocks, seed " in shown and "2 slots, " in shown


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
    (home,) = verdict.homes
    assert (verdict.ok, home.owner, home.changed_slots, home.slots) == (True, "alive", changed_slots, SLOTS)
    assert verified(path)["totals"]["slots"] == SLOTS - changed_slots * (act is drop)
    end(parts)


def test_a_home_that_is_taken_over_while_it_is_read_is_read_again(path):
    make_store(path)
    owners = []
    verdict = verdict_while(path, lambda: owners or owners.append(start(path)))
    before, after = verdict.homes
    assert verdict.ok and before.gone and not after.gone
    assert (before.changed_slots, after.slots, after.owner) == (SLOTS, SLOTS, "alive")
    end(owners[0])


def test_an_index_that_cannot_be_read_again_clears_nothing(path):
    make_store(path)
    change(file_in(path), slot_offset(SMALL, 2), b"x")
    data = home_path(path) / "index" / "data.mdb"
    verdict = verdict_while(path, lambda: os.truncate(data, 2 * 4096))
    assert [one.slot for one in verdict.wrong] == [2]


def test_ctrl_c_leaves_what_was_found(path, monkeypatch):
    """After less than a file, and again while the index is read once more."""
    make_store(path)
    monkeypatch.setattr(verify, "PART_BYTES", 2 * WIDE)
    change(file_in(path, 0, 0), slot_offset(SMALL, 2), b"x")

    def stop(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    def stop_again(paths: object) -> None:
        raise KeyboardInterrupt

    for again in (verify.read_indexes, stop_again):
        monkeypatch.setattr(verify, "read_indexes", again)
        verdict = verify_store([path], watch=stop)
        assert verdict.stopped and not verdict.ok
        assert [(one.segment, one.slot) for one in verdict.wrong] == [(0, 2)]
        assert 0 < verdict.homes[0].slots < SLOTS
