# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect --salts`` and ``kvdisk prune --salt``: what each tenant has on the drive, and
that all of it goes, and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_stores import HYBRID, json_of, leave_home, refused, run_here
from rebuild_stores import end, file_of, make_store, served, start

from kvdisk.blocks import Slot
from kvdisk.cli.verify import verify_store
from kvdisk.device.control import SALT_KEY_FILE, home_ids, read_salt_key
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord
from kvdisk.recovery import cut_home, rebuild_index
from kvdisk.salts import SaltDigests, digest_text

DAY_S = 86400
ACME, OTHER = "acme, a secret", "bücher"
SLOT_BYTES = {0: 2 * 8192, 1: 2 * 16384}
"""Of both ranks, by group: segments are in turn of each."""


def own(path: Path, salt_of: Callable[[Slot], str | None], *, clean: bool = True) -> str:
    """Say whose blocks are; return the id of the engine store."""
    parts = start(path)
    assert parts.home is not None and parts.index is not None
    for record in list(parts.index.blocks()):
        parts.index.put([record._replace(tenant=parts.salts.of(salt_of(record.slot)))])
    assert parts.index.flush(600)
    home_id = parts.home.id
    end(parts, clean=clean)
    return home_id


def whose(slot: Slot) -> str | None:
    """Segment 0 is of one tenant, 1 of none, 2 and 3 are of another."""
    return {0: ACME, 1: None, 2: OTHER, 3: OTHER}[slot.segment]


def digest_of(path: Path, salt: str) -> str:
    key = read_salt_key(path)
    assert key is not None
    return digest_text(SaltDigests(key).of(salt))


def pruned(*arguments: object, code: int = 0) -> dict:
    return json_of("prune", *arguments, "--yes", code=code)


# -- what each has ------------------------------------------------------------------------------


def test_each_salt_is_counted_by_its_digest(path):
    make_store(path)
    own(path, whose)
    found = json_of("inspect", path, "--salts", "--salt", ACME)
    assert found["json_version"] == 5
    assert [(one["digest"], one["blocks"], one["bytes"]) for one in found["salts"]] == [
        (digest_of(path, OTHER), 10, 5 * (SLOT_BYTES[0] + SLOT_BYTES[1])),
        (digest_of(path, ACME), 5, 5 * SLOT_BYTES[0]),
    ]
    assert (found["without"]["digest"], found["without"]["blocks"]) == (None, 5)
    assert found["asked"] == found["salts"][1] and found["problems"] == []
    assert found["asked"]["tiers"] == {"nvme": 5 * SLOT_BYTES[0]}
    asked = json_of("inspect", path, "--salt", "nobody")["asked"]
    assert asked == asked | {"digest": digest_of(path, "nobody"), "blocks": 0, "oldest_stored_s": None}
    shown = run_here("inspect", path, "--salt", ACME).stdout
    assert "2 salts with" in shown and digest_of(path, ACME) in shown
    for place in (found, shown, *(item.read_bytes() for item in path.rglob("*") if item.is_file())):
        assert ACME not in str(place) and ACME.encode() not in (place if isinstance(place, bytes) else b"")


def test_a_salt_may_come_on_standard_input(path):
    make_store(path)
    own(path, whose)
    found = run_here("inspect", path, "--salt", "-", "--json", typed=f"{ACME}\n")
    assert json.loads(found.stdout)["asked"]["blocks"] == 5


def test_engine_stores_of_one_store_give_a_salt_one_digest(path):
    make_store(path)
    own(path, whose)
    other = start(path)  # takes the home, so that the next one makes another
    second = start(path)
    assert second.salts == other.salts and second.salts.is_kept
    for parts in (second, other):
        end(parts)
    assert len(home_ids(path)) == 2
    assert json_of("inspect", path, "--salt", ACME)["asked"]["blocks"] == 5


def test_a_store_from_before_has_no_tenants(path):
    expected = make_store(path)
    (path / SALT_KEY_FILE).unlink()
    found = json_of("inspect", path, "--salts")
    assert (found["salts"], found["without"]["blocks"], found["asked"]) == ([], len(expected), None)
    for arguments in (["inspect", path, "--salt", ACME], ["prune", path, "--salt", ACME, "--yes"]):
        assert f"has no {SALT_KEY_FILE}" in refused(*arguments)
    assert served(path) == expected, "the next engine serves it all"
    assert json_of("inspect", path, "--salt", ACME)["asked"]["blocks"] == 0
    assert pruned(path, "--salt", ACME)["engine_stores"] == []
    assert served(path) == expected


def test_a_damaged_key_is_made_anew(path, caplog):
    expected = make_store(path)
    own(path, whose)
    (path / SALT_KEY_FILE).write_text('{"key": "00"}')
    with pytest.raises(CorruptRecord):
        read_salt_key(path)
    assert "has no key" in refused("inspect", path, "--salt", ACME)
    assert served(path) == expected
    assert json_of("inspect", path, "--salt", ACME)["asked"]["blocks"] == 0
    assert len(json_of("inspect", path, "--salts")["salts"]) == 2, "tenants are still told apart"


def test_a_store_without_room_for_a_key_serves_and_tells_tenants_apart(path, monkeypatch):
    make_store(path)
    (path / SALT_KEY_FILE).unlink()

    def full(path: Path, key: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvdisk.device.store.write_salt_key", full)
    parts = start(path)
    assert not parts.salts.is_kept and parts.nvme is not None and not parts.nvme._catalog.keeps_tenants
    assert parts.salts.of(ACME) not in {0, parts.salts.of(OTHER)}
    end(parts)


def test_an_engine_makes_a_key_anew_that_others_removed(path):
    parts = start(path)
    store, key = Store.open(path), read_salt_key(path)
    store.keep_salt_key()
    (path / SALT_KEY_FILE).unlink()
    assert store.mend(parts.home) == [SALT_KEY_FILE] and store.mend(parts.home) == []
    assert read_salt_key(path) == key
    end(parts)


# -- what goes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_all_of_one_tenant_goes_and_nothing_else(path, clean):
    """Of an engine that ended in order, or was killed. What stays in files is zeros, and no rebuild
    brings it back."""
    expected = make_store(path)
    mine = {Slot(0, slot) for slot in range(5)} | {Slot(2, 3), Slot(2, 4)}
    home_id = own(path, lambda slot: ACME if slot in mine else OTHER, clean=clean)
    # A chain is one tenant's: the head of segment 2's is, though its record does not say so.
    gone = mine | {Slot(2, slot) for slot in range(3)}
    dry = json_of("prune", path, "--salt", ACME, "--dry-run")
    assert (dry["after"], dry["asked"]["salt_digest"]) == (None, digest_of(path, ACME))
    assert not dry["asked"]["everything"] and ACME not in json.dumps(dry)
    found = pruned(path, "--salt", ACME)
    assert (
        found["goes"]
        == dry["goes"]
        == {"engine_stores": 0, "segments": 2, "blocks": 10} | {"bytes": found["goes"]["bytes"]}
    )
    assert found["engine_stores"][0]["result"] == "deleted" and found["kept"] == []
    assert verify_store([path]).ok
    assert served(path) == {row for row in expected if row.slot not in gone}
    assert json_of("inspect", path, "--salt", ACME)["asked"]["blocks"] == 0
    assert pruned(path, "--salt", ACME)["engine_stores"] == []
    assert home_ids(path) != [home_id], "another engine has taken it over"


def test_slots_that_stay_are_erased_and_a_rebuild_finds_nothing_there(path):
    expected = make_store(path)
    own(path, lambda slot: ACME if slot.segment == 1 else None)
    parts = start(path)
    assert parts.index is not None
    for record in list(parts.index.blocks()):  # two chains in one segment
        if record.slot == Slot(1, 3):
            parts.index.put([record._replace(parent=None, tenant=0)])
        if record.slot == Slot(1, 4):
            parts.index.put([record._replace(tenant=0)])
    assert parts.index.flush(600)
    end(parts)
    found = pruned(path, "--salt", ACME)
    assert found["goes"]["segments"] == 0 and found["goes"]["blocks"] == 3
    stays = {row for row in expected if row.slot not in {Slot(1, slot) for slot in range(3)}}
    (home_id,) = home_ids(path)
    home = Store.open(path).hold_home(home_id)
    for rank in range(2):
        written = file_of(home, 1, rank).read_bytes()
        assert not any(written[4096 : 4096 + 3 * 16384]) and any(written[4096 + 3 * 16384 :][:16384])
    rebuild_index(home, 64 << 20)
    home.close(clean=True)
    assert {row.slot for row in served(path)} == {row.slot for row in stays}
    assert json_of("inspect", path, "--salts")["without"]["blocks"] == len(stays), "a rebuild knows no tenants"


def test_blocks_that_a_crash_left_erased_are_not_served_and_go_the_next_time(path, monkeypatch):
    make_store(path)
    home_id = own(path, whose)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    slots = [Slot(0, 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvdisk.recovery._cut", killed)
        home = Store.open(path).hold_home(home_id)
        with pytest.raises(KeyboardInterrupt):
            cut_home(home, [], [], slots)
        home.close(clean=False)
    assert not verify_store([path]).ok, "the record still names what was erased"
    assert pruned(path, "--salt", ACME)["goes"]["blocks"] == 5
    assert verify_store([path]).ok


def test_conditions_hold_together(path):
    make_store(path)
    own(path, lambda slot: ACME)
    leave_home(path, HYBRID, 2, last_use_s=5000)
    now_s, parts = int(time.time()), start(path)
    for record in list(parts.index.blocks()):
        parts.index.put([record._replace(stored_s=now_s - (9 if record.slot.segment < 2 else 1) * DAY_S)])
    assert parts.index.flush(600)
    end(parts)
    found = pruned(path, "--salt", ACME, "--older-than", "5d")
    assert found["goes"]["blocks"] == 10
    assert pruned(path, "--salt", ACME, "--namespace", HYBRID.fingerprint.hex()[:6])["engine_stores"] == []
    found = pruned(path, "--salt", ACME)
    assert found["goes"]["engine_stores"] == 1, "nothing else is in it"
    assert len(list_homes(path)) == 1
    assert "give one of the two" in refused("prune", path, "--salt", ACME, "--to", "1GiB", "--yes")
    assert "needs stopped engines" in refused("prune", path, "--salt", ACME, "--live", "--yes")
    assert "an empty salt" in refused("prune", path, "--salt", "", "--yes")
    assert "takes neither a KEY" in refused("inspect", path, "--salts", "0123456789")


def test_what_cannot_be_read_is_named(path):
    """Nobody knows whose blocks are in there: the answer is not that all is gone."""
    make_store(path)
    home_id = own(path, whose)
    os.truncate(path / "homes" / home_id / "index" / "data.mdb", 100)
    found = pruned(path, "--salt", ACME, code=1)
    assert found["engine_stores"] == [] and len(found["kept"]) == 1
    assert json_of("inspect", path, "--salts", code=1)["problems"]


def test_a_live_engine_store_is_left_alone(path):
    make_store(path)
    own(path, whose)
    alive = start(path)
    try:
        assert json_of("inspect", path, "--salt", ACME)["asked"]["blocks"] == 5
        assert "that would have to change" in refused("prune", path, "--salt", ACME, "--yes", code=3)
        assert pruned(path, "--salt", "nobody")["in_use"] == [], "nothing of it would have to change"
        found = pruned(path, "--salt", ACME, "--stopped")
        assert (found["engine_stores"], found["in_use"]) == ([], [alive.home.id])
    finally:
        end(alive)
    assert json_of("inspect", path, "--salt", ACME)["asked"]["blocks"] == 5


def test_it_says_how_many_blocks_are_nobodys(path):
    make_store(path)
    own(path, whose)
    said = " ".join(run_here("prune", path, "--salt", ACME, "--yes").stdout.split())
    assert "5 blocks without a digest of a salt: they are of requests without a salt" in said
