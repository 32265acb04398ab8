# SPDX-License-Identifier: Apache-2.0
"""``kvdisk top`` over homes that this process holds, with figures by hand; over live ones:
``tests/crash/test_live_sharing.py``."""

from __future__ import annotations

import json
import os
import select
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CAP, COMMAND, PLAIN, run_here
from rich.console import Console

from kvdisk.cli.frames import Frame, FrameReader, RemoteFigures, TierFigures
from kvdisk.cli.top import draw
from kvdisk.device.home import Home
from kvdisk.device.store import Store
from kvdisk.device.telemetry_file import FIGURES_FILE, write_telemetry
from kvdisk.stats import ROUTES

T0 = 1_800_000_000.0
MIB = 1 << 20


def figures(at_s: float, stored: int = 0, **changes: Any) -> dict[str, Any]:
    """Return what an engine would write that has moved ``stored`` blocks of 1 MiB, and had half of
    its tokens hit."""
    moved = {"count": stored, "sum": stored * MIB}
    return {
        "json_version": 1,
        "kvdisk_version": "0",
        "started_s": T0 - 100,
        "time_s": at_s,
        "pid": 4321,
        "host": "there",
        "model": "some/model-7B",
        "ranks": 2,
        "totals": {
            "lookup_tokens": 10 * stored,
            "hit_tokens": {"cpu": 2 * stored, "nvme": 3 * stored},
            "missed_tokens": {"cpu": 8 * stored, "nvme": 5 * stored},
            "evicted_blocks": {"cpu": stored},
            "saved_seconds": 2.5 * stored,
            "misses": {"never_seen": stored, "evicted_nvme": 3 * stored, "short": 0},
        },
        "histograms": {"transfer_bytes": {"gpu_to_cpu": moved, "cpu_to_nvme": moved}, "wait_seconds": moved},
        "gauges": {
            "used_bytes": {"cpu": 30 * MIB, "nvme": 50 * MIB},
            "capacity_bytes": {"cpu": 40 * MIB, "nvme": 200 * MIB},
            "queued_jobs": {"store": 3},
            "backlog_blocks": 17,
        },
        "drives": [{"path": "/nvme/one", "read_bytes": 0, "written_bytes": stored * MIB, "quarantined": False}],
    } | changes


class Engines:
    """Homes that this process owns, in a store of its own; closed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: list[Home] = []
        self.now = T0

    def start(self) -> Path:
        self.held.append(Store.open(self.path).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP))
        return self.held[-1].path

    def reader(self) -> FrameReader:
        return FrameReader([self.path], clock=lambda: self.now)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path / "store")
    yield made
    for home in made.held:
        home.close(clean=True)


def shown(frame: Frame, width: int = 120, note: str = "", height: int | None = None) -> str:
    console = Console(width=width, markup=False, highlight=False, emoji=False, color_system=None)
    with console.capture() as text:
        console.print(draw(frame, console.width, note, height))
    return text.get()


def test_rates_are_differences_of_two_figures(engines):
    home, reader = engines.start(), engines.reader()
    write_telemetry(home, figures(T0 - 0.5, 100))
    first = reader.read()
    assert (first.engines[0].seconds, first.engines[0].bytes_per_s) == (None, None)
    assert first.drives[0].written_bytes_per_s is None
    engines.now += 4
    # All that was asked for since is a hit in memory.
    then = figures(T0 + 3.5, 140)
    then["totals"]["hit_tokens"]["cpu"] += 8 * 40
    then["totals"]["missed_tokens"]["cpu"] -= 8 * 40
    write_telemetry(home, then)
    frame = reader.read()
    (engine,) = frame.engines
    assert engine.seconds == 4.0 and not engine.idle
    assert engine.bytes_per_s == {route: 10 * MIB * (route in ("gpu_to_cpu", "cpu_to_nvme")) for route in ROUTES}
    assert engine.tiers["cpu"] == TierFigures(30 * MIB, 40 * MIB, (280 + 320) / 1400, 1.0, 10.0)
    assert engine.tiers["nvme"].hit_rate_now == 3 / 8
    assert engine.waiting["jobs"]["store"] == 3 and engine.waiting["backlog_blocks"] == 17
    assert frame.totals.written_bytes_per_s == frame.drives[0].written_bytes_per_s == 10 * MIB
    assert frame.totals.hit_rate == (5 * 140 + 320) / 1400
    assert (frame.totals.saved_seconds, dict(frame.totals.misses)) == (350, {"evicted_nvme": 420, "never_seen": 140})
    assert "of 1,400 prompt tokens asked for, which saved ~5 min 50 s" in shown(frame)
    assert "Misses   560 requests: 420 evicted from NVMe, 140 never seen or forgotten" in shown(frame)
    # The same figures, a moment later: the rates stay what they were. After a while it is idle.
    engines.now += 1
    assert reader.read().engines[0].tiers["cpu"].evicted_blocks_per_s == 10
    engines.now += 85
    frame = reader.read()
    (engine,) = frame.engines
    assert engine.idle and set(engine.bytes_per_s.values()) == {0.0} and engine.tiers["nvme"].hit_rate_now is None
    assert "idle for 1 min 26 s" in shown(frame)
    engines.now -= 2 * 86_400
    assert reader.read().engines[0].idle, "these figures are of a clock that was ahead"


def test_an_engine_that_was_reset_says_when(engines):
    home, reader = engines.start(), engines.reader()
    write_telemetry(home, figures(T0 - 0.5, 100))
    frame = reader.read()
    assert frame.engines[0].reset_s is None and ", reset " not in shown(frame), "an older kvdisk does not say"
    write_telemetry(home, figures(T0, 100, epoch=77, reset_s=T0 - 240))
    frame = reader.read()
    assert frame.engines[0].reset_s == T0 - 240 and ", reset 4 min ago" in shown(frame)


def test_a_remote_store_has_a_line_and_says_whether_it_answers(engines):
    home, reader = engines.start(), engines.reader()
    write_telemetry(home, figures(T0 - 0.5, 100))
    assert reader.read().engines[0].remote is None and "remote " not in shown(reader.read())
    totals = {"hit_tokens": {"remote": 30}, "missed_tokens": {"remote": 90}, "sent_blocks": 12345, "remote_rejects": 2}
    moved = {"transfer_bytes": {"cpu_to_remote": {"count": 1, "sum": 900 * MIB}}}
    for at_s, paused in ((T0 + 1, 0), (T0 + 2, 1)):
        gauges = figures(T0)["gauges"] | {"remote_paused": paused}
        write_telemetry(home, figures(at_s, totals=totals, histograms=moved, gauges=gauges))
        engines.now += 1
        frame = reader.read()
        (engine,) = frame.engines
        assert engine.remote == RemoteFigures(0.25, 1 / 4 if not paused else None, 12345, 2, bool(paused))
        text = shown(frame, width=80)
        assert "(25 % in all)" in text and "sent 12,345, now" in text and "2 bad in the remote store" in text
        assert ("does not answer" in text) is bool(paused)
        assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 80
        assert text.count("remote hits") == 1


def test_engines_come_and_go_and_one_that_starts_anew_has_no_rates_from_before(engines):
    first, reader = engines.start(), engines.reader()
    write_telemetry(first, figures(T0, 100, pid=1))
    assert [engine.pid for engine in reader.read().engines] == [1]
    second = engines.start()
    write_telemetry(second, figures(T0, 7, pid=2, started_s=T0 - 50))
    assert [engine.pid for engine in reader.read().engines] == [1, 2]
    engines.now += 1
    write_telemetry(first, figures(T0 + 1, 3, pid=3, started_s=T0 + 0.5))
    drives = [
        {"path": f"/nvme/{name}", "read_bytes": 5, "written_bytes": 8 * MIB, "quarantined": name == "one"}
        for name in ("one", "two")
    ]
    write_telemetry(second, figures(T0 + 1, 8, pid=2, started_s=T0 - 50, drives=drives))
    frame = reader.read()
    found = {engine.pid: engine for engine in frame.engines}
    assert found[3].seconds is None, "a new engine has begun to count"
    assert found[2].tiers["nvme"].hit_rate_now == 3 / 8
    one, two = frame.drives
    assert (one.path, one.engines, one.quarantined, two.engines) == ("/nvme/one", 2, 1, 1)
    assert (one.written_bytes, one.written_bytes_per_s) == ((3 + 8) * MIB, MIB), "of those whose rates are known"
    assert "not used by 1 of 2" in shown(frame)
    engines.held[1].close(clean=True)
    frame = reader.read()
    assert [engine.pid for engine in frame.engines] == [3]
    assert [one.engine_store for one in frame.stopped] == [second.name]
    assert second.name[:8] in shown(frame)


def test_a_data_parallel_rank_is_shown_by_its_number(engines):
    write_telemetry(engines.start(), figures(T0))
    write_telemetry(engines.start(), figures(T0, data_parallel_rank=1))
    frame = engines.reader().read()
    assert sorted(str(one.data_parallel_rank) for one in frame.engines) == ["1", "None"]
    assert shown(frame).count("DP 1") == 1 and shown(frame).count("DP") == 1


def test_damaged_figures_hide_nobody_else_and_failures_are_named(engines):
    good, bad, silent = (engines.start() for _ in range(3))
    totals = {"failed_loads": 3, "io_errors": {"read": 2}, "verification_failures": {"header": 0}}
    totals |= {"foreign_failures": 185, "write_pauses": 1, "late_moves": 4}
    write_telemetry(good, figures(T0, totals=totals))
    (bad / FIGURES_FILE).write_text('{"json_version": 1, "totals": ')
    reader = engines.reader()
    frame = reader.read()
    found = {engine.engine_store: engine for engine in frame.engines}
    assert (found[good.name].pid, found[good.name].problem) == (4321, None)
    failures = {"failed_loads": 3, "io_errors.read": 2, "late_moves": 4, "write_pauses": 1}
    assert (found[good.name].failures, found[good.name].harmless) == (failures, {"foreign_failures": 185})
    assert found[bad.name].problem and found[bad.name].tiers == {} and found[bad.name].bytes_per_s is None
    assert (found[silent.name].problem, found[silent.name].pid) == (None, None)
    assert len(frame.problems) == 1 and bad.name[:8] in frame.problems[0]
    text = shown(frame)
    for words in (
        *("cannot be read", "has written no figures yet", "no fault: 185 gone from other engines"),
        "3 failed loads, 2 read errors, 4 late moves, 1 pauses of writes",
    ):
        assert words in text
    write_telemetry(bad, figures(T0))
    assert not reader.read().problems, "and it is well again"


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_frame_fits_its_terminal_and_steers_nothing(engines, width):
    for at in range(3):
        write_telemetry(engines.start(), figures(T0 - at * 10, 5, model="evil\x1b[2Jname\n/a/b/c/d", host="\x07"))
    orphan = engines.start()
    engines.held[-1].close(clean=True)
    reader = engines.reader()
    reader.read()
    text = shown(reader.read(), width, note="something \x1b[31m is wrong")
    assert not {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert max(map(len, text.splitlines())) <= width
    assert text.count("CPU") >= 3 and "4321" in text and orphan.name[:8] in text
    assert text.count("(20 % in all)") == text.count("(38 % in all)") == 3, "hit rates are never cut"
    if width >= 80:
        assert text.count(" of 40.0 MiB") == text.count(" of 200.0 MiB") == 3


@pytest.mark.parametrize(("count", "boxes", "more"), [(1, True, 0), (2, True, 0), (3, False, 0), (20, False, 9)])
def test_a_terminal_of_80_by_24_has_the_drives_and_what_fits_of_the_engines(engines, count, boxes, more):
    """Boxes, else a row each, else those with failures first and how many more there are."""
    drives = [
        {"path": f"/nvme{at}", "read_bytes": 0, "written_bytes": MIB, "quarantined": False}
        for at in range(1 + (more > 0))
    ]
    homes = [engines.start() for _ in range(count)]
    for at, home in enumerate(homes):
        failed = {"failed_loads": 3} if at == count - 1 and count > 2 else {}
        totals = figures(T0)["totals"] | failed
        write_telemetry(home, figures(T0 - 1, 0, totals=totals, drives=drives, started_s=T0 - 100 + at))
    reader = engines.reader()
    reader.read()
    text = shown(reader.read(), 80, height=24)
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert text.index("/nvme0") < text.index(homes[0].name[:8] if not more else homes[-1].name[:8]), "drives come first"
    assert (text.count("╭─") == count) is boxes
    named = [home.name[:8] for home in homes if home.name[:8] in text]
    assert len(named) == count - more
    assert (f"+{more} engines" in text) is bool(more)
    assert ("3 failed loads" in text) is (count > 2), "of the last one, too"
    assert shown(reader.read(), 80).count("╭─") == count, "what scrolls is not cut"


def test_one_miss_is_no_hundred_per_cent(engines):
    totals = {"lookup_tokens": 96, "misses": {"short": 1}}
    write_telemetry(engines.start(), figures(T0, totals=totals))
    text = shown(engines.reader().read(), 80)
    assert "Misses   1 request: 1 too short to load" in text and "0 % of 96 prompt tokens" in text


def test_a_store_that_nobody_uses(tmp_path):
    """What it refuses: ``test_cli_refusals``."""
    store = tmp_path / "store"
    Store.open(store)
    done = run_here("top", store)
    assert done.exit_code == 0 and "none is using this store now" in done.stdout
    assert json.loads(run_here("top", store, "--json").stdout)["engines"] == []
    assert run_here("top", store, "--interval", "0").exit_code == 2


def test_on_a_terminal_it_goes_on_until_ctrl_c_and_leaves_the_screen_as_it_was(engines, monkeypatch):
    home, store = engines.start(), engines.path / "lock"
    write_telemetry(home, figures(time.time(), 5))

    def between_looks() -> Iterator[None]:
        yield store.rename(engines.path / "elsewhere")
        (engines.path / "elsewhere").rename(store)
        yield write_telemetry(home, figures(time.time(), 50, pid=98765))
        raise KeyboardInterrupt

    looks = between_looks()
    monkeypatch.setattr("kvdisk.cli.top.time.sleep", lambda _: next(looks))
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "110", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    done = run_here("top", engines.path)
    assert done.exit_code == 0, done.output
    steps = ["\x1b[?1049h", "4321", "The store cannot be read", "98765", "\x1b[?1049l"]
    places = [done.stdout.index(step) for step in steps]
    assert places == sorted(places), "an alternate screen, and what there was to see on it"


def test_q_ends_it_on_a_terminal_and_gives_the_terminal_back(engines):
    write_telemetry(engines.start(), figures(time.time(), 5))
    master, slave = os.openpty()
    before = termios.tcgetattr(slave)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [str(COMMAND), "top", str(engines.path), "--interval", "600"]
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    seen = b""
    while b"4321" not in seen:
        seen += os.read(master, 4096)
    os.write(master, b"xQ")
    while child.poll() is None:
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 4096)
    assert child.returncode == 0 and termios.tcgetattr(slave) == before
    os.close(slave)
    os.close(master)
