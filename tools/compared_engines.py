# SPDX-License-Identifier: Apache-2.0
"""What the comparisons share: their options and the order of the ways; engines of one model, with
whatever keeps its KV; other weights under its path; nothing in the kernel's page cache."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from connectors import Way, python_path
from demo import WARM_UP, WORK, DemoError, build_model
from engine_child import CPU, EngineChild, EngineError, vllm_device
from machine import Machine

from kvdisk.cli.model_kv import read_model

ALONE = "vLLM alone"


@dataclass
class FoundOfWay:
    """What was found of a way; a comparison adds its figures. ``failed``: why it ended before all
    was done."""

    way: str
    is_ours: bool = False
    failed: str = ""


F = TypeVar("F", bound=FoundOfWay)


def options_for(summary: str, ways: Sequence[Way]) -> argparse.ArgumentParser:
    """Return a parser with the options that every comparison has."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--model", type=Path, help="a local model directory; without it a random one is built")
    parser.add_argument("--dir", type=Path, default=WORK, help="a directory on the drive")
    names = [way.name for way in ways]
    parser.add_argument("--only", nargs="+", choices=names, help="of the ways, these; vLLM alone runs always")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", type=Path, help="where the figures go, after each way")
    return parser


class ComparedEngines(ABC, Generic[F]):
    """A comparison, and the engines of one model that it starts, one at a time. ``options``: of
    ``options_for``. ``place``: a directory on the drive; what is made there is the caller's.
    ``gpu_bytes``, ``most_tokens``: vLLM's own cache, and the longest prompt with its answer; a
    subclass sets them."""

    found_type: type[F]
    gpu_bytes: int
    most_tokens: int

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        self.options, self.place, self._eager = options, place, options.eager
        kind = "demo-llama" if vllm_device() == CPU else "bench-llama"
        model = build_model(kind) if options.model is None else options.model.absolute()
        self.model = place / "model"  # a copy: a trial changes its weights
        shutil.copytree(model, self.model)
        config = json.loads((self.model / "config.json").read_text())
        self.vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        kv = read_model(self.model, dtype="float32" if vllm_device() == CPU else "bfloat16")
        self.token_bytes = sum(kv.kv_heads * kv.head_elements * kv.element_bytes for _ in kv.windows)

    @abstractmethod
    def run_alone(self) -> F:
        """Run vLLM alone: what it answers is right. Raises EngineError."""

    @abstractmethod
    def run(self, way: Way, found: F) -> None:
        """Run one way through all, as far as it gets. Raises EngineError."""

    @property
    def figures(self) -> dict[str, Any]:
        """What ``--json`` has beside what was found."""
        return {"hardware": hardware(self.place)}

    @contextmanager
    def engine(self, name: str, transfer: dict[str, Any] | None = None) -> Iterator[EngineChild]:
        """Start an engine that has answered a first request. Raises EngineError."""
        how: dict[str, Any] = {} if transfer is None else {"kv_transfer_config": transfer}
        if vllm_device() != CPU:
            how["enforce_eager"] = self._eager
        with EngineChild(
            self.model,
            WORK / f"compared-{name.replace(' ', '-').replace(',', '')}.log",
            env=python_path(),
            kv_gib=-(-self.gpu_bytes // (1 << 30)),
            max_model_len=self.most_tokens,
            **how,
        ) as engine:
            engine.generate([WARM_UP], 2)
            yield engine

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Have other weights under the model's path: a layer's keys in another order."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        for path in sorted(self.model.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names, metadata = sorted(file.keys()), file.metadata()
                name = next((name for name in names if "k_proj.weight" in name or "qkv_proj.weight" in name), None)
                if name is not None:
                    tensors = {each: file.get_tensor(each) for each in names}
                    break
        else:
            raise EngineError(f"{self.model} has no weights whose keys could be changed.")
        kept = path.with_suffix(".kept")
        tensors[name] = tensors[name].flip(0).contiguous()
        path.rename(kept)
        try:
            save_file(tensors, path, metadata=metadata)
            yield
        finally:
            kept.replace(path)


def run_all(compared: ComparedEngines[F], ways: Sequence[Way], say: Callable[[str], None]) -> list[F]:
    """Run every way, and keep what is found after each. Raises EngineError where vLLM alone
    fails."""
    options = compared.options
    say(f"asking {ALONE}")
    found = [compared.run_alone()]
    for way in (one for one in ways if not options.only or one.name in options.only):
        say(f"asking {way.name}")
        found.append(one := compared.found_type(way.name, way.is_ours))
        try:
            compared.run(way, one)
        except EngineError as failure:
            one.failed = str(failure)
            say(f"{way.name} ended before all was done: {one.failed.splitlines()[0]}")
        if options.json is not None:
            options.json.write_text(json.dumps(compared.figures | {"found": list(map(asdict, found))}, indent=1))
    return found


def compare(
    make: Callable[[argparse.Namespace, Path], ComparedEngines[F]],
    options: argparse.Namespace,
    ways: Sequence[Way],
    say: Callable[[str], None],
) -> tuple[list[F], str] | None:
    """Return what was found of every way, and on what; None, which ``say`` has explained, where
    vLLM alone fails. Leaves nothing in ``--dir``."""
    WORK.mkdir(exist_ok=True)
    options.dir.mkdir(parents=True, exist_ok=True)
    for log in WORK.glob("compared-*.log"):
        log.unlink()
    with tempfile.TemporaryDirectory(prefix="kvdisk-compared-", dir=options.dir) as place:
        try:
            say("building the model")
            return run_all(make(options, Path(place)), ways, say), hardware(Path(place))
        except (DemoError, EngineError) as failure:
            say(str(failure))
            return None


def markdown_of(found: Sequence[FoundOfWay], rows: Sequence[tuple[str, list[str]]]) -> str:
    """Return a table as Markdown: a column for each way, and rows of a label and cells."""
    lines = [f"| | {' | '.join(one.way for one in found)} |", "|---" * (len(found) + 1) + "|"]
    return "\n".join([*lines, *(f"| {label} | {' | '.join(cells)} |" for label, cells in rows)])


def drop_pages() -> None:
    """Let nothing come from the kernel's page cache, where that may be said."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def hardware(place: Path) -> str:
    """Return what the figures were measured on, in a sentence."""
    sentence = Machine.here(place).sentence
    if vllm_device() == CPU:
        return f"vLLM's CPU build; {sentence}"
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return f"{subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()}; {sentence}"
