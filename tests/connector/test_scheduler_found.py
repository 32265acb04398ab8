# SPDX-License-Identifier: Apache-2.0
"""What the log and the metrics say of each request: how its prompt divides, what that saved, and
why it was not more."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, SLOT_BYTES, TOKENS, prompt_of
from typer.testing import CliRunner

from kvdisk.blocks import Tier
from kvdisk.cli.main import app
from kvdisk.messages import JobKind
from kvdisk.stats import Miss

HIT = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
MANY = 8
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog) -> Lines:
    """What the log says of requests, line by line, since the last look."""
    caplog.set_level(logging.INFO, "kvdisk")

    def read() -> list[str]:
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("req ")]
        caplog.clear()
        return said

    return read


def misses(bench) -> dict[str, int]:
    """Return the reasons of misses so far, by label."""
    counted = bench.counters().items()
    return {series.removeprefix("misses."): count for series, count in counted if series.startswith("misses.")}


def test_each_request_has_one_line_which_adds_up(engines, lines, caplog):
    bench = engines.make(nvme=True, extra={"log_requests": True})
    bench.serve("cold", PROMPT)
    found = f"req cold: {TOKENS} prompt tokens = 0 GPU + 0 CPU + 0 NVMe + {TOKENS} computed"
    assert lines() == [f"{found}; missing: never seen or forgotten"]
    bench.serve("warm", PROMPT)
    assert lines() == [f"req warm: {TOKENS} prompt tokens = {HIT} GPU + 0 CPU + 0 NVMe + {TOKENS - HIT} computed"]
    bench.forget()
    bench.serve("from memory", PROMPT)
    (line,) = lines()
    assert f"= 0 GPU + {HIT} CPU + 0 NVMe + {TOKENS - HIT} computed; " in line
    assert re.search(r"; load \d+(\.\d)? m?s$", line), "no step has said how fast the engine computes"
    bench.forget(Tier.CPU)
    bench.manager._threshold.rate = 10.0
    before = bench.counters().get("saved_seconds", 0)
    bench.serve("from NVMe", PROMPT)
    (line,) = lines()
    assert f"= 0 GPU + 0 CPU + {HIT} NVMe + {TOKENS - HIT} computed; load " in line
    said = re.search(r"saved ~([\d.]+) s$", line)
    assert said and HIT / 10 - 2 < float(said[1]) <= HIT / 10 + 1
    assert HIT // 10 - 2 <= bench.counters()["saved_seconds"] - before <= HIT // 10
    ratios = bench.manager.stats.samples["hit_ratio"]
    assert (ratios.count, ratios.total) == (3, 2.0), "the second asked the tiers for nothing"
    engines.end()
    (said,) = [message for message in caplog.messages if message.startswith("kvdisk ends after ")]
    assert f"({HIT} tokens), NVMe hits" in said and "saved ~1" in said


def test_without_the_setting_the_lines_are_for_whoever_debugs(engines, lines, caplog):
    bench = engines.make()
    bench.serve("quiet", PROMPT)
    assert not lines()
    caplog.set_level(logging.DEBUG, "kvdisk")
    bench.forget()
    bench.serve("told", PROMPT)
    (line,) = lines()
    assert f" {HIT} CPU " in line and "saved" not in line, "nothing was measured, nothing is saved"


def test_what_a_failed_load_did_not_bring_is_computed(engines, lines):
    bench = engines.make(nvme=True, extra={"log_requests": True}).warm(1)
    lines()
    bench.fail = {JobKind.LOAD: (2,)}
    bench.serve("r", PROMPT)
    first = lines()[0]
    assert f"+ {2 * BLOCK_TOKENS} NVMe + {TOKENS - 2 * BLOCK_TOKENS} computed" in first
    assert first.endswith("missing: load failed")
    assert misses(bench)["load_failed"] == 1


REASONS: list[tuple[Miss, dict[str, object], int, list[int]]] = [
    (Miss.EVICTED_CPU, {"cpu_bytes": MANY * SLOT_BYTES, "eviction": "lru"}, 4, PROMPT),
    (Miss.REFUSED, {"cpu_admission": "reuse(3)"}, 1, PROMPT),
    (Miss.SHORT, {"min_load_tokens": HIT + 1}, 1, PROMPT),
    (Miss.SHORT, {}, 0, PROMPT[: BLOCK_TOKENS - 1]),
    (Miss.WRITING, {"lookup_wait_s": 0}, 1, PROMPT),
    (Miss.NOT_STORED, {}, 1, PROMPT),
    (Miss.NEVER_SEEN, {}, 0, PROMPT),
]
"""With which settings, how many prompts served before, and which one that misses."""


@pytest.mark.parametrize(
    ("reason", "extra", "served", "prompt"),
    REASONS,
    ids=[f"{reason}{' prompt' * (len(prompt) < HIT)}" for reason, *_, prompt in REASONS],
)
def test_each_miss_has_its_reason(engines, lines, caplog, reason, extra, served, prompt):
    bench = engines.make(extra=extra)
    bench.hold = {JobKind.STORE} if reason is Miss.WRITING else set()
    for number in range(1, served + 1):
        bench.add(f"r{number}", prompt_of(number), max_tokens=1)
        bench.run_until_finished(f"r{number}")
    if reason is not Miss.WRITING:
        bench.run()
    bench.forget(*[Tier.CPU] * (reason is Miss.NOT_STORED))
    before = misses(bench).get(reason, 0)
    caplog.set_level(logging.DEBUG, "kvdisk")
    lines()
    bench.add("missing", prompt, max_tokens=1)
    bench.run_until_finished("missing")
    assert misses(bench)[reason] == before + 1, misses(bench)
    (line,) = lines()
    assert f"; missing: {reason.words}" in line
    bench.release()


def test_a_user_who_forbids_loads_has_no_misses(engines, lines):
    bench = engines.make(extra={"log_requests": True})
    bench.serve("r1", PROMPT)
    bench.forget()
    lines()
    before = misses(bench)
    bench.serve("r2", PROMPT, params={"max_load_tokens": 0})
    assert lines() == [f"req r2: {TOKENS} prompt tokens = 0 GPU + 0 CPU + 0 NVMe + {TOKENS} computed"]
    assert misses(bench) == before


def test_a_trace_of_requests_can_be_replayed_and_has_nothing_of_what_was_in_them(engines, tmp_path):
    path = tmp_path / "trace.jsonl"
    bench = engines.make(extra={"trace_file": str(path)})
    for name, prompt in (("r1", PROMPT), ("r2", [*PROMPT, *prompt_of(3)]), ("r3", prompt_of(2))):
        bench.serve(name, prompt, 3)
    bench.add("left", prompt_of(4), max_tokens=900)
    bench.step()
    bench.abort("left")
    bench.run()
    end_s = time.monotonic() + 60
    while path.read_text().count("\n") < 5:
        assert time.monotonic() < end_s, "what has ended is written within a second or so"
        time.sleep(0.05)
    text = path.read_text()
    assert not any(key.hex() in text or key.hex()[:12] in text for key in bench.keys("r1"))
    done = CliRunner().invoke(app, ["replay", str(path), "--nvme", "100%", "--json", "--processes", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["trace"]["form"], found["trace"]["requests"], found["trace"]["block_tokens"]) == (
        "kvdisk",
        4,
        BLOCK_TOKENS,
    )
    assert found["slot_bytes"] == SLOT_BYTES
    assert found["runs"][0]["hit_tokens"]["nvme"] == BLOCKS * BLOCK_TOKENS
    assert found["trace"]["most_hits"] == pytest.approx(BLOCKS / (4 * BLOCKS + BLOCKS))


def test_inspect_tells_of_the_last_request_before_a_pause_with_its_time(engines, monkeypatch):
    """The first one after a long pause was booked at the time of the last step before it; and the
    last one before it only when USES was written, 10 minutes later."""
    monkeypatch.setattr("kvdisk.assembly.USES_LOOK_S", 0.05)
    bench = engines.make(nvme=True)
    bench.serve("r1", PROMPT)
    pause_s, now = 5000, time.time
    monkeypatch.setattr("time.time", lambda: now() + pause_s)
    began_s = int(time.time())
    bench.serve("r2", PROMPT)
    used: list[int] = []
    end_s = time.monotonic() + 60
    while not used:
        assert time.monotonic() < end_s, "the engine takes no further step, and yet it is told"
        found = json.loads(CliRunner().invoke(app, ["inspect", str(bench.store), "--json"]).stdout)
        used = [each["last_use_s"] for each in found["namespaces"][0]["prefixes"]["tree"] if each["last_use_s"]]
    assert began_s <= used[0] <= time.time()
