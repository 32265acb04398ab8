# SPDX-License-Identifier: Apache-2.0
"""What the demo beside other engines ends with; ``tests/hicache`` runs it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import demo_engines
import pytest
from demo_engines import LMCACHE, SGLANG, TABLE, DemoError, Runner
from figures import Record
from rich.console import Console

GOOD = {"pages stored": 8, "found after kill -9": 8, "of these wrong": 0, "most on the drive": 63, "its cap": 64}


def table_with(engine=LMCACHE, **changed):
    record = Record()
    for each in (SGLANG, LMCACHE):
        values = GOOD | ({name.replace("_", " "): value for name, value in changed.items()} if each is engine else {})
        for row, value in values.items():
            record.add(TABLE, row, each.column("kvdisk"), [value])
    return record.tables[TABLE]


def test_it_says_what_is_wrong_with_kvdisk():
    assert demo_engines.verdict(table_with()) == []
    assert demo_engines.verdict(table_with(of_these_wrong=1)) == [
        "LMCache, kvdisk: 1 wrong pages after a bit was flipped."
    ]
    assert demo_engines.verdict(table_with(most_on_the_drive=65)) == [
        "LMCache, kvdisk: 65 MiB on the drive, over its cap."
    ]
    lost = table_with()
    lost["found after kill -9"][SGLANG.column("kvdisk")] = lost["of these wrong"][SGLANG.column("kvdisk")]
    assert demo_engines.verdict(lost) == ["SGLang, kvdisk: found 0 pages of 8."]


def test_the_table_has_a_row_for_each_figure_and_fits():
    text = io.StringIO()
    Console(file=text, width=demo_engines.WIDTH).print(demo_engines.shown_table(table_with()))
    lines = text.getvalue().splitlines()
    assert all(any(line.strip().startswith(row) for line in lines) for row in GOOD)
    assert all("\N{HORIZONTAL ELLIPSIS}" not in line for line in lines)


def test_one_bit_of_one_page_is_flipped(tmp_path):
    pages = [bytes([at]) * 4096 for at in range(1, 4)]
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "segment").write_bytes(b"".join(pages))
    (tmp_path / "empty").touch()
    demo_engines.flip_a_bit(tmp_path, pages[1][:32])
    found = (tmp_path / "inner" / "segment").read_bytes()
    assert [at for at, (old, new) in enumerate(zip(b"".join(pages), found, strict=True)) if old != new] == [4096 + 100]
    assert (found[4096 + 100] ^ 2).bit_count() == 1
    with pytest.raises(DemoError, match="in 0 files"):
        demo_engines.flip_a_bit(tmp_path, b"nowhere".ljust(32))


def test_without_the_packages_it_names_the_command(tmp_path):
    runner = Runner(Path(sys.executable), tmp_path)
    with pytest.raises(DemoError, match="make demo-engines"):
        runner.act(SGLANG, "kvdisk", "store", 8)
