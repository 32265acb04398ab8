# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_stores import run_here
from replay_traces import conversations, scans, write_mooncake

from kvdisk.cli.replay import run as replay_run
from kvdisk.cli.replay.capacity import Room, parse_room, split
from kvdisk.cli.replay.models import MODELS
from kvdisk.cli.replay.readers import read_trace
from kvdisk.cli.replay.run import Rival, Run, replay
from kvdisk.cli.replay.tiers import Setting, make_engine, make_geometry
from kvdisk.cli.replay.trace import Trace
from kvdisk.config import Config
from kvdisk.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NONE = Room("0", 0, 0)
DEFAULTS = Config()


def room_of(trace: Trace, text: str, *, on_nvme: bool = True) -> Room:
    return parse_room("--nvme", text, trace, make_geometry(trace, 1 << 20), on_nvme=on_nvme)


def setting_of(trace: Trace, nvme: str = "0", cpu: str = "0", **changes) -> Setting:
    values = {
        "cpu": room_of(trace, cpu, on_nvme=False),
        "nvme": room_of(trace, nvme),
        "gpu_blocks": 0,
        "eviction": DEFAULTS.eviction,
        "cpu_admission": DEFAULTS.cpu_admission,
        "nvme_admission": DEFAULTS.nvme_admission,
        "store_policy": DEFAULTS.store_policy,
    }
    return Setting(**(values | changes))


def run_setting(trace: Trace, setting: Setting) -> Run:
    return replay_run.run_setting(trace, 4096, setting)


def default_run(trace: Trace, nvme: str) -> Run:
    return run_setting(trace, setting_of(trace, nvme))


def rival_run(trace: Trace, text: str, model: str) -> Run:
    return replay_run.run_rival(trace, 4096, Rival(model, room_of(trace, text)))


def hits(run: Run) -> int:
    return sum(run.hit_blocks.values())


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Trace:
    """A trace of the nature of a chat service's: a block is met again in half of the cases."""
    return read_trace(write_mooncake(tmp_path_factory.mktemp("trace") / "chats.jsonl", conversations(900)))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_mooncake(tmp_path_factory.mktemp("trace") / "small.jsonl", conversations(60))


class TestCapacity:
    def test_blocks_percent_and_bytes(self, chats):
        assert room_of(chats, "100") == Room("100", 100, 114)
        assert room_of(chats, "10 blocks").blocks == 10
        assert room_of(chats, "10%").blocks == chats.distinct // 10
        assert room_of(chats, "2.5 %").blocks == chats.distinct * 25 // 1000
        assert room_of(chats, "0") == NONE
        assert room_of(chats, "50", on_nvme=False) == Room("50", 50, 50)
        assert room_of(chats, "100MiB", on_nvme=False).blocks == 99, "a slot is a block and its header"
        sized = room_of(chats, "10GiB")
        assert 8500 < sized.blocks < sized.slots < 10240

    @pytest.mark.parametrize("blocks", [1, 7, 8, 63, 64, 500, 512, 513, 2048, 5000, 32768, 100_000])
    def test_slots_are_as_many_as_are_needed(self, blocks, chats):
        from kvdisk.manager.nvme import spare_slots

        slots = room_of(chats, str(blocks)).slots
        assert slots - spare_slots(slots) >= blocks > slots - 1 - spare_slots(slots - 1)

    @pytest.mark.parametrize("text", ["many", "-1", "1..%", "0.0001%", "99999999999999", "10KiB", "%"])
    def test_what_is_no_room(self, text, chats):
        with pytest.raises(ConfigError, match="--nvme"):
            room_of(chats, text)

    def test_lists(self):
        assert split(["1%,5%", "5%", "lru"]) == ["1%", "5%", "lru"]
        assert split(["all,reuse(2)", "adaptive"]) == ["all", "reuse(2)", "adaptive"]


def test_by_hand(tmp_path):
    """Three prompts of full blocks, NVMe alone: the second shares two blocks with the first, the third has all."""
    trace = read_trace(write_mooncake(tmp_path / "t", [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 4]]))
    outcome = run_setting(trace, setting_of(trace, "50"))
    assert outcome.hit_blocks == {"gpu": 0, "cpu": 0, "nvme": 6}
    assert (outcome.written_blocks, outcome.read_blocks) == (5, 6)
    assert outcome.hit_tokens["nvme"] == 2 * 512 + 3 * 512 + 3, "the last block is partial, and has 3 tokens here"
    assert run_setting(trace, setting_of(trace, "50", nvme_admission="reuse(2)")).hit_blocks["nvme"] == 2
    with_cpu = run_setting(trace, setting_of(trace, "50", cpu="50"))
    assert with_cpu.hit_blocks == {"gpu": 0, "cpu": 6, "nvme": 0}
    assert with_cpu.written_blocks == 5 and with_cpu.read_blocks == 0
    with_gpu = run_setting(trace, setting_of(trace, "50", gpu_blocks=50))
    assert with_gpu.hit_blocks == {"gpu": 6, "cpu": 0, "nvme": 0}


def test_a_gpu_cache_leaves_the_rest_to_the_tiers(chats):
    outcome = run_setting(chats, setting_of(chats, "25%", gpu_blocks=300))
    alone = run_setting(chats, setting_of(chats, "25%"))
    assert outcome.hit_blocks["gpu"] > 0
    assert abs(hits(outcome) - hits(alone)) < 0.02 * hits(alone), "what the GPU has, the tier need not load"


def test_spillover_stores_what_leaves_the_gpu(chats):
    outcome = run_setting(chats, setting_of(chats, "25%", gpu_blocks=600, store_policy="spillover"))
    assert outcome.written_blocks > 0 and outcome.hit_blocks["nvme"] > 0


def test_with_all_room_lru_through_the_manager_is_the_model(chats):
    for text in ("5%", "30%", "100%"):
        own = run_setting(chats, setting_of(chats, text, eviction="lru", nvme_admission="all"))
        model = rival_run(chats, text, "lru")
        assert own.hit_rate == pytest.approx(model.hit_rate, rel=0.01)
        assert own.written_blocks == pytest.approx(model.written_blocks, rel=0.02)
    assert hits(own) == hits(model) and own.written_blocks == model.written_blocks == chats.distinct


def test_the_tier_never_holds_more_than_its_room(chats):
    setting = setting_of(chats, "10%")
    engine = make_engine(chats, setting)
    for number, request in enumerate(chats.requests[:400]):
        engine.serve(number, request)
        assert len(engine.manager._catalog) <= setting.nvme.blocks
    assert len(engine.manager._catalog) == setting.nvme.blocks


@pytest.mark.parametrize("text", ["1%", "5%", "10%", "25%", "50%"])
def test_the_default_holds_what_it_was_chosen_for(chats, text):
    """Decision 25, on a trace of like nature: at least LRU that admits all, and near the best of the others."""
    own, lru = default_run(chats, text), rival_run(chats, text, "lru")
    assert hits(own) >= hits(lru)
    best = max(hits(rival_run(chats, text, model)) for model in MODELS)
    assert hits(own) >= best - 0.005 * chats.references
    if text == "1%":
        assert own.written_blocks <= lru.written_blocks / 2


def test_what_is_used_again_stays_through_scans(tmp_path):
    """A loop that fits, and as much again that is never asked for a second time: last use alone keeps nothing."""
    trace = read_trace(write_mooncake(tmp_path / "t", scans(700)))
    own, lru = default_run(trace, "450"), rival_run(trace, "450", "lru")
    assert hits(own) > 2 * hits(lru) + 1000


def test_runs_beside_each_other_are_those_one_by_one(chats):
    settings = [setting_of(chats, text) for text in ("1%", "5%")]
    rivals = ["lru", "arc"]
    seen: list[tuple[int, int]] = []
    alone = replay(chats, settings, rivals, 4096, 1, lambda done, total: seen.append((done, total)))
    beside = replay(chats, settings, rivals, 4096, 2, lambda *_: None)
    assert seen == [(done, 6) for done in range(1, 7)]
    for mine, other in zip(alone.runs, beside.runs, strict=True):
        mine.seconds = other.seconds
        assert mine == other
    assert [run.room.given for run in alone.runs] == ["1%"] * 3 + ["5%"] * 3
    assert alone.references_per_second > 0


# --- The command. ---


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvdisk.cli.main", "replay", *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)


def test_it_is_the_same_in_every_process(small):
    outputs = set()
    for seed in ("1", "2"):
        done = run(small, "--json", "--nvme", "5%", "--compare", "none", PYTHONHASHSEED=seed)
        outputs.add(json.dumps([one | {"seconds": 0} for one in json.loads(done.stdout)["runs"]]))
    assert len(outputs) == 1


def test_the_command_prints_a_table(small):
    done = run(small, "--nvme", "5%,20%", "--cpu", "10")
    assert done.returncode == 0, done.stderr
    assert "60 requests" in done.stdout and "block references through the manager in " in done.stdout
    rows = re.findall(r"^(?:\d+%  [\d,]+| {4,}) +(\S.*?)  +\d", done.stdout, re.MULTILINE)
    assert rows == ["credit, adaptive, cpu 10", "lru", "arc", "belady"] * 2
    assert "by CPU" in done.stdout and "by NVMe" in done.stdout


def test_json_has_the_shape_that_is_documented(small, tmp_path):
    packed = tmp_path / "small.gz"
    packed.write_bytes(gzip.compress(small.read_bytes()))
    done = run(packed, "--json", "--nvme", "200", "--eviction", "lru,credit", "--compare", "lru,belady")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["json_version"] == 1
    assert found["trace"]["requests"] == 60 and found["trace"]["form"] == "mooncake"
    assert found["slot_bytes"] == found["block_bytes"] + 4096 == (64 << 20) + 4096
    assert [run["policy"] for run in found["runs"]] == ["lru, adaptive", "credit, adaptive", "lru", "belady"]
    keys = {
        *("policy", "model", "setting", "room", "hit_rate", "hit_blocks_rate", "hit_tokens", "hit_blocks", "seconds"),
        *("written_blocks", "written_bytes", "read_blocks", "read_bytes", "write_amplification", "written_per_hit"),
        *("evicted_blocks", "refused", "failed", "waits_s"),
    }
    for one in found["runs"]:
        assert set(one) == keys
        assert one["written_bytes"] == one["written_blocks"] * found["slot_bytes"]
        assert one["room"] == {"given": "200", "blocks": 200, "slots": 228}
        assert 0 < one["hit_rate"] < 1
    assert found["runs"][0]["setting"]["nvme"] == {"given": "200", "blocks": 200, "slots": 228}
    best = max(found["runs"], key=lambda one: one["hit_blocks_rate"])
    assert best["model"] == "belady"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nvme", "0"], "no tier to keep anything in"),
        (["--nvme", "lots"], "--nvme must be a number of blocks"),
        (["--nvme", "5%", "--eviction", "fifo"], "eviction must be one of"),
        (["--nvme-admission", "some"], "nvme_admission must be"),
        (["--store-policy", "on_preemption"], "preempts no request"),
        (["--store-policy", "spillover"], "--gpu"),
        (["--compare", "fifo"], "--compare knows"),
        (["--block-tokens", "16"], "line 1"),
        (["--block-bytes", "0"], "--block-bytes"),
        (["--form", "azure"], "the header has no column"),
        (["--cpu", "4", "--io", "no/such/place"], "not a directory in which files can be made"),
        (["--nvme", "0", "--cpu", "4", "--io", ".", "--block-bytes", "64GiB"], "smaller ones with --block-bytes"),
    ],
)
def test_wrong_usage_is_one_sentence(small, arguments, said):
    done = run_here("replay", small, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("kvdisk: ")


def test_real_bytes_are_written_read_and_right(small, tmp_path):
    done = run(small, "--io", tmp_path, "--block-bytes", "16KiB", "--nvme", "40%", "--requests", 25, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    own = found["runs"][0]
    assert own["written_blocks"] > 0 and own["read_blocks"] > 0
    assert own["failed"] == {"loads": 0, "stores": 0, "wrong_bytes": 0}
    waits = own["waits_s"]
    assert waits["count"] > 0 and 0 < waits["median"] <= waits["p99"] <= waits["most"]
    assert found["io_directory"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_wrong_bytes_are_seen(small, tmp_path, monkeypatch):
    from kvdisk.cli.replay import real_io

    right = real_io.MovingBackend.computed

    def wrong(self, hashes, block_ids):
        right(self, [bytes(32)] * len(hashes), block_ids)

    monkeypatch.setattr(real_io.MovingBackend, "computed", wrong)
    trace = read_trace(small, limit=12)
    with real_io.moving_bytes(tmp_path, 8192) as run_own:
        found = run_own(trace, 12288, setting_of(trace, "60%"))
    assert found.failed["wrong_bytes"] == hits(found) > 0


def test_without_torch_it_replays_but_for_io(small, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    arguments, path = (small, "--nvme", "5%", "--compare", "none"), f"{tmp_path}:{ROOT}"
    plain = run(*arguments, PYTHONPATH=path)
    assert plain.returncode == 0, plain.stderr
    moving = run(*arguments, "--io", tmp_path, PYTHONPATH=path)
    assert moving.returncode == 2 and "--io needs torch" in moving.stderr


def test_an_azure_trace_says_what_it_cannot_tell(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:17:03.9799600,480,10\n" * 20)
    done = run(path, "--nvme", "100", "--compare", "none")
    assert done.returncode == 0, done.stderr
    assert "Note: an Azure trace does not say which prompts share blocks" in done.stdout
    assert "0.00 %" in done.stdout
