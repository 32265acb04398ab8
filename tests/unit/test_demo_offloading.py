# SPDX-License-Identifier: Apache-2.0
"""What the demo behind vLLM's own connector ends with; ``make demo-offloading`` runs it."""

from __future__ import annotations

from dataclasses import replace

import demo_offloading
from connectors import FLIPPED_EVERY_BYTES, flip_bits
from demo_offloading import Run
from engine_child import Answer
from rich.console import Console

CAP = 64 << 20
ALONE = Run("none", "computed", [Answer([1, 2], 0, 12.345)] * 6)
FOUND = [Answer([1, 2], 4000, 0.123), Answer([1, 2], 3900, 0.1)] * 3
RUNS = [ALONE] + [
    Run(tier, name, ALONE.answers if name == "cold" else FOUND, CAP)
    for tier in demo_offloading.TIERS
    for name in ("cold", "restarted", "bits flipped")
]


def test_it_passes_whatever_the_other_tier_does():
    wrong = replace(RUNS[3], answers=[Answer([3], 4000, 1.0)] * 6, drive_bytes=2 * CAP)
    assert demo_offloading.verdict([*RUNS[:3], wrong, *RUNS[4:]], CAP) == []


def test_it_says_what_kvdisk_did_wrong():
    restarted = replace(RUNS[5], answers=ALONE.answers)
    flipped = replace(RUNS[6], answers=[Answer([3], 4000, 1.0)] * 6, drive_bytes=2 * CAP)
    said = demo_offloading.verdict([*RUNS[:5], restarted, flipped], CAP)
    assert len(said) == 3
    assert "other tokens" in said[0] and "nothing was found" in said[1] and "over the cap" in said[2]


def test_its_table_fits_a_terminal():
    console = Console(width=demo_offloading.TABLE_WIDTH, record=True)
    console.print(demo_offloading.table_of(RUNS, CAP))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert shown.count("12,000") == 4 and shown.count("none") == 4, shown


def test_it_flips_a_bit_in_every_part_of_what_holds_kv_alone(tmp_path):
    for name in ("a.bin", "deep/b.kv", "data.mdb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(2 * FLIPPED_EVERY_BYTES))
    assert flip_bits(tmp_path) == 4
    assert sum((tmp_path / "a.bin").read_bytes()) == sum((tmp_path / "deep/b.kv").read_bytes()) == 2 * 0x40
    assert not any((tmp_path / "data.mdb").read_bytes())
