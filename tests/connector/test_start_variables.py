# SPDX-License-Identifier: Apache-2.0
"""vLLM's own start with ``KVDISK_`` variables and nothing on the command line."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_child import START_S, environment
from vllm import LLM
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from kvdisk.connector.plugin import register
from kvdisk.environment import transfer_of
from kvdisk.errors import ConfigError

OTHER = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Those of a small store, set."""
    found = {"KVDISK_STORE_DIRS": str(tmp_path / "kv"), "KVDISK_NVME_BYTES": "1GiB", "KVDISK_CPU_BYTES": "64MiB"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def arguments(model: Path, kind: type[EngineArgs] = EngineArgs, **more: Any) -> EngineArgs:
    return kind(model=str(model), dtype="float32", **more)


def given(transfer: KVTransferConfig | None) -> dict[str, Any] | None:
    """Return what of a transfer configuration a user would give."""
    if transfer is None:
        return None
    return {name: getattr(transfer, name) for name in ("kv_connector", "kv_role", "kv_connector_extra_config")}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "of the environment" in line]


@pytest.mark.parametrize("door", ["", "connector", "offloading"])
@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_variables_are_the_connector_where_nobody_named_one(tiny_llama, variables, door, kind, monkeypatch, caplog):
    """In the process that builds the configuration; all others are sent it."""
    caplog.set_level(logging.INFO, "kvdisk")
    monkeypatch.setenv("KVDISK_DOOR", door)
    asked = arguments(tiny_llama, kind)
    config = asked.create_engine_config()
    wanted = transfer_of(os.environ)
    assert wanted is not None and given(config.kv_transfer_config) == wanted
    names = sorted(name for name in (*variables, "KVDISK_DOOR") if os.environ[name])
    connector = "OffloadingConnector" if door == "offloading" else "KVDiskConnector"
    assert told(caplog) == [
        f"kvdisk: {', '.join(names)} of the environment set the connector {connector}, as --kv-transfer-config would."
    ]
    assert asked.kv_transfer_config is None and not Path(variables["KVDISK_STORE_DIRS"]).exists()
    register()
    assert given(asked.create_engine_config().kv_transfer_config) == wanted, "once more, from the same arguments"
    for name in variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVDISK_NOT_THERE", "and nobody looks")
    for sent in (pickle.loads(pickle.dumps(config)), replace(config)):  # noqa: S301 - our own
        assert given(sent.kv_transfer_config) == wanted
    assert len(told(caplog)) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kv_transfer_config": OTHER}, "--kv-transfer-config"),
        ({"kv_transfer_config": OTHER, "kv_offloading_size": 1.0}, "--kv-transfer-config"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    ],
)
def test_the_command_line_wins_and_variables_are_not_even_read(tiny_llama, variables, more, said, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvdisk")
    monkeypatch.setenv("KVDISK_IMAGE", "somebody's own")
    config = arguments(tiny_llama, **more).create_engine_config()
    assert config.kv_transfer_config.kv_connector == (
        "OffloadingConnector" if "kv_offloading_size" in more else "ExampleConnector"
    )
    (line,) = told(caplog)
    assert line.endswith(f"KVDISK_STORE_DIRS of the environment set nothing, since {said} is given.")


def test_without_variables_vllm_is_as_it_was(tiny_llama, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "kvdisk")
    monkeypatch.setenv("KVDISK_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("KVDISK_STORE_DIRS", "")
    assert arguments(tiny_llama).create_engine_config().kv_transfer_config is None
    assert not told(caplog)


def test_a_configuration_without_an_engine_is_left_alone(variables, monkeypatch):
    """vLLM builds some for layers that are outside of any engine, and for servers that only
    render."""
    monkeypatch.setenv("KVDISK_NOT_THERE", "1")
    assert VllmConfig().kv_transfer_config is None


def test_what_another_plugin_has_wrapped_is_wrapped_too(tiny_llama, variables, monkeypatch):
    """As by ``functools.wraps``, which leaves a mark that says nothing of whose it is."""
    calls = []
    own = EngineArgs.create_engine_config.__wrapped__

    def of_another(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return own(*arguments, **more)

    of_another.__wrapped__ = own  # type: ignore[attr-defined]
    monkeypatch.setattr(EngineArgs, "create_engine_config", of_another)
    register()
    config = arguments(tiny_llama).create_engine_config()
    assert calls and config.kv_transfer_config.kv_connector == "KVDiskConnector"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"KVDISK_STOR_DIRS": "/nvme"}, "variable 'KVDISK_STOR_DIRS'; the nearest it knows is 'KVDISK_STORE_DIRS'."),
        ({"KVDISK_CPU_BYTES": "900TiB"}, "host memory"),
    ],
)
def test_what_is_wrong_ends_an_engine_before_it_has_processes(tiny_llama, variables, change, said, monkeypatch):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said) as refusal:
        LLM(str(tiny_llama), enforce_eager=True)
    assert traceback.format_exception(refusal.value)[-1].count("\n") == 1
    assert not multiprocessing.active_children(), "so no weights were read"


# -- servers ---------------------------------------------------------------------------------------


VLLM = """
import importlib.metadata as metadata, sys
found = metadata.version
def version(name):
    try:
        return found(name)
    except metadata.PackageNotFoundError:
        return f"{found(name + '-cpu')}+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""
"""The command ``vllm``, which looks for a package of its own name. The CPU build has another."""


@contextmanager
def served(model: Path, log: Path, *options: str, **more: str) -> Iterator[str]:
    """Run ``vllm serve`` with these variables more; yield its address, and end it in order."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", VLLM, "serve", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--block-size", "32", "--enforce-eager", "--no-enable-prefix-caching"]
    command += ["--max-model-len", "2048"]  # the model's own may not fit into what memory a busy machine has
    command += ["--shutdown-timeout", "30", "--enable-prompt-tokens-details", "--served-model-name", "demo", *options]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment("own", 1) | more)
        try:
            address, end_s = f"http://localhost:{port}", time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < end_s:
                try:
                    if httpx.get(f"{address}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.3)
            assert process.poll() is None, log.read_text()[-3000:]
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0


def ask(address: str) -> tuple[str, int]:
    """Return the answer to one prompt, and how many of its tokens were loaded."""
    body = {"model": "demo", "prompt": [(7 * at) % 500 for at in range(900)], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=START_S).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [(), ("--data-parallel-size", "2")], ids=["one", "two engines and API servers"])
def test_a_server_that_is_given_nothing_but_variables_hits_after_a_restart(tiny_llama, variables, tmp_path, options):
    more = variables | {"KVDISK_MIN_LOAD_TOKENS": "0"}
    with served(tiny_llama, tmp_path / "first.log", *options, **more) as address:
        text, cached = ask(address)
        assert cached == 0
    with served(tiny_llama, tmp_path / "second.log", *options, **more) as address:
        assert ask(address) == (text, 896)
        assert "vllm:kvdisk_hit_tokens_total" in httpx.get(f"{address}/metrics").text
    for name in ("first.log", "second.log"):
        log = (tmp_path / name).read_text()
        lines = re.findall(r"kvdisk: KVDISK_.* set the connector KVDiskConnector, as --kv-transfer-config would\.", log)
        assert len(lines) == (3 if options else 1), "of each process that builds a configuration"
        assert len(re.findall(r"kvdisk ready: ", log)) == (2 if options else 1), log[-3000:]


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_server_with_a_misspelt_variable_ends_with_a_sentence(tiny_llama, variables):
    command = [sys.executable, "-c", VLLM, "serve", str(tiny_llama)]
    more = variables | {"KVDISK_NVME_BYTE": "1GiB"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment("own", 1) | more, check=False)
    assert done.returncode and done.stderr.strip().splitlines()[-1] == (
        "kvdisk.errors.ConfigError: kvdisk does not know the variable 'KVDISK_NVME_BYTE'; the nearest it knows is "
        "'KVDISK_NVME_BYTES'."
    )
