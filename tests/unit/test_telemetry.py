# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of itself, and when: on the scheduler's thread, in the file of its home, in
the log."""

from __future__ import annotations

import json
import logging
import os
import stat
import time

import pytest
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier
from kvdisk.device.telemetry_file import FIGURES_FILE, read_telemetry, write_telemetry
from kvdisk.errors import CorruptRecord
from kvdisk.manager.requests import RequestOutcome
from kvdisk.stats import Miss, Stats
from kvdisk.telemetry import Telemetry, log_request

SLOT = GEOMETRY.slot_sizes[0]


class Told(TierBench):
    """An engine with both tiers, and all that it has told."""

    def __init__(self) -> None:
        super().__init__((4,), (8,), nvme_admission="all", prefetch=False)
        self.files: list[dict] = []
        self.telemetry = Telemetry(
            self.stats,
            self.manager.gauges,
            model="some/model",
            ranks=1,
            drives=["/one"],
            write_file=self.files.append,
        )
        self.finish()  # until the home and its first segment are open
        self.telemetry.take(self.now)


def test_under_way_it_tells_once_a_second_and_at_the_end_at_once():
    told = Told()
    told.telemetry.write()
    for _ in range(3):
        told.step()
        assert told.telemetry.take(told.now + 100) is None, "an engine that does nothing tells nothing"
        told.telemetry.write()
    assert len(told.files) == 1 and not told.telemetry.is_due
    told.add("aabbx")
    told.step(work=False)
    at = told.now + 10
    first = told.telemetry.take(at)
    assert first is not None and first.gauges["queued_jobs.store"] == 1 and first["missed_tokens.cpu"] == 4
    told.add("ccx")
    told.step(work=False)
    assert told.telemetry.take(at + 0.9) is None
    second = told.telemetry.take(at + 1.1)
    assert second is not None and second.gauges["queued_jobs.store"] == 2 and second["lookup_tokens"] == 2
    told.finish()
    assert told.telemetry.is_due
    last = told.telemetry.take(at + 1.11)
    assert last is not None and not told.telemetry.is_due
    assert (last["stored_blocks"], last["demoted_blocks"]) == (3, 2), "half of the CPU slots may wait for NVMe"
    assert last.samples["job_seconds.store"].count == 2
    assert last.gauges["queued_jobs.store"] == last.gauges["uncommitted_changes"] == 0
    assert last.gauges["used_bytes.nvme"] == 2 * SLOT
    assert told.telemetry.take(at + 50) is None


def test_gauges_of_what_waits_for_the_drive():
    bench = TierBench((8,), (16,), nvme_admission="all")
    names = ("backlog_blocks", "awaiting_commit_blocks", "uncommitted_changes", "fragmentation_ratio")

    def read() -> list[float]:
        return [bench.manager.gauges.read()[name] for name in names]

    bench.finish()
    bench.add("aabbccx")
    bench.step()
    assert read() == [3, 0, 0, 0]
    bench.finish()
    bench.parts.nvme.end(bench.catalog.rows_in(Tier.NVME)[:1])
    assert read() == [0, 1, 1, 0] and bench.manager.gauges.busy
    bench.idle()
    assert read() == [0, 0, 0, 1 / 14], "one free slot lies before the others"


def test_all_that_was_told_adds_up_to_the_totals():
    told, total = Told(), Stats()
    before = dict(told.stats.counts)
    for at in range(30):
        if at % 3 == 0:
            told.add(("aabbx", "ccx", "ddeex")[at % 9 // 3])
        told.step(work=at % 4 > 0)
        total.merge(told.telemetry.take(told.now + at * 0.4) or Stats())
    told.finish()
    total.merge(told.telemetry.take_rest())
    assert {name: before.get(name, 0) + total[name] for name in told.stats.counts} == told.stats.counts
    jobs = total.samples["job_seconds.store"]
    assert len(jobs.values) == jobs.count == told.stats.samples["job_seconds.store"].count > 0
    assert jobs.total == pytest.approx(sum(jobs.values))
    assert not told.stats.samples["job_seconds.store"].values, "each sample is told once"


def test_the_file_says_what_was_counted_and_how_it_is(tmp_path):
    told = Told()
    told.add("aabbx")
    told.finish()
    told.stats.add("drive_written_bytes.0", 8192)
    told.telemetry.take(told.now)
    told.telemetry.write()
    told.telemetry.write()
    assert len(told.files) == 1
    write_telemetry(tmp_path, told.files[-1])
    found = read_telemetry(tmp_path)
    assert found is not None
    assert (found.pid, found.host, found.model, found.ranks) == (os.getpid(), os.uname().nodename, "some/model", 1)
    assert abs(found.time_s - time.time()) < 600 and found.started_s <= found.time_s
    assert found.totals == {name: n for name, n in told.stats.counts.items() if not name.startswith("drive_")}
    assert found.sums["job_seconds.store"][0] == 1
    assert found.gauges["used_bytes.nvme"] == 2 * SLOT
    assert found.drives == (("/one", 0, 8192, False),)
    assert stat.S_IMODE((tmp_path / FIGURES_FILE).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [FIGURES_FILE]


DAMAGES = {
    "half": lambda text: text[:100],
    "another version": lambda text: text.replace('"json_version": 1', '"json_version": 2'),
    "no number": lambda text: text.replace('"pid": ', '"pid": NaN, "was": '),
    "a histogram without a sum": lambda text: text.replace('"histograms": {', '"histograms": {"x": {"count": 1}, '),
    "a deep one": lambda _: "[" * 100_000,
    "no end of ranks": lambda text: text.replace('"ranks": 1', '"ranks": 1e999'),
    "a time that is no number": lambda text: text.replace('"time_s": ', '"time_s": NaN, "was": '),
    "a text for a number": lambda text: text.replace('"read_bytes": 0', '"read_bytes": "1"'),
    "a list for a text": lambda text: text.replace('"path": "/one"', '"path": [1]'),
    "far too much": lambda text: text.replace('"gauges": {', f'"gauges": {{"x": {"9" * 4000}, '),
    "less than nothing": lambda text: text.replace('"gauges": {', '"gauges": {"x": -1, '),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_damaged_and_no_wrong_number(tmp_path, how):
    assert read_telemetry(tmp_path) is None
    told = Told()
    told.telemetry.write()
    text = json.dumps(told.files[-1])
    assert DAMAGES[how](text) != text
    (tmp_path / FIGURES_FILE).write_text(DAMAGES[how](text))
    with pytest.raises(CorruptRecord):
        read_telemetry(tmp_path)


def test_a_line_says_what_has_happened_since_the_last_one(caplog):
    told = Told()
    with caplog.at_level(logging.INFO, logger="kvdisk"):
        told.telemetry.log()
        caplog.clear()
        told.telemetry.log()
        assert not caplog.records, "nothing has happened"
        for _ in range(2):
            told.add("aabbx")
            told.finish()
            told.engine.pool.forget_all()
        told.stats.observe("transfer_bytes.cpu_to_nvme", 3e6)
        told.stats.add("io_errors.write", 2)
        told.stats.add("saved_seconds", 7)
        told.telemetry.take(told.now)
        told.telemetry.log()
        told.telemetry.log()
    (record,) = caplog.records
    for words in ("CPU hits 50.0 % (4 tokens)", "saved ~7 s", "to NVMe 3.0 MB/s", "NVMe fill 25 %", "write errors 2"):
        assert words in record.getMessage()


def test_the_last_line_says_what_there_was_since_the_start_once(caplog):
    told = Told()
    told.add("aabbx")
    told.finish()
    told.telemetry.take(told.now)
    told.telemetry.log()
    told.stats.add("io_errors.read", 3)  # after the last look
    with caplog.at_level(logging.INFO, logger="kvdisk"):
        caplog.clear()
        for _ in range(2):
            told.telemetry.log_end()
    (record,) = caplog.records
    assert record.getMessage().startswith("kvdisk ends after ")
    for words in ("CPU hits 0.0 % (0 tokens)", "NVMe fill", "read errors 3"):
        assert words in record.getMessage()


def test_a_line_of_a_request_is_one_line_whatever_its_name(caplog):
    hits = {Tier.CPU: 0, Tier.NVME: 2048}
    told = [
        RequestOutcome("a\nb", 2828, 2900, 512, hits, Miss.EVICTED_NVME, 18_800.0, 0.041, 3.94),
        RequestOutcome("one", 2828, 2828, 780, hits, load_s=300.0, saved_s=59.6),
    ]
    with caplog.at_level(logging.INFO, logger="kvdisk"):
        for outcome in told:
            log_request(logging.DEBUG, outcome)
            log_request(logging.INFO, outcome)
    assert [record.getMessage() for record in caplog.records] == [
        "req a\ufffdb: 2,900 tokens of prompt and answer = 512 GPU + 0 CPU + 2,048 NVMe + 340 computed; "
        "load 41 ms, saved ~3.9 s, missing: evicted from NVMe (asked for ~5.2 h ago)",
        "req one: 2,828 prompt tokens = 780 GPU + 0 CPU + 2,048 NVMe + 0 computed; load 5.0 min, saved ~60 s",
    ]
