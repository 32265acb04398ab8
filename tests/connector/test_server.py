# SPDX-License-Identifier: Apache-2.0
"""vLLM's real server, as ``make serve`` starts it, through HTTP with OpenAI's client, on what
another process has stored: streaming, cancelled."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_child import START_S, STEADY, EngineChild, environment
from openai import OpenAI
from support.waits import until
from test_deploy import probe_paths
from typer.testing import CliRunner

from kvdisk.cli import verify
from kvdisk.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
LICENSE, LETTERS = (ROOT / "LICENSE").read_text(), 2000
BLOCK_TOKENS = 32
PROMPT = [(7 * at + at // 50) % 500 for at in range(1000)]
WHOLE = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""Of the prompt, in full blocks: what can be loaded."""


@contextmanager
def server(
    model: Path, store: Path, log: Path, typed: list[str] | None = None, engines: int = 1, **settings: Any
) -> Iterator[OpenAI]:
    """Start the server; yield a client of it, and end it in order. ``typed``: takes the lines that
    it says to type. ``engines``: data-parallel ranks. ``settings``: more of kvdisk's."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    options = ["--model", model, "--store", store, "--port", port, "--cpu-bytes", "64Mi", "--nvme-bytes", "256Mi"]
    options += ["--settings", json.dumps(settings), "--data-parallel-size", engines]
    command = [sys.executable, ROOT / "tools" / "serve.py", *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment("own", 1),
        )
        assert process.stdout is not None
        try:
            said = []
            while not (said and said[-1].endswith("# second\n")) and (line := process.stdout.readline()):
                said.append(line)
            lines = [line.strip() for line in said if f"localhost:{port}/v1/completions" in line]
            assert len(lines) == 2, log.read_text()[-3000:]
            if typed is not None:
                typed += lines
            yield OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", timeout=START_S, max_retries=0)
        finally:
            process.send_signal(signal.SIGTERM)
            output.write(process.stdout.read())  # where vLLM's log goes, ours with it
            assert process.wait(START_S) == 0


def ask(client: OpenAI, rank: int | None = None, **more: str) -> tuple[str, int]:
    """Return the answer, and how many tokens of the prompt were not computed. ``rank``: that is to
    answer. ``more``: vLLM's own fields of a request."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    done = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=8, temperature=0, extra_body=more, extra_headers=headers
    )
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    return done.choices[0].text, done.usage.prompt_tokens_details.cached_tokens or 0


def ask_streaming(client: OpenAI) -> tuple[str, int]:
    """Return the same of an answer that comes in pieces."""
    text, cached = "", 0
    options = {"include_usage": True}
    for piece in client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=8, temperature=0, stream=True, stream_options=options
    ):
        text += "".join(choice.text for choice in piece.choices)
        if piece.usage is not None and piece.usage.prompt_tokens_details is not None:
            cached = piece.usage.prompt_tokens_details.cached_tokens or 0
    return text, cached


def type_it(line: str) -> list[str]:
    """Do what a line does in a shell, without needing curl and grep, with a prompt that is short
    enough for the tiny model; return what it prints."""
    asked, _, shown = line.partition(" | ")
    words = shlex.split(asked)
    assert words[:2] == ["curl", "-s"] and words[3:6] == ["-H", "Content-Type: application/json", "-d"]
    body = json.loads(Path(words[6].removeprefix("@")).read_text())
    answer = httpx.post(f"http://{words[2]}", json=body | {"prompt": body["prompt"][:LETTERS]}, timeout=START_S)
    assert answer.status_code == 200, answer.text
    grep = shlex.split(shown, comments=True)
    assert grep[:2] == ["grep", "-o"]
    return re.findall(grep[2], answer.text)


def hit_tokens(client: OpenAI) -> dict[str, float]:
    """Return what /metrics says was hit, by tier."""
    text = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    found = re.findall(r'^vllm:kvdisk_hit_tokens_total\{.*tier="(\w+)".*\} ([\d.e+]+)$', text, re.MULTILINE)
    return {tier: float(value) for tier, value in found}


def test_a_client_sees_hits_of_another_process_streaming_and_after_a_cancelled_request(tiny_llama, tmp_path):
    store = tmp_path / "store"
    settings = {"cpu_bytes": 0, "store_dirs": str(store), "nvme_bytes": "256MiB", **STEADY}
    variables = {f"KVDISK_{key.upper()}": str(value) for key, value in settings.items()}
    with EngineChild(tiny_llama, tmp_path / "engine.log", env=variables) as engine:
        engine.generate([PROMPT])
        engine.drain()
    assert "of the environment set the connector KVDiskConnector" in (tmp_path / "engine.log").read_text()
    typed: list[str] = []
    trace = tmp_path / "trace.jsonl"
    with server(tiny_llama, store, tmp_path / "server.log", typed, trace_file=str(trace)) as client:
        text, cached = ask(client, cache_salt="nobody else's")
        assert cached == 0, "the server computes it"
        assert ask(client) == (text, WHOLE), "from NVMe"
        assert hit_tokens(client)["nvme"] >= WHOLE
        assert ask(client) == ask_streaming(client) == (text, WHOLE)
        stream = client.completions.create(
            model="demo", prompt=[*PROMPT, 3, 4, 5], max_tokens=900, temperature=0, stream=True
        )
        next(iter(stream))
        stream.close()
        assert ask(client) == (text, WHOLE), "a client that left has done no harm"
        assert hit_tokens(client)["cpu"] >= 3 * WHOLE
        for path in probe_paths():
            assert httpx.get(str(client.base_url).replace("/v1/", path)).status_code == 200, path
        first, second = map(type_it, typed)
        assert first == ['"cached_tokens":0'] and int(second[0].partition(":")[2]) > 300
        known = httpx.post(
            str(client.base_url).replace("/v1/", "/tokenize"), json={"model": "demo", "prompt": LICENSE[:LETTERS]}
        )
        (tmp_path / "tokens.json").write_text(known.text)
        hit = sum(hit_tokens(client).values())
    log = (tmp_path / "server.log").read_text()
    told = re.findall(r"kvdisk.*|req cmpl.*", log)
    line = r"req cmpl-\S+: 1,000 prompt tokens = 0 GPU \+ 0 CPU \+ 992 NVMe \+ 8 computed; load "
    assert re.search(line, log) and re.search(r"kvdisk ends after .*hit", log), told
    why = CliRunner().invoke(app, ["why", str(store), "--tokens", str(tmp_path / "tokens.json")])
    count = known.json()["count"]
    assert f"{(count - 1) // BLOCK_TOKENS * BLOCK_TOKENS:,} of {count:,} prompt tokens would hit" in why.stdout
    assert not verify.verify_store([store]).wrong
    replayed = CliRunner().invoke(app, ["replay", str(trace), "--nvme", "100%", "--json", "--processes", "1"])
    assert replayed.exit_code == 0, replayed.stderr
    found = json.loads(replayed.stdout)
    assert (found["trace"]["form"], found["trace"]["requests"]) == ("kvdisk", trace.read_text().count("\n") - 1)
    assert sum(found["runs"][0]["hit_tokens"].values()) == hit - WHOLE, "but for what another process had stored"


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_restarted_server_hits_what_it_stored_before(tiny_llama, tmp_path):
    store = tmp_path / "store"
    with server(tiny_llama, store, tmp_path / "first.log") as client:
        text, cached = ask(client)
        assert cached == 0
        assert ask(client) == (text, WHOLE)
    with server(tiny_llama, store, tmp_path / "second.log") as client:
        assert ask(client) == (text, WHOLE)
        assert hit_tokens(client)["nvme"] >= WHOLE


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_data_parallel_rank_hits_what_another_has_stored(tiny_llama, tmp_path):
    store = tmp_path / "store"
    trace = tmp_path / "trace.jsonl"
    with server(tiny_llama, store, tmp_path / "log", engines=2, trace_file=str(trace), lookup_wait_s=60) as client:
        text, cached = ask(client, rank=0)
        assert cached == 0
        until(lambda: sum(one.blocks for one in verify.verify_store([store]).engine_stores) >= WHOLE // BLOCK_TOKENS)
        assert ask(client, rank=1) == (text, WHOLE), "from the drive, where rank 0 wrote it"
        assert hit_tokens(client)["nvme"] >= WHOLE

        def ranks() -> list[int]:
            shown = json.loads(CliRunner().invoke(app, ["top", str(store), "--json"]).stdout)
            return sorted(engine["data_parallel_rank"] for engine in shown["engines"] if engine["pid"])

        until(lambda: ranks() == [0, 1])
    assert trace.exists() and trace.with_name("trace-dp1.jsonl").exists()
