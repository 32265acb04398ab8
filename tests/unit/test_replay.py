# SPDX-License-Identifier: Apache-2.0
"""``kvdisk replay``: small traces by hand, the models to compare with, and the command."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from cli_stores import refused, run_here
from hypothesis import given
from hypothesis import strategies as st
from replay_models import MODELS, run_belady, run_model
from replay_traces import POLICIES, Prefixes, conversations, of_prompts, replayed, room_of, write_mooncake
from rich.console import Console

from kvdisk.blocks import Tier
from kvdisk.cli.replay.command import _print_table
from kvdisk.cli.replay.run import Replayed, run_all
from kvdisk.cli.replay.tiers import Capacity, Setting, make_engine
from kvdisk.cli.replay.trace import Trace, read_trace
from kvdisk.errors import ConfigError
from kvdisk.manager.catalog import NONE
from kvdisk.manager.nvme import spare_slots

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Trace:
    """A trace of the nature of a chat service's: a block is met again in half of the cases."""
    return read_trace(write_mooncake(tmp_path_factory.mktemp("trace") / "chats.jsonl", conversations(900)))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_mooncake(tmp_path_factory.mktemp("trace") / "small.jsonl", conversations(60))


def test_room_in_blocks_percent_and_bytes(chats):
    for text, blocks in (("10 blocks", 10), ("2.5 %", chats.distinct // 40), ("0", 0)):
        assert room_of(chats, text).blocks == blocks
    assert room_of(chats, "50", on_nvme=False) == Capacity("50", 50, 50)
    assert room_of(chats, "100MiB", on_nvme=False).blocks == 99, "a slot is a block and its header"
    sized = room_of(chats, "10GiB")
    assert 8500 < sized.blocks < sized.slots < 10240
    for blocks in (1, 64, 513, 100_000):
        slots = room_of(chats, str(blocks)).slots
        assert slots - spare_slots(slots) >= blocks > slots - 1 - spare_slots(slots - 1), "as many as are needed"
    for text in ("many", "-1", "1..%", "0.0001%", "99999999999999", "10KiB"):
        with pytest.raises(ConfigError, match="--nvme"):
            room_of(chats, text)


def test_by_hand(tmp_path):
    """Three prompts of full blocks, NVMe alone: the second shares two blocks with the first, the
    third has all."""
    trace = read_trace(write_mooncake(tmp_path / "t", [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 4]]))
    outcome = replayed(trace, "50")
    assert outcome.hit_blocks == {"gpu": 0, "cpu": 0, "nvme": 6}
    assert (outcome.written_blocks, outcome.read_blocks) == (5, 6)
    assert outcome.hit_tokens["nvme"] == 2 * 512 + 3 * 512 + 3, "the last block is partial, and has 3 tokens here"
    assert replayed(trace, "50", nvme_admission="reuse(2)").hit_blocks["nvme"] == 2
    with_cpu = replayed(trace, "50", cpu="50")
    assert with_cpu.hit_blocks == {"gpu": 0, "cpu": 6, "nvme": 0}
    assert with_cpu.written_blocks == 5 and with_cpu.read_blocks == 0
    assert replayed(trace, "50", gpu=50).hit_blocks == {"gpu": 6, "cpu": 0, "nvme": 0}
    others = [[10 * at + part for part in range(4)] for at in range(1, 11)]
    long = read_trace(write_mooncake(tmp_path / "long", [[0, 1, 2], *others, [0, 1, 2]]))
    found = replayed(long, "50", gpu=20).hit_blocks
    assert found == {"gpu": 0, "cpu": 0, "nvme": 3}, "the GPU's cache had no room for them all this time"


def test_lru_that_admits_all_is_the_model_and_the_default_hits_no_less(chats):
    """Decision 25, on a trace of like nature."""
    lru, own = replayed(chats, "1%", eviction="lru", nvme_admission="all"), replayed(chats, "1%")
    counts = run_model("lru", [request.hashes for request in chats.requests], lru.room.blocks)
    assert sum(lru.hit_blocks.values()) == pytest.approx(sum(counts.hits), rel=0.01)
    assert lru.written_blocks == pytest.approx(counts.written, rel=0.03)
    assert sum(own.hit_blocks.values()) >= sum(counts.hits) and own.written_blocks <= counts.written / 2


def test_of_a_prompt_longer_than_the_tier_the_head_is_kept():
    """What is behind a block that has left again is not stored: it would serve nobody, and push out
    the head."""
    prefixes = Prefixes()
    trace = of_prompts([prefixes.number([("prompt", at // 3), *range(20 * (at % 7))]) for at in range(60)])
    lru = replayed(trace, "70", eviction="lru", nvme_admission="all")
    counts = run_model("lru", [request.hashes for request in trace.requests], 70)
    assert sum(lru.hit_blocks.values()) == sum(counts.hits) > 0
    assert lru.written_blocks < counts.written


def test_long_prompts_pass_through_a_small_memory_while_their_requests_run():
    """A chain in memory that NVMe has not got leaves as a whole, and not a block at a time."""
    prefixes = Prefixes()
    trace = of_prompts([prefixes.number([("prompt", at), *range(299)]) for at in range(8)] * 2)
    assert sum(replayed(trace, "4000", cpu="40").hit_blocks.values()) == 8 * 300


def test_what_a_copy_on_nvme_follows_does_not_leave_memory_for_nowhere(chats):
    rooms = {"cpu": room_of(chats, "10%", on_nvme=False), "nvme": room_of(chats, "10%"), "gpu_blocks": 0}
    engine = make_engine(chats, Setting(**rooms | POLICIES))
    catalog = engine.manager._catalog
    for number, request in enumerate(chats.requests[:600]):
        engine.serve(number, request)
        if number % 10 == 0:
            in_memory, on_nvme = (set(catalog.columns(tier).rows().tolist()) for tier in (Tier.CPU, Tier.NVME))
            assert {catalog.parent_rows[row] for row in on_nvme} <= in_memory | on_nvme | {NONE}
    assert min(engine.manager.stats[f"evicted_blocks.{tier}"] for tier in ("cpu", "nvme")) > 1000


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_scan_costs_a_warm_working_set_a_twentieth_of_its_hits_at_most(tmp_path, share, is_mixed):
    """Documents that fill a share of the room, asked for in turn; then ten times the room of what
    never comes back, at once or between two rounds of the documents."""
    prefixes, room = Prefixes(), 1000
    warm = [prefixes.number([("document", at), *range(7)]) for at in range(int(share * room / 8))]
    scan = [prefixes.number([("scan", at), *range(9)]) for at in range(room)]
    between = [prompt for at in range(room) for prompt in (scan[at], *([warm[at % len(warm)]] if is_mixed else []))]

    trace = read_trace(write_mooncake(tmp_path / "t", [*warm * 8, *between, *warm]))
    sizes = {"cpu": room_of(trace, "0", on_nvme=False), "nvme": room_of(trace, str(room)), "gpu_blocks": 0}
    engine, hits = make_engine(trace, Setting(**sizes | POLICIES)), [0]
    for number, request in enumerate(trace.requests):
        engine.serve(number, request)
        hits.append(sum(engine.hit_blocks.values()))
    before = hits[len(warm) * 8 + len(between)]
    assert before >= 0.95 * 8 * (7 * len(warm) + is_mixed * room)
    assert hits[-1] - before >= 0.95 * 8 * len(warm)


# --- The models of tools/replay_models.py. ---


def test_models_by_hand():
    prompts = [["a", "b"], ["c"], ["a", "b"], ["d"], ["c"]]
    # Room for three, the head of a prompt used last: b a | b a c | (a b hit) c b a | b a d | a d c
    assert run_model("lru", prompts, 3) == ([0, 0, 2, 0, 0], 5)
    scan = [[block] for block in ["a", "a", "b", "c", "d", "e", "a"]]
    assert run_model("arc", scan, 3).hits == [0, 1, 0, 0, 0, 0, 1], "what was used twice outlives a scan"
    assert run_model("lru", scan, 3).hits == [0, 1, 0, 0, 0, 0, 0]


def most_hits(prompts, capacity):
    """The most hits of all ways to keep blocks: after each reference any of those there, and of the
    one that came."""
    references = tuple((block, at == 0) for prompt in prompts for at, block in enumerate(prompt))

    @cache
    def most(at, kept, whole):
        if at == len(references):
            return 0
        block, is_first = references[at]
        whole = block in kept and (whole or is_first)
        there = kept | {block}
        counts = range(min(capacity, len(there)) + 1)
        choices = [frozenset(choice) for count in counts for choice in combinations(there, count)]
        return whole + max(most(at + 1, choice, whole) for choice in choices)

    return most(0, frozenset(), False)


TINY = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6).map(
    lambda prompts: [prefixes.number(prompt) for prefixes in [Prefixes()] for prompt in prompts]
)


@given(TINY.filter(lambda prompts: sum(map(len, prompts)) <= 11), st.integers(0, 3))
def test_belady_is_the_optimum_and_no_model_beats_it(prompts, capacity):
    best = run_belady(prompts, capacity)
    assert sum(best.hits) == most_hits(prompts, capacity)
    assert best.written <= sum(best.hits)
    if capacity:
        assert all(sum(run_model(name, prompts, capacity).hits) <= sum(best.hits) for name in MODELS)


# --- The command. ---


def test_the_same_in_every_process_without_torch_and_by_room(small, tmp_path):
    packed = tmp_path / "small.gz"
    packed.write_bytes(gzip.compress(small.read_bytes()))
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    options = ["--json", "--nvme", "200,5%", "--eviction", "lru,learned", "--nvme-admission", "reuse(2)"]
    outputs = []
    for path, processes in ((small, "1"), (packed, "3")):
        done = subprocess.run(
            [sys.executable, "-m", "kvdisk.cli.main", "replay", str(path), *options, "--processes", processes],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONHASHSEED": processes},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    found, other = outputs
    for one, two in zip(found["runs"], other["runs"], strict=True):
        assert one | {"seconds": 0} == two | {"seconds": 0}
        assert one["written_bytes"] == one["written_blocks"] * found["slot_bytes"]
    assert (found["json_version"], found["trace"]["requests"], found["trace"]["form"]) == (3, 60, "mooncake")
    assert found["slot_bytes"] == found["block_bytes"] + 4096 == (64 << 20) + 4096
    assert [run["policy"] for run in found["runs"]] == ["lru, reuse(2)", "learned, reuse(2)"] * 2
    room = {"given": "200", "blocks": 200, "slots": 228}
    assert found["runs"][1]["room"] == found["runs"][1]["setting"]["nvme"] == room
    done = run_here("replay", small, "--nvme", "5%,20%", "--cpu", "10")
    assert done.exit_code == 0 and "60 requests" in done.stdout
    assert done.stdout.count("learned, learned, cpu 10") == 2 and "by CPU" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nvme", "0"], "no tier to keep anything in"),
        (["--nvme", "lots"], "--nvme must be a number of blocks"),
        (["--nvme", "5%", "--eviction", "fifo"], "eviction must be one of"),
        (["--store-policy", "on_preemption"], "preempts no request"),
        (["--store-policy", "spillover"], "--gpu"),
        (["--block-tokens", "16"], "line 1"),
        (["--block-bytes", "0"], "--block-bytes"),
    ],
)
def test_wrong_usage_is_one_sentence(small, arguments, said):
    assert said in refused("replay", small, *arguments)


@pytest.fixture(scope="module")
def found(chats) -> Replayed:
    rooms = {"cpu": room_of(chats, "50", on_nvme=False), "nvme": room_of(chats, "100%"), "gpu_blocks": 40}
    return run_all(chats, [Setting(**rooms | POLICIES)], 64 << 20, 1, lambda _: None)


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_no_title_and_no_policy_is_cut_however_narrow_the_terminal(found, width):
    console = Console(width=width, file=(said := io.StringIO()), markup=False, highlight=False, emoji=False)
    _print_table(found, console)
    titles, _, row, *more = said.getvalue().splitlines()
    for title in ("nvme_bytes", "policy", "hits", "by GPU", "by CPU", "by NVMe", "written"):
        assert title in titles
    for title in ("read", "evicted", "refused"):
        assert (title in titles.split()) != (title in "".join(more)), "it is shown, or said to be left out"
    policy = found.runs[0].policy.split()
    assert policy[0] in row and all(word in said.getvalue() for word in policy)
