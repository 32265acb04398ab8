# SPDX-License-Identifier: Apache-2.0
"""kvdisk behind vLLM's own ``OffloadingConnector``, beside vLLM's own ``fs`` tier: the prompts of
``make demo``, cold, after a restart, and with bits flipped on the drive.

vLLM's worker for its host memory needs a GPU; without one the tests' own copies on the host stand
for it, and all else is vLLM's: connector, manager, memory, tiers. The exit code is 1 where kvdisk
gave other tokens than vLLM alone, found nothing after the restart, or took more of the drive than
its cap.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors import Offloading, flip_bits, python_path, taken_bytes
from demo import MAX_TOKENS, QUESTIONS, WARM_UP, WORK, DemoError, build_model, cut_prompts
from engine_child import NEAR_TIE, Answer, EngineChild, EngineError, agrees, vllm_device
from rich import box
from rich.console import Console
from rich.table import Table

PLACE = WORK / "offloading"
"""Emptied by each demo."""
TABLE_WIDTH = 80
TIERS = ("fs", "kvdisk")


@dataclass(frozen=True)
class Run:
    """One column of the table. ``drive_bytes``: what the tier's directory takes after the run;
    None: there is none."""

    tier: str
    name: str
    answers: list[Answer]
    drive_bytes: int | None = None

    def agrees_with(self, alone: Run) -> bool:
        """Whether the answers are those of vLLM alone."""
        near = NEAR_TIE[vllm_device()]
        return all(agrees(wanted, answer, near) for wanted, answer in zip(alone.answers, self.answers, strict=True))

    @property
    def first(self) -> list[Answer]:
        """The answers to those who ask a document first: the GPU has nothing of it."""
        return self.answers[:: len(QUESTIONS)]

    @property
    def found(self) -> int:
        """Prompt tokens that were found behind the GPU."""
        return sum(answer.cached for answer in self.first)


def run_all(options: argparse.Namespace, say: Callable[[str], None]) -> list[Run]:
    """Run vLLM with no tier, then three engines with each. Raises DemoError, EngineError."""
    say("building the model")
    model = build_model()
    prompts = cut_prompts(model, options.prompt_tokens)

    def ask(tier: str, name: str, directory: Path | None = None) -> Run:
        say(f"asking: {tier}, {name}")
        how: dict[str, Any] = {}
        if directory is not None:
            way = Offloading(tier, tier=tier)
            how["kv_transfer_config"] = way.transfer_config(directory, options.memory_mib << 20, options.cap_mib << 20)
        with EngineChild(
            model,
            WORK / f"engine-{tier}.log",
            env=python_path(),
            max_model_len=max(map(len, prompts)) + MAX_TOKENS,
            **how,
        ) as engine:
            engine.generate([WARM_UP], 2)
            answers = engine.generate(prompts, MAX_TOKENS, together=False, gaps=directory is None)
            engine.drain()
        return Run(tier, name, answers, None if directory is None else taken_bytes(directory))

    runs = [ask("none", "computed")]
    for tier in TIERS:
        directory = PLACE / tier
        runs += [ask(tier, name, directory) for name in ("cold", "restarted")]
        if not flip_bits(directory):
            raise DemoError(f"{tier} has left no KV in {directory}.")
        runs.append(ask(tier, "bits flipped", directory))
    return runs


def verdict(runs: Sequence[Run], cap_bytes: int) -> list[str]:
    """Return what is wrong with kvdisk's runs, in sentences."""
    alone, *others = runs
    ours = [run for run in others if run.tier == "kvdisk"]
    wrong = [f"kvdisk, {run.name}: other tokens than vLLM alone." for run in ours if not run.agrees_with(alone)]
    if not any(run.name == "restarted" and run.found for run in ours):
        wrong.append("kvdisk: nothing was found after the restart.")
    wrong += [
        f"kvdisk, {run.name}: {run.drive_bytes:,} bytes on the drive, over the cap of {cap_bytes:,}."
        for run in ours
        if (run.drive_bytes or 0) > cap_bytes
    ]
    return wrong


def table_of(runs: Sequence[Run], cap_bytes: int) -> Table:
    """Return the table that the demo ends with: a row for each run."""
    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("tier", no_wrap=True)
    table.add_column("run", no_wrap=True)
    for title in ("tokens found", "median TTFT", "answers right", "on the drive", "its cap"):
        table.add_column(title, justify="right", min_width=7)
    for run in runs:
        cells = [f"{run.found:,}", f"{statistics.median(answer.ttft_s for answer in run.first):.2f} s"]
        if run is not runs[0]:
            cells.append("yes" if run.agrees_with(runs[0]) else "NO")
        if run.drive_bytes is not None:
            cap = f"{cap_bytes / 2**20:,.0f} MiB" if run.tier == "kvdisk" else "none"
            cells += [f"{run.drive_bytes / 2**20:,.0f} MiB", cap]
        table.add_row(run.tier, run.name, *cells)
    return table


def main() -> int:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--memory-mib", type=int, default=256, help="of vLLM's own host memory")
    parser.add_argument("--cap-mib", type=int, default=512, help="of kvdisk's store")
    options = parser.parse_args()
    console = Console(highlight=False, width=TABLE_WIDTH)
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    for tier in ("none", *TIERS):
        (WORK / f"engine-{tier}.log").unlink(missing_ok=True)
    try:
        runs = run_all(options, lambda what: console.print(f"kvdisk: {what}"))
    except (DemoError, EngineError) as failure:
        console.print(f"kvdisk: {failure}", markup=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(PLACE, ignore_errors=True)
    console.print(table_of(runs, options.cap_mib << 20))
    console.print(
        "Tokens found and TTFT, the time to the first token, are of those who ask each of the"
        f" {len(runs[0].first)} documents first: the GPU has nothing of it. 'bits flipped': one in every 64 KiB of KV"
        " on the drive, before the engine starts again."
    )
    wrong = verdict(runs, options.cap_mib << 20)
    for sentence in wrong:
        console.print(f"kvdisk: {sentence}", style="bold red", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
