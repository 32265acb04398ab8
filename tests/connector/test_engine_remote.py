# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU that share a bucket of a real S3 server, and nothing else: the
tokens are those that the first of them has computed."""

from __future__ import annotations

import secrets

from engine_child import EngineChild
from torture_rounds import BLOCK_TOKENS, random_prompt, tokens_of

PROMPTS = [random_prompt(seed, 340) for seed in (31, 32)]
LIMITS = {"max_model_len": 1024, "num_gpu_blocks_override": 200}


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
    }
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=shared, **LIMITS) as engine:
        computed = tokens_of(engine.generate(PROMPTS, together=False))
        engine.drain()
        sent = engine.counters()["sent_blocks"]
        assert sent >= sum(len(prompt) // BLOCK_TOKENS for prompt in PROMPTS)
    store = {"store_dirs": str(tmp_path / "another host"), "nvme_bytes": "256MiB", "device": "posix"}
    with EngineChild(tiny_llama, tmp_path / "log", extra_config=shared | store, **LIMITS) as engine:
        found = engine.generate(PROMPTS, together=False)
        assert tokens_of(found) == computed
        assert [answer.cached for answer in found] == [
            (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS
        ]
        counters = engine.counters()
        read_ahead = counters.get("hit_tokens.cpu", 0)
        assert counters["hit_tokens.remote"] + read_ahead == sum(answer.cached for answer in found)
        assert not {name for name in counters if name.startswith(("failed", "verification_failures", "remote_rejects"))}
        s3_server.kill()
        try:
            engine.reset()
            assert tokens_of(engine.generate(PROMPTS, together=False)) == computed, "without the server"
        finally:
            s3_server.start()
