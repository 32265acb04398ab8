# SPDX-License-Identifier: Apache-2.0
"""``KVDISK_`` variables: what they mean to the plugin and to the commands, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import make_docs
import pytest
from cli_stores import json_of, refused, run_here
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.cli import check
from kvdisk.config import PARSERS, Config
from kvdisk.environment import transfer_of, variables
from kvdisk.errors import ConfigError
from kvdisk.tier_settings import TierSettings

ROOT = Path(__file__).resolve().parents[2]
BASE = {"KVDISK_STORE_DIRS": "/nvme/kv", "KVDISK_NVME_BYTES": "500GiB"}
TIER = {"type": "kvdisk", "store_dirs": "/nvme/kv", "nvme_bytes": "500GiB"}


def settings_of(environment: dict[str, str]) -> dict[str, Any]:
    """Return the settings of ``KVDiskConnector`` that variables mean."""
    transfer = transfer_of(environment)
    assert transfer is not None
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("KVDiskConnector", "kv_both")
    settings: dict[str, Any] = transfer["kv_connector_extra_config"]
    return settings


def test_nothing_is_configured_where_no_variable_is_set():
    assert (
        transfer_of({"PATH": "/bin", "VLLM_PLUGINS": "kvdisk", "kvdisk_store_dirs": "/nvme", "XKVDISK_DOOR": "x"})
        is None
    )
    assert transfer_of(dict.fromkeys(BASE, " ")) is None, "as a template leaves them that has no value"


@pytest.mark.parametrize("setting", make_docs.settings(), ids=lambda setting: setting.key)
def test_every_setting_is_a_variable(setting):
    """Each example of the documentation, as JSON has it and without the quotes that a shell would
    need, is what it is in a file."""
    for example in setting.examples:
        value = json.loads(example)
        others = {} if setting.key in {"max_age_s", "remote"} else {"remote": "s3://bucket/kv"}
        base = {"store_dirs": "/nvme/kv", "nvme_bytes": "500GiB"} | others
        wanted = Config.from_mapping(base | {setting.key: value})
        for text in {example, value if isinstance(value, str) else example}:
            set_to = {f"KVDISK_{key.upper()}": each for key, each in base.items()} | {
                f"KVDISK_{setting.key.upper()}": text
            }
            assert Config.from_mapping(settings_of(set_to)) == wanted, text


def test_commas_separate_directories_and_json_has_those_with_commas():
    assert settings_of(BASE | {"KVDISK_STORE_DIRS": "/a/kv, /b/kv"})["store_dirs"] == ["/a/kv", "/b/kv"]
    assert settings_of(BASE | {"KVDISK_STORE_DIRS": '["/a,b/kv"]'})["store_dirs"] == ["/a,b/kv"]


def test_the_other_door_has_vllms_memory_and_a_tier():
    transfer = transfer_of(BASE | {"KVDISK_DOOR": "offloading", "KVDISK_CPU_BYTES": "32Gi", "KVDISK_NAMESPACE": "7"})
    assert transfer is not None and transfer["kv_connector"] == "OffloadingConnector"
    extra = transfer["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [TIER | {"namespace": "7"}], "a name is a text, whatever it looks like"
    assert (extra["cpu_bytes_to_use"], extra["spec_name"]) == (32 << 30, "TieringOffloadingSpec")
    plain = transfer_of(BASE | {"KVDISK_DOOR": "offloading"})
    assert plain is not None and plain["kv_connector_extra_config"]["cpu_bytes_to_use"] == Config().cpu_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"KVDISK_STOR_DIRS": "/x"}, "variable 'KVDISK_STOR_DIRS'; the nearest it knows is 'KVDISK_STORE_DIRS'."),
        ({"KVDISK_FOO": "x"}, "kvdisk does not know the variable 'KVDISK_FOO'."),
        ({"KVDISK_store_dirs": "/x"}, "'KVDISK_store_dirs'; the nearest it knows is 'KVDISK_STORE_DIRS'."),
        ({"KVDISK_": "/x"}, "kvdisk does not know the variable 'KVDISK_'."),
        ({"KVDISK_DOOR": "offload"}, "KVDISK_DOOR must be one of 'connector', 'offloading', not 'offload'."),
        ({"KVDISK_NVME_BYTES": "4 gigs"}, "KVDISK_NVME_BYTES must be a size in bytes"),
        ({"KVDISK_PREFETCH": "yes"}, "KVDISK_PREFETCH must be true or false, not 'yes'."),
        ({"KVDISK_STORE_DIRS": "kv"}, "KVDISK_STORE_DIRS must be an absolute path, not 'kv'."),
        ({"KVDISK_STORE_DIRS": ""}, "nvme_bytes needs store_dirs"),
        ({"KVDISK_NAMESPACE": "mine"}, "KVDISK_NAMESPACE needs KVDISK_DOOR=offloading: KVDiskConnector has no such"),
        ({"KVDISK_DOOR": "offloading", "KVDISK_STORE_POLICY": "spillover"}, "KVDISK_STORE_POLICY is of KVDisk"),
        ({"KVDISK_DOOR": "offloading", "KVDISK_NVME_BYTES": ""}, "KVDISK_DOOR=offloading needs KVDISK_NVME_BYTES"),
        ({"KVDISK_DOOR": "offloading", "KVDISK_CPU_BYTES": "0"}, "KVDISK_CPU_BYTES must be more than 0."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_that_names_the_variable(change, said):
    with pytest.raises(ConfigError) as refusal:
        transfer_of(BASE | change)
    assert said in str(refusal.value) and str(refusal.value).endswith(".") and "\n" not in str(refusal.value)


NAMES = [f"KVDISK_{key.upper()}" for key in (*PARSERS, *TierSettings._fields[1:], "door")]


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=30) | st.from_regex(r"[0-9.,eE{}\[\]\"/]{0,600}")))
def test_whatever_a_variable_says_it_is_json_or_a_sentence(environment):
    try:
        transfer = transfer_of(environment)
    except ConfigError:
        return
    assert json.loads(json.dumps(transfer)) == transfer


# -- variables of others ---------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["kvdisk", "kvdisk-vllm", "kvdisk-remote"])
def test_what_kubernetes_says_of_a_service_is_nobodys_configuration(service):
    """Each container of a namespace with a Service of this name has these, unless a pod wants no
    links."""
    name = service.upper().replace("-", "_")
    port = f"{name}_PORT_8000_TCP"
    linked = {
        f"{name}_SERVICE_HOST": "10.0.0.7",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": "tcp://10.0.0.7:8000",
        port: "tcp://10.0.0.7:8000",
        f"{port}_PROTO": "tcp",
        f"{port}_PORT": "8000",
        f"{port}_ADDR": "10.0.0.7",
    }
    assert transfer_of(linked) is None and variables(linked | BASE) == dict(sorted(BASE.items()))


def test_variables_of_this_projects_tests_are_known_to_be_those():
    """Else an engine that a test starts refuses them."""
    own = set((ROOT / "tests").rglob("test_*variables.py"))
    files = [path for place in ("tests", "tools") for path in (ROOT / place).rglob("*.py") if path not in own]
    found = {name for path in files for name in re.findall(r"\"(KVDISK_[A-Z_]+)\"", path.read_text())}
    strange = {name for name in found if name not in NAMES}
    assert {"KVDISK_TORTURE_SEED", "KVDISK_TESTS_NEED_ALL"} <= strange
    assert not variables(dict.fromkeys(strange, "1"))


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch, tmp_path) -> dict[str, str]:
    """Variables of a small store, set."""
    found = {"KVDISK_STORE_DIRS": str(tmp_path / "kv"), "KVDISK_NVME_BYTES": "64Mi", "KVDISK_CPU_BYTES": "32Mi"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def test_check_reads_variables_where_there_is_no_file(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "measure", lambda *_: check_measured())
    assert (json_of("check")["cpu_bytes"], json_of("check")["nvme_bytes"]) == (32 << 20, 64 << 20)
    file = tmp_path / "kvdisk.json"
    file.write_text(json.dumps({"cpu_bytes": "16Mi"}))
    of_file = json_of("check", file, code=1)
    assert of_file["cpu_bytes"] == 16 << 20
    (said,) = of_file["problems"]
    assert said == f"{', '.join(sorted(environment))} set nothing where the engine is given this file"
    monkeypatch.setenv("KVDISK_DOOR", "offloading")
    assert json_of("check")["door"] == "OffloadingConnector"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "vLLM finds kvdisk only where it lists kvdisk" in refused("check")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("KVDISK_NVME_BYTE", "1")
    assert "the nearest it knows is 'KVDISK_NVME_BYTES'" in refused("check")


def check_measured() -> Any:
    from unittest.mock import Mock

    return Mock(device="posix-aio", direct=True, why="right", read=4e9, write=2e9)


def test_check_without_anything_says_what_to_give_it():
    assert "name a file, or set KVDISK_STORE_DIRS and KVDISK_NVME_BYTES" in refused("check")


def test_start_args_is_what_a_command_line_is_given(environment, tmp_path, monkeypatch):
    shown = run_here("start-args", "KVDISK_NVME_BYTES=1Gi")
    assert (shown.exit_code, shown.stderr) == (0, "")
    whole = json.loads(shown.stdout)
    assert whole == transfer_of(environment | {"KVDISK_NVME_BYTES": "1Gi"})
    assert json_of("start-args", "KVDISK_NVME_BYTES=1Gi")["kv_transfer_config"] == whole
    file = tmp_path / "kvdisk.json"
    file.write_text(shown.stdout)
    assert check.read_settings(file) == whole["kv_connector_extra_config"]
    for wrong in ("KVDISK_NVME_BYTES", "NVME_BYTES=1Gi", "=1"):
        assert f"{wrong!r} is no variable of kvdisk's with a value" in refused("start-args", wrong)
    for name in environment:
        monkeypatch.delenv(name)
    assert "No variable is set" in refused("start-args")
