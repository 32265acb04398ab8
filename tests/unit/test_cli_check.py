# SPDX-License-Identifier: Apache-2.0
"""``kvdisk check``: what it refuses is what an engine refuses, and what it says is so."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cli_stores import (
    LLAMA,
    LLAMA_TOKEN_BYTES,
    PLAIN,
    PLAIN_GEOMETRY,
    json_of,
    leave_home,
    refused,
    run_here,
    run_json,
)
from support.fake_pool import FakePool
from support.users import user

from kvdisk.assembly import assemble_scheduler, check_settings, check_sizes
from kvdisk.cli import check
from kvdisk.cli.size import fit_cpu, fit_nvme
from kvdisk.device import store as store_module
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, KvdiskError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.identity import Identity
from kvdisk.request_trace import RequestTrace
from kvdisk.tier_settings import TierSettings
from kvdisk.worker import host_memory as memory
from kvdisk.worker.host_memory import Deployment, HostMemory


def written(place: Path, settings: Any, **whole: Any) -> Path:
    """Write kvdisk's settings, or with ``whole`` what vLLM is given."""
    file = place / "kvdisk.json"
    file.write_text(json.dumps(whole | {"kv_connector_extra_config": settings} if whole else settings))
    return file


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"store_dirs": str(tmp_path / "kv"), "nvme_bytes": "64Mi", "cpu_bytes": "32Mi"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What a drive is said to be."""
    found = Mock(device="posix-aio", direct=True, why="right", read=4.096e9, write=2.048e9)
    monkeypatch.setattr(check, "measure", Mock(return_value=found))
    return found


def test_a_real_drive_is_measured_and_nothing_is_left(needs_queue, tmp_path, settings):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = written(tmp_path, settings)
    found = run_json("check", file, "--model", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "kvdisk.json"]
    (one,) = found["directories"]
    assert (one["path"], one["state"], one["mode"]) == (settings["store_dirs"], "to be made", 0o700)
    assert one["user"] == os.geteuid() and one["device"].startswith("posix-") and one["read_bytes_per_s"] > 1e6
    geometry = Geometry((GroupGeometry(0, 16, 16 * LLAMA_TOKEN_BYTES),), 1, 16)
    assert found["token_bytes"] == LLAMA_TOKEN_BYTES
    assert found["cpu"]["tokens"] == fit_cpu(geometry, 32 << 20).tokens
    assert found["nvme"]["tokens"] == fit_nvme(geometry, 64 << 20, 1).tokens


def test_an_empty_directory_has_nothing_in_it_at_any_time(needs_queue, tmp_path, settings, monkeypatch):
    """A check that is killed would leave it, and the engine would refuse the directory for it."""
    (tmp_path / "kv").mkdir(0o700)
    file = written(tmp_path, settings)
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=AssertionError("a directory was made")))
    (one,) = json_of("check", file)["directories"]
    assert (one["state"], one["direct"]) == ("empty", True) and not os.listdir(tmp_path / "kv")


def test_the_default_output_fits_a_terminal_and_says_what_loads_bring(tmp_path, settings, measured):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    leave_home(tmp_path / "kv", PLAIN, 1, last_use_s=1000)
    done = run_here("check", written(tmp_path, settings), "--model", tmp_path)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "An engine can start with this." in lines
    assert f"a store; user {os.geteuid()}, mode 0700" in done.stdout
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "reads 4.1 GB/s = 2,000,000 tokens/s" in done.stdout
    assert "writes 2.0 GB/s = 1,000,000 tokens/s" in done.stdout
    assert "fewer than 2,000,000 prompt tokens a second" in done.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nvme_bytes": "900Ti"}, "its part of nvme_bytes is 900.0 TiB"),
        ("direct", "does not support O_DIRECT"),
        ("threads", "threads would move blocks"),
        ("unmeasured", "was not measured: no permission"),
    ],
)
def test_what_is_not_as_it_should_be_is_said_and_is_an_exit_code(tmp_path, settings, measured, change, said):
    if change == "direct":
        measured.direct = False
    elif change == "threads":
        measured.device = "posix-threads"
    elif change == "unmeasured":
        check.measure.side_effect = ConfigError("no permission.")
    else:
        settings |= change
    done = run_here("check", written(tmp_path, settings))
    assert done.exit_code == 1 and said in " ".join(done.stdout.split())
    assert "An engine can start with this." in done.stdout


def test_what_an_engine_refuses_is_refused_in_its_words(tmp_path, settings, measured):
    (tmp_path / "file").touch()
    for change in (
        {"cpu_bytes": "900Ti"},
        {"cpu_bytes": 1},
        {"nvme_bytes": "1Mi"},
        {"stor_dirs": "/x"},
        {"eviction": "arc"},
        {"store_dirs": str(tmp_path / "file")},
        {"store_dirs": str(tmp_path / "absent" / "kv")},
        {"nvme_admission": "absent.module:Own"},
    ):
        wrong = settings | change
        with pytest.raises(ConfigError) as engine:
            check_sizes(check_settings(wrong), Deployment())
        assert refused("check", written(tmp_path, wrong)) == f"kvdisk: {str(engine.value).rstrip('.')}.\n"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for change, said in (
        ({"nvme_bytes": "1Mi"}, "give it more"),
        ({"nvme_write_bytes_per_day": 9}, "nvme_write_bytes_per_day 9 is less than two blocks of "),
        ({"remote": "s3://a", "remote_write_bytes_per_s": 9}, "remote_write_bytes_per_s 9 sends no two blocks of "),
    ):
        assert said in refused("check", written(tmp_path, settings | change), "--model", tmp_path)


def test_a_verdict_is_an_exit_code_and_a_word_of_json(tmp_path, settings, measured, monkeypatch):
    """Of one that can, one that can and is worth a word, one that cannot, and an error of ours."""

    def verdict(wanted: dict[str, Any], *options: str) -> tuple[int, bool | None]:
        done = run_here("check", written(tmp_path, wanted), "--json", *options)
        return done.exit_code, json.loads(done.stdout)["can_start"] if done.stdout else None

    assert verdict(settings) == (0, True)
    assert verdict(settings | {"nvme_bytes": "900Ti"}) == (1, True)
    assert verdict(settings | {"cpu_bytes": "900Ti"}) == (2, False)
    assert verdict(settings | {"nvme_bytes": "1Mi"}) == (2, False)
    assert verdict({"stor_dirs": "/x"}) == (2, False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert verdict(settings | {"cpu_bytes": "9Ki"}, "--model", str(tmp_path)) == (2, False)
    for error in (RuntimeError("a slip"), FileNotFoundError(2, "gone", "x")):
        monkeypatch.setattr(check, "look", Mock(side_effect=error))
        done = run_here("check", written(tmp_path, settings))
        assert done.exit_code == 3 and "an error of kvdisk's own" in done.stderr


# -- what a start does, the check says -------------------------------------------------------------


USER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def users_place() -> Iterator[Path]:
    """A directory of the other user's, below which nobody is kept out."""
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, USER, USER)
        Path(place).chmod(0o755)
        yield Path(place)


def start(settings: dict[str, Any]) -> str:
    """Start an engine's half and end it; return what it had."""
    try:
        half = assemble_scheduler(
            check_settings(settings), PLAIN_GEOMETRY, FakePool(4, print), Identity.certain(b"?" * 32, {})
        )
    except KvdiskError:
        return "refused"
    half.close()
    return "without NVMe" if half.engine_store is None else "whole"


def said_by_check(file: Path) -> str:
    done = run_here("check", file, "--json")
    if done.exit_code == 2:
        return "refused"
    found = json.loads(done.stdout)
    assert found["can_start"] and found["ok"] is (done.exit_code == 0)
    return "without NVMe" if any("without its NVMe tier" in problem for problem in found["problems"]) else "whole"


@as_root
@pytest.mark.parametrize("cpu_bytes", ["32Mi", 0])
@pytest.mark.parametrize("what", ["lock", "homes", "homes/*/HOME", "homes/*/lock", "homes/*/index", "homes/*/segments"])
def test_what_this_user_cannot_read_or_write_is_to_the_check_what_it_is_to_a_start(
    users_place, measured, what, cpu_bytes
):
    settings = {"store_dirs": str(users_place / "kv"), "nvme_bytes": "64Mi", "cpu_bytes": cpu_bytes}
    file = written(users_place, settings)
    with user(USER):
        assert start(settings) == "whole" == said_by_check(file)
        for mode in (0, 0o500 if what.endswith(("homes", "index", "segments")) else 0o400):
            for path in (users_place / "kv").glob(what):
                path.chmod(mode)
            said = said_by_check(file)
            assert start(settings) == said


def test_a_store_that_another_process_has_locked_is_refused_as_at_a_start(tmp_path, settings, measured, monkeypatch):
    file = written(tmp_path, settings)
    assert start(settings) == "whole"
    monkeypatch.setattr(store_module, "STORE_LOCK_TIMEOUT_S", 0.1)
    with Store.open(tmp_path / "kv").locked():
        assert start(settings) == "refused"
        assert "has been locked by another process" in refused("check", file)
    assert said_by_check(file) == "whole"


@pytest.mark.parametrize("held", [False, True], ids=["another kind", "in use"])
def test_a_trace_file_that_a_start_refuses_is_refused(tmp_path, settings, measured, held):
    """Each data-parallel rank has a file of its own."""
    traces = [tmp_path / "trace.jsonl", tmp_path / "trace-dp1.jsonl"]
    settings["trace_file"] = str(traces[0])
    file = written(tmp_path, settings)
    assert start(settings) == "whole" == said_by_check(file)
    for trace, options in zip(traces, ([], ["--dp", "2"]), strict=True):
        if not held:
            trace.write_text("mine")
        fact = {"block_tokens": 16, "block_bytes": 1, "model": ""}
        with closing(RequestTrace(trace, **fact)) if held else nullcontext():
            said = refused("check", file, *options)
            with pytest.raises(ConfigError) as engine:
                RequestTrace(trace, **fact)
            assert said == f"kvdisk: {engine.value}\n"
        trace.unlink()
        assert not any(name.name.startswith("trace-dp1") for name in tmp_path.iterdir()), "nothing is made"


@as_root
def test_what_is_not_the_stores_is_not_looked_at(users_place, measured):
    """As lost+found, which is root's."""
    (users_place / "kv" / "lost+found").mkdir(0o700, parents=True)
    (users_place / "kv").chmod(0o700)
    os.chown(users_place / "kv", USER, USER)
    file = written(users_place, {"store_dirs": str(users_place / "kv"), "nvme_bytes": "64Mi"})
    with user(USER):
        assert said_by_check(file) == "whole"


# -- the second door -------------------------------------------------------------------------------


TIERING = {"spec_name": "TieringOffloadingSpec"}


@pytest.fixture
def tier(settings: dict[str, Any]) -> dict[str, Any]:
    del settings["cpu_bytes"]
    return {"type": "kvdisk", **settings}


def test_the_settings_of_a_tier_are_checked_in_each_form_in_which_they_are_given(tmp_path, tier, measured):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    extra = TIERING | {"secondary_tiers": [{"type": "other"}, tier]}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    several = {"connectors": [{"kv_connector": "Other"}, connector]}
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": several}
    by_path = {"type": "Mine", "module_path": "kvdisk.offloading"}
    for whole in (tier, tier | by_path, extra, {"kv_connector_extra_config": extra}, connector, multi):
        found = json_of("check", written(tmp_path, whole), "--model", tmp_path)
        assert (found["door"], found["nvme_bytes"]) == ("OffloadingConnector", 64 << 20)
        assert found["nvme"]["tokens"] and found["cpu"] is None
    assert "vLLM's own" in run_here("check", written(tmp_path, extra)).stdout


def test_what_vllm_keeps_before_a_tier_must_fit_into_memory_and_where_it_keeps_it(
    tmp_path, tier, measured, monkeypatch
):
    """It does not start, with a sentence of its own or none, after the weights are loaded."""

    def file(size_bytes: int) -> Path:
        extra = TIERING | {"cpu_bytes_to_use": size_bytes, "secondary_tiers": [tier]}
        return written(tmp_path, {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra})

    assert json_of("check", file(64 << 20))["vllm_memory_bytes"] == 64 << 20
    assert "vLLM's own, 64.0 MiB" in run_here("check", file(64 << 20)).stdout
    said = refused("check", file(1 << 50))
    assert said.startswith("kvdisk: vLLM is to keep 1.0 PiB before the tier, and this machine has ")
    monkeypatch.setattr(check, "host_memory", lambda: (1 << 60, "this machine"))
    assert "and /dev/shm, where it keeps them, has " in refused("check", file(1 << 50))
    shared = os.statvfs(check._SHARED_MEMORY)
    most = shared.f_blocks * shared.f_frsize
    assert json_of("check", file(most))["ok"]
    assert "for each of 2 engines" in refused("check", file(most), "--dp", "2")
    for name, value in (("DOOR", "offloading"), ("CPU_BYTES", "1PiB"), ("NVME_BYTES", "64MiB")):
        monkeypatch.setenv(f"KVDISK_{name}", value)
    monkeypatch.setenv("KVDISK_STORE_DIRS", str(tmp_path / "kv"))
    assert "lower cpu_bytes_to_use (KVDISK_CPU_BYTES)" in refused("check")


def test_what_a_tier_refuses_is_refused_in_its_words(tmp_path, tier, measured):
    for change in ({"cpu_bytes": 1}, {"device": "gds"}, {"stor_dirs": "/x"}, {"nvme_bytes": "1Mi"}, {"locality": "x"}):
        wrong = tier | change
        with pytest.raises(ConfigError) as engine:
            check_sizes(TierSettings.of(wrong).config, Deployment())
        assert refused("check", written(tmp_path, wrong)) == f"kvdisk: {str(engine.value).rstrip('.')}.\n"
    assert "TieringOffloadingSpec" in refused("check", written(tmp_path, {"secondary_tiers": [tier]}))
    assert "kvdisk is one tier" in refused("check", written(tmp_path, TIERING | {"secondary_tiers": [tier, tier]}))
    assert "nor a tier of kvdisk's" in refused("check", written(tmp_path, TIERING | {"secondary_tiers": []}))


def test_a_tier_needs_neither_vllm_nor_torch(needs_queue, tmp_path, tier):
    found = run_json("check", written(tmp_path, tier), without=("vllm", "torch"))
    assert found["door"] == "OffloadingConnector" and found["directories"][0]["read_bytes_per_s"] > 1e6


def test_an_environment_in_which_vllm_has_no_such_tier_is_said(tmp_path, tier, measured, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    extra = TIERING | {"secondary_tiers": [tier]}
    assert "vLLM finds kvdisk only where it lists" in refused("check", written(tmp_path, extra))
    by_path = TIERING | {"secondary_tiers": [tier | {"module_path": "kvdisk.offloading"}]}
    assert run_here("check", written(tmp_path, by_path)).exit_code == 1


def test_all_ranks_of_all_engines_of_this_host_count(tmp_path, settings, measured, monkeypatch):
    """What one rank has fits, and what all have does not; the same of a drive."""
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(1 << 30))
    file = written(tmp_path, settings | {"cpu_bytes": "700Mi", "staging_bytes": "1Mi"})
    assert run_here("check", file).exit_code == 0
    assert "2 ranks of 2 engines need 1.37 GiB of host memory" in refused("check", file, "--dp", "2")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    many = written(tmp_path, settings | {"cpu_bytes": "900Mi", "staging_bytes": "100Mi"})
    assert "2 ranks need 1.07 GiB" in refused("check", many, "--model", tmp_path, "--tp", "2")
    room = os.statvfs(tmp_path)
    half = room.f_bavail * room.f_frsize * 2 // 3
    few = written(tmp_path, settings | {"nvme_bytes": half})
    assert run_here("check", few).exit_code == 0
    done = run_here("check", few, "--dp", "2")
    assert done.exit_code == 1 and "its part of nvme_bytes of 2 engines is" in done.stdout


def test_directories_on_one_drive_share_its_room(tmp_path, settings, measured):
    room = os.statvfs(tmp_path)
    wanted = settings | {"store_dirs": [str(tmp_path / "a"), str(tmp_path / "b")]}
    free_bytes = room.f_bavail * room.f_frsize
    done = run_here("check", written(tmp_path, wanted | {"nvme_bytes": free_bytes * 3 // 2}))
    assert done.exit_code == 1 and f"{tmp_path}/a and {tmp_path}/b together have room for" in done.stdout
    assert run_here("check", written(tmp_path, wanted | {"nvme_bytes": free_bytes // 2})).exit_code == 0


def test_an_environment_that_keeps_vllm_from_kvdisk_is_said(tmp_path, settings, measured, monkeypatch):
    whole = {"kv_connector": check.CONNECTOR, "kv_role": "kv_both"}
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver,kvdisk")
    assert run_here("check", written(tmp_path, settings, **whole)).exit_code == 0
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    assert "vLLM finds kvdisk only where it lists" in refused("check", written(tmp_path, settings, **whole))
    by_path = written(tmp_path, settings, **whole, kv_connector_module_path="kvdisk.connector")
    for file in (by_path, written(tmp_path, settings)):
        done = run_here("check", file)
        assert done.exit_code == 1 and "VLLM_PLUGINS is 'lora_resolver'" in done.stdout
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "with which vLLM starts no connector" in run_here("check", written(tmp_path, settings)).stdout


@pytest.mark.parametrize("among_others", [False, True])
def test_what_vllm_is_given_is_read_as_well(tmp_path, settings, measured, among_others):
    mine = {"kv_connector": check.CONNECTOR, "kv_role": "kv_both"}
    if among_others:
        settings = {"connectors": [{"kv_connector": "Other"}, mine | {"kv_connector_extra_config": settings}]}
        mine = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    assert json_of("check", written(tmp_path, settings, **mine))["nvme_bytes"] == 64 << 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[]", "has no settings of KVDiskConnector"),
        ('{"kv_connector": "Other"}', "has no settings of KVDiskConnector"),
        ('{"kv_connector": "MultiConnector", "kv_connector_extra_config": {}}', "has no settings of KVDiskConnector"),
        ('{"kv_connector": "KVDiskConnector", "kv_role": "kv_producer"}', "set kv_role to kv_both"),
    ],
)
def test_what_is_no_configuration(tmp_path, text, said):
    file = tmp_path / "kvdisk.json"
    if text is not None:
        file.write_text(text)
    assert said in refused("check", file)
