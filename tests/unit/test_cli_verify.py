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
from rebuild_stores import GEOMETRY, end, file_of, hold, home_path, key_of, make_store, start, write_block

from kvdisk.blocks import Slot
from kvdisk.cli.verify import Verdict, verify_store
from kvdisk.device import segment as segment_room
from kvdisk.device import verify as device_verify
from kvdisk.device.header import CHECKSUM_KINDS
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.base import BlockRecord

BLOCKS, SLOTS = 20, 40
SMALL, WIDE = (group.slot_bytes for group in GEOMETRY.groups)
BYTES = 2 * (10 * SMALL + 10 * WIDE)


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


def the_one(path: Path) -> dict:
    """What is wrong with the one slot that is: the third of segment 2, on rank 1."""
    found = verified(path, code=1)
    (wrong,) = found["wrong"]
    where = {"drive": 0, "segment": 2, "rank": 1, "slot": 2, "offset_bytes": slot_offset(SMALL, 2), "slots": 1}
    where |= {"home": home_path(path).name, "epoch": 0, "key": key_of(202).hex()}
    where |= {"path": str(home_path(path) / "segments" / "2" / "rank1.kv")}
    assert wrong == wrong | where
    assert found["totals"]["wrong_slots"] == found["homes"][0]["wrong_slots"] == 1
    assert found["homes"][0]["problems"] == []
    return wrong


# -- whole -------------------------------------------------------------------------------------


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


# -- wrong -------------------------------------------------------------------------------------

GENERATION = 1_700_000_000_000_000_013
"""Of the third block of segment 2."""


@pytest.mark.parametrize("slot", [2, 3])
def test_a_flipped_bit_in_a_payload_of_either_kind_of_checksum(path, slot):
    assert set(CHECKSUM_KINDS) == {1, 2}
    make_store(path)
    file = home_path(path) / "segments" / "2" / "rank1.kv"
    at = slot_offset(SMALL, slot) + HEADER_BYTES + 3999
    change(file, at, bytes([file.read_bytes()[at] ^ 1]))
    (wrong,) = verified(path, code=1)["wrong"]
    assert (wrong["slot"], wrong["rank"], wrong["check"]) == (slot, 1, "checksum")


@pytest.mark.parametrize("field", ["sum", "zeros", "version"])
def test_a_header_that_is_none(path, field):
    make_store(path)
    file, at = home_path(path) / "segments" / "2" / "rank1.kv", slot_offset(SMALL, 2)
    header = bytearray(file.read_bytes()[at : at + HEADER_BYTES])
    if field == "zeros":
        header[:] = bytes(HEADER_BYTES)
    elif field == "sum":
        header[-1] ^= 1
    else:
        from xxhash import xxh3_64_intdigest

        header[8] ^= 2
        header[-8:] = xxh3_64_intdigest(header[:-8]).to_bytes(8, "little")
    change(file, at, bytes(header))
    wrong = the_one(path)
    assert wrong["check"] == ("version" if field == "version" else "header")
    words = {
        "zeros": "all zeros",
        "sum": "checksum of the header",
    }
    assert words.get(field, "format version 3") in wrong["what"]


@pytest.mark.parametrize("check", ["key", "generation", "parent", "rank"])
def test_a_sound_slot_of_another_block(path, check):
    make_store(path)
    home = hold(path)
    key, slot, parent = key_of(202), Slot(2, 2), key_of(201)
    other = {
        "key": {"key": key_of(999)},
        "generation": {"generation": GENERATION + 1},
        "parent": {"parent": key_of(999)},
    }
    if check == "rank":
        first, at = file_of(home, 2, 0).read_bytes(), slot_offset(SMALL, 2)
        change(file_of(home, 2, 1), at, first[at : at + SMALL])
    else:
        given = {"key": key, "generation": GENERATION, "parent": parent} | other[check]
        write_block(home, slot, ranks=[1], **given)
    home.close(clean=False)
    wrong = the_one(path)
    assert wrong["check"] == check and f"its header names the {check} " in wrong["what"]
    shown = run_here("verify", path)
    assert shown.exit_code == 1
    assert "1 slot wrong (2 % of those read)" in shown.stdout
    assert f"drive 0 segment 2 rank 1 slot 2: {wrong['what']}" in shown.stdout


@pytest.mark.parametrize("how", ["gone", "short", "other"])
def test_a_file_that_cannot_be_used(path, how):
    make_store(path)
    file = home_path(path) / "segments" / "2" / "rank1.kv"
    if how == "gone":
        file.unlink()
    elif how == "short":
        os.truncate(file, slot_offset(SMALL, 3))
    else:
        shutil.copy(file.with_name("rank0.kv"), file)
    found = verified(path, code=1)
    (wrong,) = found["wrong"]
    assert (wrong["check"], wrong["slots"], wrong["slot"], wrong["key"]) == ("file", 5, None, None)
    words = {
        "gone": "no such file",
        "short": "too few for its 8 slots",
        "other": "rank is 0",
    }
    assert words[how] in wrong["what"]
    assert found["totals"]["wrong_slots"] == 5
    assert found["totals"]["read_bytes"] == BYTES - 5 * SMALL
    assert "segment 2 rank 1, all of its 5 blocks: " in run_here("verify", path).stdout


def test_what_cannot_be_read_is_wrong_and_what_lies_beside_it_is_not(path, monkeypatch):
    make_store(path)
    bad = slot_offset(SMALL, 2)

    def preadv(fd, views, offset, _real=os.preadv):
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("2/rank1.kv") and offset <= bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return _real(fd, views, offset)

    monkeypatch.setattr(device_verify.os, "preadv", preadv)
    wrong = the_one(path)
    assert (wrong["check"], wrong["what"]) == ("read", "it cannot be read: Input/output error")


# -- homes as a whole --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut short", "gone", "another"])
def test_an_index_that_is_damaged(path, how):
    make_store(path)
    data = home_path(path) / "index" / "data.mdb"
    if how == "cut short":
        os.truncate(data, 2 * 4096)  # reading it ends the process
    elif how == "gone":
        data.unlink()
    else:
        change(data, data.stat().st_size - 1, b"x")
    found = verified(path, code=1)
    (problem,) = found["homes"][0]["problems"]
    words = {"cut short": "reading it ended in SIG", "gone": "its index is missing", "another": "kvdisk repair"}
    assert words.get(how, "its index cannot be read") in problem
    assert found["totals"]["slots"] == (SLOTS if how == "another" else 0)
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
    file = home_path(path) / "segments" / "2" / "rank1.kv"
    change(file, slot_offset(SMALL, 2), b"x")
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
    acted = []

    def watch(done_bytes: int, total_bytes: int) -> None:
        if not acted:
            acted.append((done_bytes, total_bytes))
            act()

    return verify_store([path], watch=watch)


def test_a_block_that_leaves_while_it_is_read_is_not_wrong(path):
    make_store(path)
    parts = start(path)

    def evict() -> None:
        parts.index.delete([(0, key_of(202))])
        assert parts.index.flush(600)
        write_block(parts.home, Slot(2, 2), key_of(555), GENERATION + 100)
        parts.index.put([BlockRecord(0, key_of(555), Slot(2, 2), GENERATION + 100)])
        assert parts.index.flush(600)

    verdict = verdict_while(path, evict)
    (home,) = verdict.homes
    assert (verdict.ok, home.owner, home.changed_slots, home.slots) == (True, "alive", 2, SLOTS)
    write_block(parts.home, Slot(2, 2), key_of(556), GENERATION + 101, ranks=[0])
    verdict = verify_store([path])
    assert [(one.rank, one.slot, one.check) for one in verdict.wrong] == [(0, 2, "key")]
    end(parts)


def test_a_segment_that_is_dropped_while_it_is_read_is_not_wrong(path):
    make_store(path)
    parts = start(path)

    def drop() -> None:
        parts.index.delete([(0, key_of(200 + slot)) for slot in range(5)])
        assert parts.index.flush(600)
        for rank in range(2):
            segment_room.drop_segment(parts.home, 2, rank)

    verdict = verdict_while(path, drop)
    assert (verdict.ok, verdict.homes[0].changed_slots) == (True, 10)
    assert verified(path)["totals"]["slots"] == SLOTS - 10, "the segment's own record is still there"
    end(parts)


def test_a_home_that_is_taken_over_while_it_is_read_is_read_again(path):
    make_store(path)
    owners = []
    verdict = verdict_while(path, lambda: owners.append(start(path)))
    before, after = verdict.homes
    assert verdict.ok and before.gone and not after.gone
    assert (before.changed_slots, after.slots, after.owner) == (SLOTS, SLOTS, "alive")
    end(owners[0])


def test_an_index_that_cannot_be_asked_again_clears_nothing(path):
    make_store(path)
    change(home_path(path) / "segments" / "2" / "rank1.kv", slot_offset(SMALL, 2), b"x")
    data = home_path(path) / "index" / "data.mdb"
    verdict = verdict_while(path, lambda: os.truncate(data, 2 * 4096))
    assert [one.slot for one in verdict.wrong] == [2]


def test_ctrl_c_leaves_what_was_found(path):
    make_store(path)
    change(home_path(path) / "segments" / "0" / "rank0.kv", slot_offset(SMALL, 2), b"x")

    def stop(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    verdict = verify_store([path], watch=stop)
    assert verdict.stopped and not verdict.ok
    assert [(one.segment, one.slot) for one in verdict.wrong] == [(0, 2)]
    assert 0 < verdict.homes[0].slots < SLOTS
