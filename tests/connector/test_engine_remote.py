# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU that share a bucket of a real S3 server, and nothing else: the
tokens are those that the first of them has computed."""

from __future__ import annotations

import secrets

import obstore
import pytest
from engine_child import EngineChild
from obstore.store import from_url
from test_model_kinds import KINDS
from torture_rounds import BLOCK_TOKENS, HERE, random_prompt, tokens_of

from kvdisk.remote.planes import SUFFIX

PROMPTS = [random_prompt(seed, 340) for seed in (31, 32)]
LIMITS = {"max_model_len": 1024, "num_gpu_blocks_override": 200}


def hit_tokens(counters: dict[str, float]) -> float:
    """Those of the remote store: of them that was read ahead, all maybe, counts as memory's."""
    return sum(counters.get(f"hit_tokens.{tier}", 0) for tier in ("remote", "cpu"))


def test_the_first_request_of_one_host_is_a_hit_from_another(tiny_llama, tmp_path, s3_server):
    key = tmp_path / "key"
    key.write_bytes(secrets.token_bytes(32))
    shared = {
        "cpu_bytes": "64MiB",
        "remote": f"s3://kvdisk-tests/{secrets.token_hex(8)}",
        "remote_options": s3_server.options,
        "remote_admission": "all",
        "remote_deadline_s": 60,
        "lookup_wait_s": 60,
        "remote_key_file": str(key),
        "remote_codec": "zstd-planes",
    }
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=shared, **LIMITS) as engine:
        computed = tokens_of(engine.generate(PROMPTS, together=False))
        engine.drain()
        sent = engine.counters()["sent_blocks"]
        assert sent >= sum(len(prompt) // BLOCK_TOKENS for prompt in PROMPTS)
        bucket = from_url(shared["remote"], config=s3_server.options, client_options={"allow_http": True})
        there = [meta for page in obstore.list(bucket) for meta in page]
        assert len(there) == sent and all(meta["path"].endswith(SUFFIX) for meta in there)
        assert obstore.get(bucket, there[0]["path"]).bytes().to_bytes()[8] == 4, "planes, as the KV is float32"
        assert engine.counters()["remote_written_bytes"] == sum(meta["size"] for meta in there)
    store = {"store_dirs": str(tmp_path / "another host"), "nvme_bytes": "256MiB", "device": "posix"}
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=shared | store, **LIMITS) as engine:
        found = engine.generate(PROMPTS, together=False)
        assert tokens_of(found) == computed
        assert [answer.cached for answer in found] == [
            (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS
        ]
        counters = engine.counters()
        assert hit_tokens(counters) == sum(answer.cached for answer in found)
        assert not {name for name in counters if name.startswith(("failed", "verification_failures", "remote_rejects"))}
        s3_server.kill()
        try:
            engine.reset()
            assert tokens_of(engine.generate(PROMPTS, together=False)) == computed, "without the server"
        finally:
            s3_server.start()


@pytest.mark.torture
@pytest.mark.parametrize("name", ["granite4", "qwen3-next"])
def test_recurrent_states_of_one_host_are_a_hit_on_another(name, models, tmp_path, s3_server):
    kind, counted = KINDS[name], []
    shared = {
        "cpu_bytes": "64MiB",
        "remote": f"s3://kvdisk-tests/{secrets.token_hex(8)}",
        "remote_options": s3_server.options,
        "remote_admission": "all",
        "remote_deadline_s": 60,
        "lookup_wait_s": 60,
    }
    limits = {"max_model_len": 1024, "num_gpu_blocks_override": 400, **kind.limits}
    prompts = [random_prompt(seed, 340) for seed in (31, 32)]
    for _ in range(2):
        with EngineChild(models(name), tmp_path / "log", extra_config=shared, env=HERE, **limits) as engine:
            counted.append(engine.generate(prompts, together=False))
            engine.drain()
            counters = engine.counters()
    assert tokens_of(counted[0]) == tokens_of(counted[1])
    whole = [kind.whole_tokens(prompt, tmp_path / "log") for prompt in prompts]
    assert [answer.cached for answer in counted[1]] == whole
    assert hit_tokens(counters) == sum(whole)
