# SPDX-License-Identifier: Apache-2.0
"""A week against the real index (``tools/run_week.py``), small; in torture some minutes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from run_week import Week, WeekSettings, run_week
from week_engine import Engine
from week_sizes import BOUNDED, Series, sizes_of

from kvdisk.manager import bounds, chances
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.demotions import Demotions

TINY = WeekSettings(1000, block_tokens=2048, nvme_blocks=400, cpu_blocks=80, sample_hours=8, traces=False)
TORTURE = (
    WeekSettings(50_000, block_tokens=2048, nvme_blocks=20_000, cpu_blocks=3000),
    WeekSettings(15_000, nvme_blocks=20_000, cpu_blocks=3000, lives=True, seed=2),
)
"""One manager for six days, and 43 managers one after the other."""
OFTEN = ("ended", "failed jobs", "hit blocks", "index killed", "late jobs")
RARELY = ("aborted", "failed loads", "lost blocks")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What few requests would not fill on the first day is full sooner; of faults nothing is
    logged."""
    caplog.set_level(logging.CRITICAL, "kvdisk")
    monkeypatch.setattr(bounds, "COUNTS", 8)
    monkeypatch.setattr(chances, "_LEARNT_EVERY", (64, 128))


def leak_into(leaked: list[object]) -> Callable[[Engine], None]:
    """Return what lets a manager's list grow by one each request."""

    def leak(engine: Engine) -> None:
        found: Demotions = engine.manager._demotions[0]
        found._leaked = leaked  # type: ignore[attr-defined]
        leaked.append(None)

    return leak


def happened(week: Week, names: tuple[str, ...]) -> dict[str, int]:
    return {name: (week.counts + week.faults)[name] for name in names}


@pytest.mark.usefixtures("early")
def test_nothing_grows_in_a_week_and_a_list_that_does_is_named(tmp_path: Path) -> None:
    week, wrong = run_week(TINY, tmp_path, on_request=leak_into([]))
    assert [text.partition(" has grown")[0] for text in wrong] == ["demotions.Demotions._leaked"]
    assert week.counts["ended"] + week.counts["aborted"] == week.counts["requests"] > 900
    assert week.counts["resets"] == 5 and week.counts["killed"] == 4 and week.counts["blocks verified"] > 100
    assert all(happened(week, OFTEN).values()), happened(week, OFTEN)


def test_what_is_in_a_new_structure_of_a_new_class_is_counted() -> None:
    class Inner:
        __slots__ = ("_rows",)

        def __init__(self) -> None:
            self._rows = [[1, 2], [3], []]

    class Outer:
        def __init__(self) -> None:
            self.parts = {"a": Inner(), "b": Inner()}

    for kind in (Inner, Outer):
        kind.__module__ = "kvdisk.new"
    assert sizes_of(Outer()) == {"new.Outer.parts": 2, "new.Inner._rows": 6, "new.Inner._rows[]": 6}


def test_spare_room_of_a_table_may_grow_but_not_the_table() -> None:
    of_table = {name: Series(f"catalog.Catalog.{name}", 1000, 2000, 2000) for name in ("_vacant", "generations")}
    assert [name for name, series in of_table.items() if series.has_grown] == ["generations"]
    catalog = Catalog()
    assert {f"catalog.Catalog.{name}" for name in of_table} <= sizes_of(catalog).keys()


def test_a_list_may_take_long_to_be_full_and_may_not_grow_beyond_that():
    name, full = "chances.Chances._old[]", BOUNDED["chances.Chances._old[]"]
    assert not Series(name, full / 8, full, full).has_grown
    assert Series(name, full, 2 * full, 2 * full).has_grown
    learnt = chances.Chances()
    for now in range(1, 400):
        learnt.learn(now * 1000, now, 50_000, 100.0, 1.0)
    assert {each: size for each, size in sizes_of(learnt).items() if each in BOUNDED and size > BOUNDED[each]} == {}
    assert all(sizes_of(learnt)[each] > BOUNDED[each] // 3 for each in BOUNDED)


@pytest.mark.torture
@pytest.mark.parametrize("settings", TORTURE, ids=["one life", "lives"])
def test_nothing_grows_in_a_week_of_more_requests(tmp_path: Path, settings: WeekSettings) -> None:
    week, wrong = run_week(settings, tmp_path)
    assert not wrong
    assert all(happened(week, OFTEN + RARELY).values()), happened(week, OFTEN + RARELY)
