# SPDX-License-Identifier: Apache-2.0
"""How much of the drive a queue hides: requests that wait in line, their blocks on NVMe, with and without prefetch.

    PYTHONPATH=tests python tools/measure_prefetch.py --store /nvme/somewhere

An engine without a model (``support.live_engine``) serves one request at a time; manager, mover, files and
index are real, and every byte is checked. Measured is how long a request waits when its turn has come: from the last
step of the one before it to its own first. Both ways alternate, each in an engine that has just started. Prints
medians and spread.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from support.live_engine import LiveEngine
from support.live_model import HASH_TOKENS, LiveModel

LETTERS = "abcdefghijklmnopqrstuvwxy"
OUTPUTS = 8


def make_prompts(count: int, blocks: int) -> list[str]:
    """Return prompts that share nothing, a few tokens longer than so many blocks."""
    rng = random.Random(0)  # noqa: S311 - no secret
    return ["".join(rng.choices(LETTERS, k=blocks * HASH_TOKENS + 2)) for _ in range(count)]


class Line:
    """An engine and the requests that stand in line before it. ``step_s``: what the model takes for a step."""

    def __init__(self, store: Path, model: LiveModel, prompts: list[str], step_s: float, *, prefetch: bool) -> None:
        blocks = sum(len(prompt) // HASH_TOKENS + OUTPUTS for prompt in prompts)
        largest = max(model.geometry.slot_sizes)
        config = model.config(
            str(store),
            blocks=2 * blocks,
            segment_blocks=64,
            cpu_bytes=2 * blocks * largest,
            staging_bytes=64 * largest,
            prefetch=prefetch,
            nvme_admission="all",
        )
        self._engine = LiveEngine(config, model, block_count=2 * len(prompts[0]) // HASH_TOKENS + 64)
        self._engine.most_running = 1
        self._prompts = prompts
        self._step_s = step_s

    def serve(self) -> tuple[list[float], dict[str, int]]:
        """Serve all; return how long each but the first waited at its turn, and the engine's counters."""
        engine = self._engine
        for number, prompt in enumerate(self._prompts):
            engine.add(f"{number}", prompt, OUTPUTS)
        waits: list[float] = []
        ended_s: float | None = None
        while engine.requests:
            for request in engine.running:
                request.finishing = len(request.tokens) >= request.most_tokens
            engine.step()
            now_s = time.perf_counter()
            if not engine.running:
                ended_s = ended_s or now_s
                continue
            if ended_s is not None:
                waits.append(now_s - ended_s)
                ended_s = None
            time.sleep(self._step_s)
        engine.run_until_quiet()
        counts = dict(engine.manager.stats.counts)
        engine.close()
        return waits[-(len(self._prompts) - 1) :], counts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="an empty place on the drive; by default a temporary directory")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=96, help="of a request")
    parser.add_argument("--block-kib", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = LiveModel(ranks=1, payload_bytes=options.block_kib << 10)
    prompts = make_prompts(options.requests, options.blocks)
    place = Path(tempfile.mkdtemp(prefix="kvdisk-prefetch-", dir=options.store))
    found: dict[bool, list[float]] = {False: [], True: []}
    from_memory: dict[bool, list[float]] = {False: [], True: []}
    try:
        Line(place / "store", model, prompts, 0.0, prefetch=False).serve()
        for _ in range(options.rounds):
            for prefetch in found:
                line = Line(place / "store", model, prompts, options.step_ms / 1000, prefetch=prefetch)
                waits, counts = line.serve()
                found[prefetch] += waits
                tokens = {tier: counts.get(f"hit_tokens.{tier}", 0) for tier in ("cpu", "nvme")}
                from_memory[prefetch].append(tokens["cpu"] / max(1, sum(tokens.values())))
    finally:
        shutil.rmtree(place)
    load = os.getloadavg()[0]
    print(f"{options.requests} requests of {options.blocks} blocks of {options.block_kib} KiB; load {load:.1f}")
    for prefetch, waits in found.items():
        ordered = sorted(waits)
        spread = f"{ordered[len(ordered) // 10] * 1e3:.0f}-{ordered[-1 - len(ordered) // 10] * 1e3:.0f}"
        share = statistics.median(from_memory[prefetch])
        print(
            f"{'with' if prefetch else 'without'} prefetch: a turn waits {statistics.median(waits) * 1e3:.0f} ms "
            f"({spread}), {share:.0%} of the loaded tokens from memory"
        )


if __name__ == "__main__":
    sys.exit(main())
