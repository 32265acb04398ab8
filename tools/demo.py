# SPDX-License-Identifier: Apache-2.0
"""The main job on real vLLM: prompts computed once, then loaded from memory, then from NVMe after a
restart.

Several users ask about the same long documents, which are cut from this repository's own text. vLLM
alone answers first; its tokens are what every pass must give, or the exit code is 1. Time to first
token is the median over those who ask a document first in a pass: nothing of it is on the GPU then.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_child import NEAR_TIE, Answer, EngineChild, EngineError, agrees, environment, vllm_device
from figures import Record, add_json_option
from rich import box
from rich.console import Console
from rich.table import Table

from kvdisk.cli.survey import survey_store

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
STORE = WORK / "store"
"""Emptied by each demo; a store in any other place is left alone."""
MODEL_KIND = "demo-llama"
DOCUMENTS = 3
MAX_TOKENS = 16
WARM_UP = list(range(10, 18))
"""Shorter than a block, so that nothing of it is stored; pays for what a process does at its first
request."""
QUESTIONS = (
    "\n\nQuestion of the first user: what is the text above about, what does it promise, and under which"
    " conditions does a promise not hold? Name the places that say so, and quote each in one line.\nAnswer:",
    "\n\nQuestion of the second user: which numbers does the text above give, in which units, and what is each"
    " of them a bound or a measurement of? Put them into a list, the largest first, and say which is missing.\nAnswer:",
)
TABLE_WIDTH = 100


class DemoError(Exception):
    """What went wrong, for the user."""


@dataclass(frozen=True)
class Pass:
    """One row of the table. ``counted``: what kvdisk counted in it; ``nvme_bytes``: of blocks on
    the drive after it."""

    name: str
    prompts: list[list[int]]
    answers: list[Answer]
    counted: dict[str, int]
    nvme_bytes: int | None

    @property
    def from_cpu(self) -> int:
        """Tokens loaded from the CPU tier."""
        return self.counted.get("hit_tokens.cpu", 0)

    @property
    def from_nvme(self) -> int:
        """Tokens loaded from NVMe."""
        return self.counted.get("hit_tokens.nvme", 0)

    @property
    def from_remote(self) -> int:
        """Tokens loaded from the remote store."""
        return self.counted.get("hit_tokens.remote", 0)

    @property
    def from_gpu(self) -> int:
        """Tokens that were in the GPU prefix cache."""
        loaded = self.from_cpu + self.from_nvme + self.from_remote
        return sum(answer.cached for answer in self.answers) - loaded

    def agrees_with(self, alone: Pass) -> bool:
        """Whether the answers are those of vLLM alone."""
        near = NEAR_TIE[vllm_device()]
        return all(agrees(wanted, answer, near) for wanted, answer in zip(alone.answers, self.answers, strict=True))

    def ttft_s(self, asker: int) -> float:
        """Median time to first token of those who asked a document first (0) or second (1)."""
        return statistics.median(self.ttfts_s(asker))

    def ttfts_s(self, asker: int) -> list[float]:
        """Return their times, document by document."""
        return [answer.ttft_s for answer in self.answers[asker :: len(QUESTIONS)]]


Rows = list[tuple[str, Callable[[Pass], str]]]
"""Of a table: what stands at the left, and the cell of a pass."""


class Demo:
    """The engines and their passes. ``say`` is told what runs now."""

    def __init__(
        self, options: argparse.Namespace, model: Path, prompts: list[list[int]], say: Callable[[str], None]
    ) -> None:
        self.options = options
        self.model = model
        self.prompts = prompts
        self.say = say
        self.config = {
            "store_dirs": str(options.store),
            "nvme_bytes": options.nvme_bytes,
            "cpu_bytes": options.cpu_bytes,
            "segment_bytes": "64MiB",
        }

    def run(self) -> list[Pass]:
        """Run vLLM alone, then the three passes with kvdisk. Raises EngineError."""
        with self.start("vLLM alone", "alone", None) as engine:
            passes = [self.ask("vLLM alone", engine)]
        with self.start("vLLM with kvdisk", "first", self.config) as engine:
            passes.append(self.ask("cold", engine, self.options.store))
            engine.reset()
            passes.append(self.ask("warm from CPU", engine, self.options.store))
        with self.start("vLLM with kvdisk again", "second", self.config) as engine:
            passes.append(self.ask("after a restart, from NVMe", engine, self.options.store))
        return passes

    def start(self, what: str, name: str, config: dict[str, Any] | None) -> EngineChild:
        """Start an engine, whose log is named. Raises EngineError."""
        self.say(f"starting {what}")
        log = WORK / f"engine-{name}.log"
        log.unlink(missing_ok=True)
        engine = EngineChild(
            self.model,
            log,
            extra_config=config,
            kv_gib=self.options.kv_gib,
            max_model_len=max(map(len, self.prompts)) + MAX_TOKENS,
        )
        engine.generate([WARM_UP], 2)
        return engine

    def ask(self, name: str, engine: EngineChild, store: Path | None = None) -> Pass:
        """Have an engine answer every prompt. ``store``: whose bytes are told of."""
        self.say(f"asking: {name}")
        before = engine.counters() if engine.connected else {}
        answers = engine.generate(self.prompts, MAX_TOKENS, together=False, gaps=not engine.connected)
        if not engine.connected:
            return Pass(name, self.prompts, answers, {}, None)
        engine.drain()
        counted = {counter: count - before.get(counter, 0) for counter, count in engine.counters().items()}
        used = None if store is None else survey_store(store).totals.used_bytes
        return Pass(name, self.prompts, answers, counted, used)


def verdict(passes: Sequence[Pass]) -> list[str]:
    """Return what is wrong with the passes, in sentences; nothing where the demo showed what it is
    for."""
    _, _, from_cpu, from_nvme = passes
    wrong = wrong_tokens(passes)
    if not from_cpu.from_cpu:
        wrong.append("Nothing was loaded from the CPU tier.")
    if not from_nvme.from_nvme:
        wrong.append("Nothing was loaded from NVMe.")
    return wrong


def wrong_tokens(passes: Sequence[Pass]) -> list[str]:
    """Return which passes gave other tokens than the first, in sentences."""
    return [
        f"The pass '{one.name}' gave other tokens than vLLM alone." for one in passes if not one.agrees_with(passes[0])
    ]


def rows_of(passes: Sequence[Pass], loaded: Rows) -> Rows:
    """Return the rows that every demo has. ``loaded``: where tokens came from. The first pass is
    vLLM's alone, the second starts cold."""
    alone, cold = passes[0], passes[1]
    return [
        ("prompt tokens", lambda one: f"{sum(map(len, one.prompts)):,}"),
        *loaded,
        ("  in the GPU prefix cache", lambda one: f"{one.from_gpu:,}"),
        ("median TTFT", lambda one: f"{one.ttft_s(0):.3f} s"),
        ("  ratio to cold", lambda one: f"{one.ttft_s(0) / cold.ttft_s(0):.3f}"),
        ("  of the 2nd user", lambda one: f"{one.ttft_s(1):.3f} s"),
        (
            "same tokens as without kvdisk",
            lambda one: "" if one is alone else ("no", "yes")[one.agrees_with(alone)],
        ),
    ]


def table_of(passes: Sequence[Pass]) -> Table:
    """Return the table that the demo ends with."""
    loaded: Rows = [
        ("  loaded from the CPU tier", lambda one: f"{one.from_cpu:,}"),
        ("  loaded from NVMe", lambda one: f"{one.from_nvme:,}"),
    ]
    stored: Rows = [("on NVMe", lambda one: "" if one.nvme_bytes is None else f"{one.nvme_bytes / 2**20:,.0f} MiB")]
    return draw(passes, rows_of(passes, loaded) + stored)


def note(passes: Sequence[Pass], record: Record) -> None:
    """Note what the table has, and of whom it has the medians."""
    cold = passes[1].ttft_s(0)
    for one in passes:
        record.add("passes", "prompt tokens", one.name, [sum(map(len, one.prompts))])
        record.add("passes", "loaded from the CPU tier", one.name, [one.from_cpu])
        record.add("passes", "loaded from NVMe", one.name, [one.from_nvme])
        record.add("passes", "in the GPU prefix cache", one.name, [one.from_gpu])
        record.add("passes", "time to first token", one.name, one.ttfts_s(0), "s")
        record.add("passes", "of cold", one.name, [one.ttft_s(0) / cold])
        record.add("passes", "time to first token of the 2nd user", one.name, one.ttfts_s(1), "s")


def draw(passes: Sequence[Pass], rows: Rows) -> Table:
    """Return a table with a column for each pass."""
    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for one in passes:
        table.add_column(one.name, justify="right", max_width=9)
    for label, cell in rows:
        table.add_row(label, *map(cell, passes))
    return table


def repository_texts() -> list[Path]:
    """Return the text that the documents are cut from and the tokenizer is trained on."""
    prose = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "LICENSE"]
    return [*prose, *sorted((ROOT / "kvdisk").rglob("*.py"))]


def build_model(kind: str = MODEL_KIND) -> Path:
    """Build a model in a process of its own, or find it built. Raises DemoError."""
    directory = WORK / ("model" if kind == MODEL_KIND else kind)
    command = [sys.executable, str(ROOT / "tools" / "tiny_models.py"), kind, str(directory)]
    log = WORK / "model.log"
    with log.open("w") as output:
        done = subprocess.run(
            [*command, *map(str, repository_texts())],
            env=environment("inproc", 1),
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode != 0:
        raise DemoError(f"The model could not be built; {log} says why.")
    return directory


def cut_prompts(model: Path, prompt_tokens: int) -> list[list[int]]:
    """Return every user's prompt: a document of the repository's text and a question, document by
    document.

    The prompts of one document share all but the question. Raises DemoError.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:
        raise DemoError(f"{model} has no tokenizer.json that can be read: {error}.") from None
    questions = [tokenizer.encode(question, add_special_tokens=False).ids for question in QUESTIONS]
    length = prompt_tokens - max(map(len, questions))
    text = "\n\n".join(path.read_text() for path in repository_texts())
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if length < 1 or DOCUMENTS * length > len(tokens):
        longest = len(tokens) // DOCUMENTS
        raise DemoError(f"Prompts of {prompt_tokens} tokens cannot be cut from here; {longest} is about the longest.")
    documents = [tokens[start * length : (start + 1) * length] for start in range(DOCUMENTS)]
    return [document + question for document in documents for question in questions]


def clear_store(store: Path) -> None:
    """Remove the store of the last demo. Raises DemoError where anything lies elsewhere."""
    if store == STORE:
        shutil.rmtree(store, ignore_errors=True)
    elif store.exists() and any(store.iterdir()):
        raise DemoError(f"{store} is not empty, so it is left alone; remove it, or name another place with STORE=.")
    store.parent.mkdir(parents=True, exist_ok=True)


def said_ready() -> list[str]:
    """Return what the engines' logs say of the room that they have, a line for each start."""
    found = []
    for name in ("first", "second"):
        log = WORK / f"engine-{name}.log"
        said = re.findall(r"kvdisk ready: .*", log.read_text(errors="replace")) if log.exists() else []
        found += [f"{name} start: {line}" for line in said]
    return found


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a local model directory; without it a random one is built")
    parser.add_argument("--store", type=Path, default=STORE, help="where the store lies")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--nvme-bytes", default="4GiB", help="cap of the store")
    parser.add_argument("--cpu-bytes", default="1GiB", help="host memory of the CPU tier")
    parser.add_argument("--kv-gib", type=int, default=1, help="GiB of vLLM's own KV cache")
    add_json_option(parser)
    options = parser.parse_args()
    options.store = options.store.absolute()
    return options


def run_demo(options: argparse.Namespace, console: Console) -> list[Pass]:
    """Run everything, and say what runs now. Raises DemoError, EngineError."""
    with console.status("") as status:

        def say(what: str) -> None:
            status.update(what)
            if not console.is_terminal:
                console.print(f"kvdisk: {what}")

        say("building the model" if options.model is None else "reading the model")
        if options.model is not None and not (options.model / "config.json").exists():
            raise DemoError(f"{options.model} is not a model directory: it has no config.json.")
        clear_store(options.store)
        model = build_model() if options.model is None else options.model.absolute()
        return Demo(options, model, cut_prompts(model, options.prompt_tokens), say).run()


def main() -> int:
    """Run the demo and print its table; 0 when every token is right and every tier was read."""
    options = parse_options()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=TABLE_WIDTH)
    WORK.mkdir(exist_ok=True)
    record = Record(WORK)
    try:
        passes = run_demo(options, console)
    except (DemoError, EngineError) as failure:
        console.print(f"kvdisk: {failure}", markup=False, soft_wrap=True)
        return 1
    console.print()
    console.print(table_of(passes))
    console.print(
        f"{DOCUMENTS} documents, {len(QUESTIONS)} users each, one after the other. TTFT is the time to the first token"
        " for those who ask a document first: nothing of it is on the GPU then. The 2nd user finds it there."
    )
    for line in said_ready():
        console.print(line, markup=False, soft_wrap=True)
    wrong = verdict(passes)
    note(passes, record)
    record.write(options.json)
    for sentence in wrong:
        console.print(f"kvdisk: {sentence}", style="bold red", soft_wrap=True)
    store = options.store.relative_to(Path.cwd()) if options.store.is_relative_to(Path.cwd()) else options.store
    command = "kvdisk" if shutil.which("kvdisk") else f"{Path(sys.prefix).name}/bin/kvdisk"
    console.print(f"Look at the store that it left:  {command} inspect {store}", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
