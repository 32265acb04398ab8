# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk inspect`` finds in stores in use, left behind, copied and damaged, and what people
see of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_stores import (
    CAP,
    HYBRID,
    PLAIN,
    SLOTS,
    Owner,
    add_segment,
    drop_power,
    fill_home,
    inspect_json,
    json_of,
    leave_home,
    run,
    run_here,
    run_json,
)
from mass_stores import Layer, key

from kvdisk import __version__
from kvdisk.blocks import Slot
from kvdisk.cli.indexes import read_homes
from kvdisk.cli.survey import survey_store
from kvdisk.device.home import Home
from kvdisk.device.store import Store
from kvdisk.geometry import segment_file_bytes
from kvdisk.index.base import BlockRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for

HOUR_S, DAY_S = 3600, 86400
SLOT_BYTES = PLAIN.geometry.groups[0].slot_bytes


def has(found: Any, expected: Any) -> None:
    """Fail where a part of the JSON is not as expected; what is not expected may be anything."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            has(found[name], value)
    elif isinstance(expected, list) and expected:
        assert len(found) == len(expected), (found, expected)
        for each, one in zip(found, expected, strict=True):
            has(each, one)
    else:
        assert found == expected


# -- what is there -----------------------------------------------------------------------------


def test_the_json_has_what_was_stored(path: Path) -> None:
    plain = leave_home(path, PLAIN, 3, last_use_s=2000)
    hybrid = leave_home(path, HYBRID, 2, last_use_s=9000, clean=False)
    found = run_json("inspect", path)
    length = {"length_bytes": segment_file_bytes(SLOT_BYTES, SLOTS)}
    segment = {"segment": 2, "drive": 0, "indexed": True, "slot_bytes": SLOT_BYTES, "slots": SLOTS, "used_slots": 5}
    segment |= {"used_bytes": 10 * SLOT_BYTES, "fill": 5 / SLOTS, "free_slots": 3, "free_runs": 1}
    segment |= {
        "longest_free_run_slots": 3,
        "fragmentation": 1.0,
        "files": [{"rank": 0} | length, {"rank": 1} | length],
    }
    home = {"id": plain, "owner": "stopped", "clean": True, "cap_bytes": CAP, "blocks": 15, "slots": 3 * SLOTS}
    home |= {"used_bytes": 30 * SLOT_BYTES, "last_use_s": 2000, "problems": [], "segments": [{}, {}, segment]}
    groups = [{"group": 0, "block_tokens": 16, "window_tokens": None, "blocks": 5}]
    groups += [{"group": 1, "block_tokens": 32, "window_tokens": 1024, "blocks": 5}]
    last_used = {
        "engine_stores": [hybrid],
        "fingerprint": "9b" * 32,
        "model": "/models/of/hybrid-1B",
        "kv_dtype": "fp8",
    }
    other = {"engine_stores": [plain], "tensor_parallel": 2, "ranks": 2, "hash_tokens": 16}
    other |= {"epochs": [{"epoch": 0, "blocks": 10}, {"epoch": 77, "blocks": 5}]}
    totals = {"namespaces": 2, "engine_stores": 2, "engine_stores_in_use": 0, "unreadable_engine_stores": 0}
    totals |= {"blocks": 25, "slots": 5 * SLOTS, "oldest_stored_s": 1900, "newest_stored_s": 8904}
    totals |= {
        "used_bytes": 35 * SLOT_BYTES + 5 * HYBRID.geometry.groups[1].slot_bytes,
        "cap_bytes": None,
        "fill": None,
    }
    totals |= {"allocated_bytes": sum(home["allocated_bytes"] for home in found["engine_stores"])}
    has(found, {"json_version": 5, "kvdisk_version": __version__, "problems": [], "store": {"created_s": 2000}})
    has(found, {"totals": totals, "namespaces": [last_used | {"groups": groups}, other]})
    has(found, {"engine_stores": [{"id": hybrid, "clean": False}, home]})
    assert found["reuse"]["blocks"] is None, "no engine has written USES"
    assert found["engine_stores"][1]["allocated_bytes"] > 3 * 2 * SLOTS * SLOT_BYTES


def test_shared_prefixes(path: Path) -> None:
    """abc is shared by de and by fg, which hi and j follow; xy is alone. The figures:
    ``test_prefixes``."""
    layer = Layer(path, PLAIN)
    for names, parent, first in (("abc", None, 0), ("de", "c", 3), ("fg", "c", 5), ("hi", "g", 7), ("j", "g", 20)):
        layer.put_chain(names, parent, first=first)
    layer.put_chain("xy", first=30)
    layer.write_uses(dict(zip("abcdefghijxy", (9, 9, 9, 1, 0, 5, 5, 3, 3, 0, 0, 0), strict=True)))
    layer.leave()
    prefixes = inspect_json(path)["namespaces"][0]["prefixes"]
    has(prefixes, {"total": 6, "shared": 4, "roots": 2, "chains": 4, "hidden_roots": 1, "hidden_blocks": 3})
    has(prefixes["tree"], [{"key": key("a")[:-2].hex(), "chains": 3, "first_uses": 9, "last_uses": 9}])
    assert abs(prefixes["tree"][0]["last_use_s"] - time.time() + 2 * HOUR_S) < 60
    shown = run_here("inspect", path, "--prefixes", "3").stdout
    table = [line.rstrip() for line in shown.splitlines() if any(key(name)[:4].hex() in line for name in "afhd")]
    assert [line[:12].split() for line in table] == [[lead + key(name)[:4].hex()] for lead, name in (
        ("", "a"), ("└─", "f"), ("└─", "h"),
    )]  # fmt: skip
    assert table[2].startswith("  └─") and "9" in table[0].split()
    assert "and 3 other pieces of 4 chains: 5 blocks in 80.0 KiB" in shown


def test_ages_and_reuse(path: Path) -> None:
    layer = Layer(path, PLAIN)
    for at, (name, age_s) in enumerate(zip("abcdef", (10, 300, 1800, 2 * HOUR_S, 8 * DAY_S, 90 * DAY_S), strict=True)):
        layer.put(name, None, at, age_s=age_s)
    layer.write_uses({"a": 0, "b": 1, "c": 2, "d": 4, "e": 70}, generation_of={"c": 99})
    layer.leave()
    found = inspect_json(path)
    # The slot of c held another block; nothing is known of f.
    ages = {"stored": [1, 1, 1, 1, 0, 0, 1, 1], "used": [0, 0, 0, 3, 0, 0, 0, 0], "never_used": 1, "unknown": 2}
    has(found["ages"], ages)
    has(found["reuse"], {"bounds": [0, 1, 2, 4, 8, 16, 32, 64], "blocks": [1, 1, 0, 1, 0, 0, 0, 0, 1], "unknown": 2})
    shown = run_here("inspect", path, "--ages").stdout
    assert "not known yet" in shown and "> 64" in shown
    assert "3 of 4 blocks (75 %)" in run_here("inspect", path).stdout


def test_free_runs_and_reads(path: Path) -> None:
    layer = Layer(path, HYBRID, slots=600)
    layer.put_chain("abcd")  # one read
    layer.put_chain("ef", "d", first=300)  # another
    layer.put("g", "f", 302, group=0)
    layer.put("h", "f", 310)
    layer.leave()
    segment, empty = inspect_json(path)["engine_stores"][0]["segments"]
    has(segment, {"free_slots": 592, "free_runs": 3, "longest_free_run_slots": 296})
    assert segment["fragmentation"] == pytest.approx(7 / 592), "2 MiB are 256 slots: the other runs are longer"
    assert segment["read_run_blocks"] == pytest.approx(8 / 3)
    assert (empty["fragmentation"], empty["read_run_blocks"]) == (0.0, None)


def test_drives(path: Path, tmp_path: Path) -> None:
    further = tmp_path / "further"
    home = Store.open([path, further]).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP)
    index = LmdbIndex(home.index_path, map_bytes=map_bytes_for(100))
    for segment, drive in ((0, 0), (1, 1), (2, 1)):
        add_segment(home, index, PLAIN, segment, SLOT_BYTES, 8, drive)
    index.put([BlockRecord(0, key(name), Slot(segment, 0), 1) for segment, name in enumerate("abc")])
    index.close()
    home.close(clean=True)
    first = {"path": str(path), "segments": 1, "slots": 8, "blocks": 1, "used_bytes": 2 * SLOT_BYTES}
    second = {"path": str(further), "segments": 2, "slots": 16, "blocks": 2, "used_bytes": 4 * SLOT_BYTES}
    has(json_of("inspect", path, further)["drives"], [first, second])
    has(inspect_json(path, code=1)["drives"], [{"path": str(path), "segments": 1}, {"path": None, "segments": 2}])
    assert "not named (" in run_here("inspect", path, "--stores").stdout
    assert "Verdict        incomplete: name all directories of the store" in run_here("inspect", path).stdout


# -- in use, and copied ------------------------------------------------------------------------


def files_below(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time of change and bytes of everything; LMDB's readers are known by their mark in
    lock.mdb."""
    items = {item: item.lstat() for item in path.rglob("*") if item.name != "lock.mdb"}
    return {
        str(item): (status.st_mode, status.st_mtime_ns, item.read_bytes() if item.is_file() else b"")
        for item, status in items.items()
    }


def test_a_store_in_use(path: Path, owner: Owner) -> None:
    leave_home(path, HYBRID, 1, last_use_s=2000)
    before = files_below(path)
    found = inspect_json(path)
    assert files_below(path) == before
    has(found["engine_stores"][0], {"id": owner.home_id, "owner": "alive", "clean": False, "blocks": 5})
    fill = (10 * SLOT_BYTES + 5 * HYBRID.geometry.groups[0].slot_bytes) / CAP
    has(found["totals"], {"cap_bytes": CAP, "fill": fill, "engine_stores_in_use": 1, "engine_stores": 2})
    assert f"<1 %: 120.0 KiB of {CAP >> 20}.0 MiB" in run_here("inspect", path).stdout
    assert owner.put_one() == "True 0", "the owner goes on"
    assert inspect_json(path)["engine_stores"][0]["blocks"] == 6
    owner.kill()
    has(inspect_json(path)["engine_stores"][0], {"owner": "stopped", "clean": False, "blocks": 6})


def test_a_copy_in_a_read_only_directory(path: Path, tmp_path: Path, owner: Owner) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    (copy / "homes" / owner.home_id / "index" / "lock.mdb").unlink()
    names = sorted(copy.rglob("*"))
    for item in (*names, copy):
        item.chmod(0o500 if item.is_dir() else 0o400)
    assert subprocess.run(["touch", copy / "homes" / "x"], check=False, preexec_fn=drop_power).returncode  # noqa: S607
    found = run_json("inspect", copy, obey_modes=True)
    for item in (copy, *names):
        item.chmod(0o700)
    assert sorted(copy.rglob("*")) == names, "no file is made in a copy"
    has(found["engine_stores"], [{"owner": "stopped", "blocks": 5}])


def test_a_home_that_is_taken_over_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_home(path, PLAIN, 1, last_use_s=2000)
    taken: list[Home] = []

    def after_the_takeover(*arguments: Any, **options: Any) -> Any:
        if not taken:
            taken.append(Store.open(path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP))
        return read_homes(*arguments, **options)

    monkeypatch.setattr("kvdisk.cli.survey.read_homes", after_the_takeover)
    facts = survey_store(path)
    taken[0].close(clean=True)
    assert [(home.id, home.alive, home.blocks) for home in facts.engine_stores] == [(taken[0].id, True, 5)]
    assert facts.problems == ()


# -- what is wrong -----------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "index cut short": (
        lambda home: os.truncate(home / "index/data.mdb", 2 * 4096),  # reading it kills the process
        "index cannot be read",
    ),
    "index missing": (lambda home: (home / "index/data.mdb").unlink(), "index is missing"),
    "file missing": (lambda home: (home / "segments/1/rank1.kv").unlink(), "segment 1 of rank 1 is missing"),
    "file overwritten": (lambda home: (home / "segments/1/rank1.kv").write_bytes(b"junk" * 9999), "no magic"),
    "HOME overwritten": (
        lambda home: [(home / name).write_bytes(b"junk") for name in ("HOME", "HOME.tmp")],
        "; kvdisk clear removes it",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_homes_problem(path: Path, case: str) -> None:
    bad = leave_home(path, PLAIN, 2, last_use_s=2000)
    good = leave_home(path, HYBRID, 2, last_use_s=1000)
    damage, expected = WRONG[case]
    damage(path / "homes" / bad)
    found = inspect_json(path, code=1)
    first, second = sorted(found["engine_stores"], key=lambda home: home["id"] == good)
    (problem,) = first["problems"]
    assert expected in problem and found["problems"] == [f"engine store {bad[:8]}: {problem}"]
    has(second, {"id": good, "index_readable": True, "blocks": 10, "problems": []})
    is_lost = case.startswith("index")
    has(first, {"id": bad, "index_readable": not is_lost, "blocks": None if is_lost else 10})
    has(first["segments"][0], {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "used_slots": None if is_lost else 5})
    has(found["totals"], {"blocks": 10 if is_lost else 20, "unreadable_engine_stores": int(is_lost)})
    shown = run_here("inspect", path)
    assert shown.exit_code == 1 and f"engine store {bad[:8]}: {problem}" in shown.stdout
    is_for_repair = not case.startswith("HOME")
    assert ("kvdisk repair" in problem) == is_for_repair
    assert f"damaged: {'run kvdisk repair' if is_for_repair else 'see the problems'}" in shown.stdout


def test_a_store_file_that_is_damaged_or_gone_is_a_problem_that_the_next_start_mends(path: Path) -> None:
    leave_home(path, HYBRID, 1, last_use_s=2000)
    whole = survey_store(path)
    for damage in (lambda: (path / "STORE").write_text("{"), (path / "STORE").unlink):
        damage()
        found = survey_store(path)
        (problem,) = found.problems
        assert "STORE is gone or damaged" in problem and not found.ok
        assert (found.store.store_id, found.totals) == (whole.store.store_id, whole.totals)
    Store.open(path)
    assert survey_store(path).ok


def test_an_engine_store_that_a_running_engine_has_left_is_a_problem_until_that_ends(path: Path) -> None:
    left = leave_home(path, HYBRID, 1, last_use_s=2000)
    assert survey_store(path).ok
    how = {"except_ids": {left}}
    owner = Store.open(path).acquire_home(HYBRID.fingerprint, HYBRID.description, CAP, **how)
    (problem,) = survey_store(path).problems
    assert problem.startswith(f"engine store {left[:8]}") and f"engine store {owner.id[:8]} could not" in problem
    owner.close(clean=True)
    assert survey_store(path).ok


def test_records_that_no_segment_has(path: Path) -> None:
    home = Store.open(path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP)
    index = fill_home(home, PLAIN, 1)
    index.put([BlockRecord(0, key("far"), Slot(0, SLOTS), 9), BlockRecord(0, key("lost"), Slot(4, 0), 9)])
    index.close()
    home.close(clean=True)
    (found,) = inspect_json(path, code=1)["engine_stores"]
    assert found["problems"] == ["2 blocks lie where its segments have no slots"]


# -- what people see ---------------------------------------------------------------------------


def test_what_is_printed_by_default_fits_a_terminal(path: Path) -> None:
    """20 lines of 80 columns, the verdict first, however much there is and whatever is wrong."""
    Store.open(path)
    assert "empty: cleared, or no engine has used it yet" in printed(path)[0]
    homes = [
        leave_home(path, PLAIN._replace(fingerprint=bytes([number]) * 32), 1, last_use_s=2000 + number)
        for number in range(9)
    ]
    for number in range(7):
        layer = Layer(path, HYBRID._replace(fingerprint=bytes([64 + number]) * 32))
        layer.put_chain("abc")
        for at, name in enumerate("defghijk"):
            layer.put_chain(name, "c", first=10 + at)
        layer.leave()
    lines = printed(path)
    assert len(lines) == 20 and lines[0].split() == ["Verdict", "healthy"]
    assert "stored more than a year ago to " in "\n".join(lines)
    assert "12 more (see --json)" in "\n".join(lines) and lines[-1].startswith("More: --stores")
    for home_id in homes[:8]:
        (path / "homes" / home_id / "index" / "data.mdb").unlink()
    lines = printed(path, code=1)
    assert len(lines) <= 20 and lines[0].split()[1:4] == ["damaged:", "run", "kvdisk"]
    assert "5 more; --all lists them" in "\n".join(lines)


def printed(path: Path, *options: object, code: int = 0) -> list[str]:
    done = run_here("inspect", path, *options)
    assert (done.exit_code, done.stderr) == (code, "")
    return done.stdout.splitlines()


def test_the_tables_fit_and_have_the_facts(path: Path, owner: Owner) -> None:
    crashed = leave_home(path, HYBRID, 19, last_use_s=int(time.time()) - 3 * DAY_S - 60, clean=False, used=8)
    lines = printed(path, "--stores", "--segments")
    assert max(map(len, lines)) <= 80
    said = "\n".join(" ".join(line.split()) for line in lines)
    for words in (
        "2: 1 in use, 1 of stopped engines",
        f"{owner.home_id[:8]} {'3f' * 4} alive 5 ",
        f"{crashed[:8]} {'9b' * 4} crashed 152 ",
        f" {CAP >> 20}.0 MiB ",
        " - 3 d ago",
        f"{crashed[:8]} 0 0 8 100 % - 1.0 1 x 68.0 KiB",
        "3 more (see --all)",
    ):
        assert words in said, words
    assert "9b9b9b9b …/of/hybrid-1B fp8 1 16/32 152" in " ".join(" ".join(printed(path)).split())
    assert "more (see --all)" not in run_here("inspect", path, "--all").stdout


def test_what_a_terminal_gets(path: Path) -> None:
    hostile = {"model": "\x1b[31mred\x07[bold]b[/]", "tensor_parallel": []}
    leave_home(path, PLAIN._replace(description=PLAIN.description | hostile), 1, last_use_s=2000)
    shown = run("inspect", path, COLUMNS="120").stdout
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[31mred\N{REPLACEMENT CHARACTER}[bold]b[/]" in shown, "a name from a file steers no terminal"
    assert "\x1b[" in run("inspect", path, FORCE_COLOR="1", TERM="xterm").stdout
    plain = run("inspect", path, PYTHONIOENCODING="ascii")
    assert plain.returncode == 0 and "red" in plain.stdout
