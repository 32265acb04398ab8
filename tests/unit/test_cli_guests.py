# SPDX-License-Identifier: Apache-2.0
"""What commands say and do where an engine's ranks are on two hosts: two directories."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_stores import CAP, PLAIN, PLAIN_GEOMETRY, fill_home, json_of, run_here

from kvdisk.device.home import INDEX_FILE, Home
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.engine_store import describe_geometry, guests_of
from kvdisk.messages import HomeSpec
from kvdisk.recovery import rebuild_index
from kvdisk.salts import SaltDigests

KNOWN = (0, 1, 2)
USED_S = 1_000_000_000
MODEL = PLAIN._replace(description={"model": "m", "geometry": describe_geometry(PLAIN_GEOMETRY)})


class Hosts(NamedTuple):
    """``one``: with the index and rank 0; ``two``: with rank 1."""

    one: Path
    two: Path


def spec_of(home: Home) -> HomeSpec:
    return HomeSpec(home.id, MODEL.fingerprint, KNOWN, guests_of(home, 2))


@pytest.fixture
def hosts(tmp_path):
    """What a stopped engine has left."""
    hosts = Hosts(tmp_path / "one", tmp_path / "two")
    store = Store.open(hosts.one, clock=lambda: USED_S)
    home = store.acquire_home(MODEL.fingerprint, MODEL.description, CAP, spread=True)
    fill_home(home, MODEL, len(KNOWN)).close()
    other = Store.open(hosts.two, clock=lambda: USED_S)
    guest = other.join_home(home.id, MODEL.fingerprint, spec_of(home).guests)
    for number in KNOWN:
        target = guest.segments_path / str(number)
        target.mkdir(mode=0o700)
        shutil.move(home.segments_path / str(number) / "rank1.kv", target)
    other.leave(guest)
    home.close(clean=True)
    return hosts


def test_both_hosts_are_healthy(hosts):
    one, two = (json_of("inspect", path) for path in hosts)
    assert [found["problems"] for found in (one, two)] == [[], []]
    (home,), (guest,) = one["engine_stores"], two["engine_stores"]
    assert (home["kind"], guest["kind"]) == ("spread", "guest")
    assert (home["blocks"], guest["blocks"]) == (15, None)
    assert guest["clean"] and not guest["segments"][0]["indexed"]
    assert guest["allocated_bytes"] == two["totals"]["allocated_bytes"] > 0
    assert two["totals"]["unreadable_engine_stores"] == 0
    said = " ".join(run_here("inspect", hosts.two, "--all").stdout.split())
    assert "healthy" in said and "1 with files of ranks whose index is on another host" in said
    assert "guest" in said and "not in the index" not in said


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "--salts"),
        ("repair",),
        ("top", "--once"),
        ("clear", "--dry-run", "--yes"),
        ("prune", "--older-than", "1d", "--dry-run", "--yes"),
    ],
    ids=" ".join,
)
def test_commands_take_both(hosts, command):
    name, *options = command
    for path in hosts:
        result = run_here(name, path, *options)
        assert result.exit_code == 0, result.output


def test_a_report_of_both(hosts, tmp_path):
    for at, path in enumerate(hosts):
        assert run_here("report", path, "-o", tmp_path / f"{at}.html").exit_code == 0
    assert "the index is on another host" in (tmp_path / "1.html").read_text()
    assert "the index is on another host" not in (tmp_path / "0.html").read_text()


def test_verify_reads_the_ranks_that_are_here(hosts):
    one, two = json_of("verify", hosts.one, code=1), json_of("verify", hosts.two)
    (home,), (guest,) = one["engine_stores"], two["engine_stores"]
    assert one["totals"]["slots"] == 15, "of one rank"
    assert {finding["rank"] for finding in one["wrong"]} == {0}, "the slots were never written, and are not sealed"
    assert two["ok"] and two["totals"]["slots"] == 0
    assert "their index is on the host of their engine's scheduler" in guest["notes"][0]
    assert home["notes"] == []


def test_an_index_is_rebuilt_from_the_ranks_that_are_here(hosts):
    """Its segments stay, and what is in their slots is what these ranks say."""
    (home,) = list_homes(hosts.one)
    (home.index_path / INDEX_FILE).unlink()
    held = Store.open(hosts.one).hold_home(home.id)
    found = rebuild_index(held, 0)
    assert [segment.segment for segment in found.segments] == list(KNOWN) and not found.lost
    held.close(clean=True)


def test_a_segment_of_which_no_rank_has_a_file_is_lost_to_a_rebuild(hosts):
    (home,) = list_homes(hosts.one)
    shutil.rmtree(home.segments_path / "1")
    (home.segments_path / "1").mkdir()
    (home.index_path / INDEX_FILE).unlink()
    held = Store.open(hosts.one).hold_home(home.id)
    found = rebuild_index(held, 0)
    assert [segment.segment for segment in found.segments] == [0, 2] and found.lost.keys() == {(0, 1)}
    held.close(clean=True)


def test_repair_makes_no_index_of_a_guest(hosts):
    result = run_here("repair", hosts.two)
    assert result.exit_code == 0 and "has no index: those of its files are on other hosts" in result.stdout
    (guest,) = list_homes(hosts.two)
    assert not guest.index_path.exists()


def test_a_guest_goes_as_a_whole(hosts):
    young = run_here("prune", hosts.two, "--older-than", "2000w", "--yes")
    assert young.exit_code == 0 and len(list_homes(hosts.two)) == 1
    old = json_of("prune", hosts.two, "--older-than", "1d", "--yes")
    assert old["goes"]["engine_stores"] == 1 and old["engine_stores"][0]["blocks"] is None
    assert not list_homes(hosts.two)
    assert len(list_homes(hosts.one)) == 1


def test_a_guest_in_use_stays(hosts):
    home = Store.open(hosts.one).acquire_home(MODEL.fingerprint, MODEL.description, CAP, spread=True)
    guest = Store.open(hosts.two).join_home(home.id, MODEL.fingerprint, spec_of(home).guests)
    assert run_here("clear", hosts.two, "--yes").exit_code == 3
    asked = run_here("clear", hosts.two, "--live", "--yes")
    assert asked.exit_code == 1 and "its engine is on another host, ask that" in " ".join(asked.output.split())
    run_here("clear", hosts.two, "--stopped", "--yes")
    assert len(list_homes(hosts.two)) == 1
    assert run_here("top", hosts.two, "--once").exit_code == 0
    guest.close()
    home.close(clean=True)
    assert run_here("clear", hosts.two, "--yes").exit_code == 0
    assert not list_homes(hosts.two)


def test_what_a_tenant_has_on_another_host_is_told(hosts):
    from kvdisk.blocks import Slot, make_block_key
    from kvdisk.index.base import BlockRecord
    from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for

    store = Store.open(hosts.one)
    digest = SaltDigests(store.keep_salt_key()).of("tenant")
    home = store.acquire_home(MODEL.fingerprint, MODEL.description, CAP, spread=True)
    home.adopt_index()
    index = LmdbIndex(home.index_path, map_bytes=map_bytes_for(1000))
    index.put([BlockRecord(0, make_block_key(b"\7" * 32, 0), Slot(0, 7), 99, None, USED_S, digest)])
    assert index.flush(600)
    index.close()
    home.close(clean=True)
    pruned = json_of("prune", hosts.one, "--salt", "tenant", "--yes", code=1)
    assert pruned["goes"]["blocks"] == 1 and [one["result"] for one in pruned["engine_stores"]] == ["deleted"]
    assert "its ranks on other hosts" in pruned["kept"][0]
    Store.open(hosts.two).keep_salt_key()
    assert "their index is on the host" in json_of("prune", hosts.two, "--salt", "tenant", "--yes", code=1)["kept"][0]
