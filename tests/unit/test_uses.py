# SPDX-License-Identifier: Apache-2.0
"""How often blocks were used: counted by the manager, kept in USES, and gone on with at the next
start."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_stores import inspect_json
from rebuild_stores import home_path, make_store, start
from tier_bench import TierBench

from kvdisk.assembly import SchedulerHalf
from kvdisk.blocks import Tier
from kvdisk.device.control import USES_FILE
from kvdisk.device.uses import USES_RECORD, Uses, find_uses, read_uses, write_uses
from kvdisk.geometry import uses_bytes_for


@pytest.mark.parametrize("cpu_slots", [0, 8])
@pytest.mark.parametrize("cold", [False, True], ids=["in the GPU's cache", "in the tier"])
def test_each_request_that_finds_a_block_counts_once(cpu_slots, cold):
    bench = TierBench((cpu_slots,) if cpu_slots else (), (12,), nvme_admission="all")
    bench.serve("qqx")  # stores begin when the first segment is there
    for times, text in enumerate(("aabbx", "aabbx", "aabbx", "aaccx")):
        before_s = int(bench.engine.now)
        bench.serve(text, cold=cold)
        bench.step()
        generations = np.array([bench.catalog.generations[row] for row in bench.rows(text)], np.uint64)
        found, known = find_uses(bench.parts.nvme.uses.records(), generations)
        assert known.all() and found["uses"].tolist() == [times, times if text == "aabbx" else 0]
        assert times == 0 or before_s <= found["last_use_s"][0] <= bench.engine.now


def test_counts_are_those_of_the_copy_whatever_was_in_its_row_before():
    uses, rng, expected = Uses(), random.Random(3), {}
    for generation in range(1, 3000):
        row = rng.randrange(200)
        act = rng.choice(["begin", "end", "use", "use"])
        if act == "begin":
            uses.begin([row], [generation])
            expected[row] = (generation, 0)
        elif act == "end":
            uses.end([row])
            expected.pop(row, None)
        else:
            uses.reached([row])
            if row in expected:
                expected[row] = (expected[row][0], expected[row][1] + 1)
    assert {(each["generation"], each["uses"]) for each in uses.records()} == set(expected.values())
    assert max(count for _, count in expected.values()) > 2


def records(*rows: tuple[int, int, int]) -> Any:
    return np.array(list(rows), USES_RECORD)


def test_every_byte_is_where_it_is_said_to_be(tmp_path):
    write_uses(tmp_path, records((0x1122334455667788, 1, 0x4D)))
    path = tmp_path / USES_FILE
    data = path.read_bytes()
    header = "4b56445553455300" + "0200" + "1000" + "00000000" + "0100000000000000"
    assert data[:40].hex() == header + "8877665544332211" + "01000000" + "4d000000"
    assert (len(data), path.stat().st_mode & 0o777) == (48, 0o600) and len(data) <= uses_bytes_for(1)


@pytest.mark.parametrize("how", ["directory", "link", "gone", "version", "cut", "bit", "empty"])
def test_a_damaged_file_is_ignored_and_replaced(tmp_path, how):
    home, elsewhere, written = tmp_path / "home", tmp_path / "elsewhere", records((7, 3, 100), (5, 1, 90))
    home.mkdir()
    write_uses(home, written)
    assert read_uses(home).tolist() == written.tolist()
    path = home / USES_FILE
    data = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
        (path / "inside").write_text("")
    elif how == "link":
        elsewhere.write_bytes(data)
        path.symlink_to(elsewhere)
    elif how != "gone":
        changed = {"version": data[:8] + b"\1" + data[9:], "bit": data[:40] + bytes([data[40] ^ 1]) + data[41:]}
        path.write_bytes((changed | {"cut": data[:-16], "empty": b""})[how])
    assert read_uses(home) is None
    (home / (USES_FILE + ".tmp")).write_text("left by one that was killed")
    write_uses(home, written[:1])
    assert read_uses(home).tolist() == [(7, 3, 100)] and [item.name for item in home.iterdir()] == [USES_FILE]
    assert not elsewhere.exists() or elsewhere.read_bytes() == data, "no symlink is followed"


def test_a_full_drive_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_uses(tmp_path, records((7, 3, 100)))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        write_uses(tmp_path, records((7, 4, 200)))
    assert read_uses(tmp_path).tolist() == [(7, 3, 100)]
    assert [item.name for item in tmp_path.iterdir()] == [USES_FILE]


def counts(parts: SchedulerHalf) -> dict[int, tuple[int, int]]:
    return {
        each["generation"]: (each["uses"], each["last_use_s"]) for each in parts.nvme.uses.records() if each["uses"]
    }


def test_uses_survive_a_restart_and_a_rebuild_and_eviction_goes_on_with_them(tmp_path):
    path = tmp_path / "store"
    make_store(path)
    keys, expected = [], {}
    for used, now_s in (([0, 1, 0], 2_000_000_000), ([0], 2_000_000_060)):
        parts = start(path)
        catalog, uses = parts.manager._catalog, parts.nvme.uses
        keys = keys or [catalog.keys[row] for row in catalog.rows_in(Tier.NVME)[:2]]
        assert counts(parts) == expected
        rows = [catalog.find(keys[at]) for at in used]
        assert uses.now_s > 1_700_000_000, "a use in the first step has its time"
        uses.now_s = now_s
        uses.reached(rows)
        for row in rows:
            before = expected.get(catalog.generations[row], (0, 0))
            expected[catalog.generations[row]] = (before[0] + 1, now_s)
        parts.close()
    (home_path(path) / "index" / "data.mdb").unlink()  # rebuilt from the headers, which have the generations
    parts = start(path)
    assert counts(parts) == expected and not parts.nvme.uses.changes
    policies = [order._policy for order in parts.nvme._evictors]
    catalog = parts.manager._catalog
    orders = [sorted(filter(each.holds, catalog.rows()), key=each._last.__getitem__) for each in policies]
    assert [keys[1], keys[0]] in [[catalog.keys[row] for row in order[-2:]] for order in orders], "used last"
    parts.close()
    assert inspect_json(path)["reuse"]["blocks"] == [18, 1, 0, 1, 0, 0, 0, 0, 0]
