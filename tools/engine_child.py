# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, each in a child process that is driven act by act.

``EngineChild`` starts one and talks to it in JSON lines; the demo, the throughput measurement and
the engine tests all run on it. Started as a script, this file is that child. It must stay cheap to
import and keep its ``__main__`` guard, because vLLM's own processes import it again (spawn).

Layouts: ``inproc`` (scheduler, worker and connector in one process), ``own`` (the engine and its
worker in processes of their own), ``tp2`` (``own`` with two workers, tensor parallel), ``pp2``
(pipeline parallel), ``tp2pp2`` (both, with four).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

LAYOUTS = ("inproc", "own", "tp2", "pp2", "tp2pp2")
START_S = 900.0
ACT_S = 900.0
"""What takes so long hangs, on however busy a machine."""
CONNECTOR = "KVDiskConnector"
CPU, CUDA = "cpu", "cuda"
DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}
"""Arguments of ``vllm.LLM`` unless a caller says otherwise."""
DEFAULTS_OF: dict[str, dict[str, Any]] = {
    CPU: {"dtype": "float32", "block_size": 32},
    CUDA: {"dtype": "bfloat16", "gpu_memory_utilization": 0.5},
}
"""Likewise, by the device. vLLM's attention on CPUs takes multiples of 32 tokens a block."""
NEAR_TIE = {CPU: 0.0, CUDA: 0.05}
"""Where the reference's two best tokens are nearer than this (logarithms of probabilities), kernels
that add up in another order may choose the other one. In float32 on a CPU none do."""
STEADY: dict[str, Any] = {"min_load_tokens": 0, "lookup_wait_s": 600.0, "io_deadline_s": 600.0}
"""kvdisk's settings, likewise: every hit is loaded, and nothing is given up, however slow or busy
the machine."""
_YIELD_S = "ENGINE_CHILD_YIELD_S"

if seconds := os.environ.get(_YIELD_S):
    # vLLM's processes with several workers wait in loops of ``sched_yield``. Linux 6.18 puts who
    # yields so far back that on few cores a prompt took a minute, and 20 ms with short sleeps.
    os.sched_yield = functools.partial(time.sleep, float(seconds))


class EngineError(Exception):
    """The child ended or did not answer in time; the text ends with the last lines of its log."""


class Answer(NamedTuple):
    """What one request got.

    ``cached``: prompt tokens that were not computed, those in the GPU prefix cache and those that
    the connector loaded together. ``ttft_s``: from the request's arrival to its first token.
    ``gaps``: of each token, where they were asked for, how much nearer it was than the next best.
    """

    tokens: list[int]
    cached: int
    ttft_s: float
    gaps: Sequence[float] = ()


def vllm_device() -> str:
    """Return what the installed vLLM and PyTorch are built for."""
    return CPU if importlib.metadata.version("torch").endswith("+cpu") else CUDA


def agrees(wanted: Answer, answer: Answer, near: float) -> bool:
    """Return whether an answer has the tokens that it must have, up to where two that were as near
    as ``near`` changed places."""
    both = enumerate(zip_longest(wanted.tokens, answer.tokens))
    first = next((at for at, (one, other) in both if one != other), None)
    return first is None or (first < len(wanted.gaps) and wanted.gaps[first] < near)


def _tensor_parallel(layout: str) -> int:
    return 2 if "tp2" in layout else 1


def _pipeline_parallel(layout: str) -> int:
    return 2 if "pp2" in layout else 1


def environment(layout: str, kv_gib: int) -> dict[str, str]:
    """Return the environment of a child: this process's own, without settings that would change a
    run."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "OMP_", "KMP_")) and name != "PYTHONHASHSEED"
    }
    kept |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if layout == "inproc" else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Tensor parallelism would compile one small function with a C++ compiler at its first
        # request, 3-17 s.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if vllm_device() == CUDA:
        del kept["TORCHDYNAMO_DISABLE"]
        return kept
    kept["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
    workers = _tensor_parallel(layout) * _pipeline_parallel(layout)
    if workers > 1:
        # One core for each rank; where there are fewer, they share them.
        cores = sorted(os.sched_getaffinity(0))
        kept["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[at % len(cores)]) for at in range(workers))
        kept[_YIELD_S] = "0.0002"
    else:
        # More threads than one fight over two cores: twenty times slower, measured.
        kept["OMP_NUM_THREADS"] = "1"
    return kept


class EngineChild:
    """One engine in a child process. Use it from one thread; as a context manager it is closed, or
    killed on an error.

    ``extra_config``: the connector's configuration, or None for vLLM without kvdisk. ``log``: a
    file that takes everything the engine prints. Further keywords go to ``vllm.LLM``. The
    constructor returns when the engine is ready, or at once with ``wait=False`` (then call
    ``ready``). ``start``: makes the process; tests may set another.
    """

    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def __init__(
        self,
        model: Path | str,
        log: Path,
        *,
        extra_config: Mapping[str, Any] | None = None,
        layout: str = "inproc",
        env: Mapping[str, str] | None = None,
        kv_gib: int = 1,
        wait: bool = True,
        **llm: Any,
    ) -> None:
        assert layout in LAYOUTS, layout
        self.log = log
        self.layout = layout
        self.connected = extra_config is not None
        self._killed = False
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        arguments = DEFAULTS | DEFAULTS_OF[vllm_device()] | {"model": str(model)} | llm
        if vllm_device() == CUDA:
            arguments.setdefault("kv_cache_memory_bytes", kv_gib << 30)
        arguments["tensor_parallel_size"] = _tensor_parallel(layout)
        arguments["pipeline_parallel_size"] = _pipeline_parallel(layout)
        if extra_config is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": CONNECTOR,
                "kv_role": "kv_both",
                "kv_connector_extra_config": STEADY | dict(extra_config),
            }
        with log.open("ab") as log_file:
            self._process = self.start(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=environment(layout, kv_gib) | dict(env or {}),
                # A session of its own, so that kill() reaches the engine's and the workers'
                # processes too.
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        self._send({"layout": layout, "llm": arguments})
        if wait:
            self.ready()

    def ready(self) -> None:
        """Wait until the engine takes requests. Raises EngineError."""
        self._receive(START_S)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        *,
        together: bool = True,
        salt: str | None = None,
        gaps: bool = False,
    ) -> list[Answer]:
        """Decode greedily, past any end token, and return one answer per prompt (token ids), in
        order.

        ``together``: all requests at once, else one after the other. ``salt``: vLLM's cache salt.
        ``gaps``: see ``Answer``.
        """
        listed = [list(map(int, prompt)) for prompt in prompts]
        found = self._ask("generate", prompts=listed, max_tokens=max_tokens, together=together, salt=salt, gaps=gaps)
        return [Answer(*answer) for answer in found]

    def reset(self, turns: int = 1) -> None:
        """Forget the GPU prefix cache, and nothing else. Drains first: blocks that a store reads
        would refuse it. ``turns``: how often it is tried, with a request of a few tokens between
        two: some connectors let go of blocks in steps that have others."""
        for turn in range(turns):
            if turn:
                self.generate([[2]], 2)
                self._ask("rest")
            self.drain()
            if self._ask("reset"):
                return
            self._ask("rest")  # a step that was scheduled ahead holds blocks of requests that have ended
            if self._ask("reset"):
                return
        raise self._failed("blocks are still held after a drain")

    def drain(self) -> None:
        """Step until no request and no store is in flight; what was stored is committed then."""
        self._ask("drain")

    def counters(self) -> dict[str, int]:
        """Return kvdisk's counters since the start, by the names of ``kvdisk.stats`` (in-process
        layout only)."""
        return dict(self._ask("counters"))

    def metrics(self) -> dict[str, float]:
        """Return every Prometheus metric of the engine, without the prefix ``vllm:``.

        Summed over labels, and of what has a label besides the engine's also each value of that:
        ``name.value``. Of a histogram ``name_count`` and ``name_sum``.

        In the layouts with processes, figures of idle steps travel with the next request, so a
        request of one token is made first.
        """
        return dict(self._ask("metrics"))

    def call(self, target: str, *arguments: Any) -> Any:
        """Call ``module:function`` in the child with the LLM and JSON arguments; return its JSON
        result."""
        return self._ask("call", target=target, arguments=list(arguments))

    def cpu_s(self) -> float:
        """Return the CPU seconds that the child has used, in all its threads; not those of further
        processes."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the engine the orderly way and wait for it, unless it was killed. Raises EngineError
        unless it ends with exit code 0."""
        if self._killed:
            return
        if self._process.poll() is None:
            self._send({"act": "close"})
            self._receive(ACT_S)
        try:
            code = self._process.wait(ACT_S)
        except subprocess.TimeoutExpired:
            raise self._failed("the engine did not end") from None
        if code != 0:
            raise self._failed(f"the engine ended with code {code}")

    def kill(self) -> None:
        """Kill the child and all its processes (signal 9) and wait for it. Does nothing after its
        end."""
        self._killed = True
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def kill_worker(self) -> None:
        """Kill one of the worker processes (signal 9); in layout ``tp2``, where they are processes
        of their own."""
        assert self.layout == "tp2"
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not folder.name.isdigit() or os.getsid(int(folder.name)) != self._process.pid:
                    continue
                if b"::Worker" in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
                    return
        raise self._failed("no worker was found")

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _ask(self, act: str, **fields: Any) -> Any:
        """Run one act and return its result. Raises EngineError when the child fails or stays
        silent too long."""
        self._send({"act": act, **fields})
        return self._receive(ACT_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("the engine is gone") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def _receive(self, timeout_s: float) -> Any:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"no answer in {timeout_s:.0f} s") from None
        if answer is None:
            raise self._failed("the engine ended")
        if "failure" in answer:
            raise self._failed(answer["failure"])
        return answer["result"]

    def _failed(self, what: str) -> EngineError:
        self.kill()
        last = self.log.read_text(errors="replace").splitlines()[-40:]
        return EngineError("\n".join([f"{what}; its log is {self.log}, which ends:", *last]))


class _Child:
    """The acts, in the child. Each method takes the act's fields and returns what is sent back."""

    def __init__(self, llm: Any, layout: str) -> None:
        self.llm = llm
        self.layout = layout

    def generate(
        self, prompts: list[list[int]], max_tokens: int, together: bool, salt: str | None, gaps: bool
    ) -> list[Answer]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2 if gaps else None
        )
        salted = {} if salt is None else {"cache_salt": salt}
        requests = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        answers: list[Answer] = []
        for batch in [requests] if together else [[request] for request in requests]:
            for output in self.llm.generate(batch, sampling, use_tqdm=False):
                ttft_s = output.metrics.first_token_latency
                first = output.outputs[0]
                best = [sorted((one.logprob for one in each.values()), reverse=True) for each in first.logprobs or ()]
                apart = [one[0] - one[1] for one in best]
                answers.append(Answer(list(first.token_ids), output.num_cached_tokens, ttft_s, apart))
        return answers

    def reset(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def rest(self) -> None:
        """Take steps without a request, and a while."""
        for _ in range(3):
            time.sleep(0.05)
            self.llm.llm_engine.step()

    def drain(self) -> None:
        if self.layout != "inproc":
            # "wait" answers when the engine is idle, and it is not while a connector has work.
            core = self.llm.llm_engine.engine_core
            core.call_utility("pause_scheduler", "wait", False)
            core.call_utility("resume_scheduler")
        elif self.llm.llm_engine.vllm_config.kv_transfer_config is not None:
            done = importlib.import_module("kvdisk.connector").drain(self.llm, ACT_S)
            assert done, "transfers are still out after kvdisk.connector.drain"

    def counters(self) -> dict[str, int]:
        assert self.layout == "inproc", "the connector lives in another process; read metrics()"
        counters: dict[str, int] = importlib.import_module("kvdisk.connector").counters(self.llm)
        return counters

    def metrics(self) -> dict[str, float]:
        if self.layout != "inproc":
            self.generate([[2]], 1, True, None, False)
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            parts = {"_count": metric.count, "_sum": metric.sum} if hasattr(metric, "sum") else {}
            if hasattr(metric, "value"):
                parts = {"": metric.value}
            own = [value for label, value in metric.labels.items() if label not in {"model_name", "engine"}]
            for part, value in parts.items():
                name = metric.name.removeprefix("vllm:") + part
                for key in (name, *(f"{name}.{label}" for label in own)):
                    totals[key] = totals.get(key, 0) + value
        return totals

    def call(self, target: str, arguments: list[Any]) -> Any:
        module, _, function = target.partition(":")
        return getattr(importlib.import_module(module), function)(self.llm, *arguments)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def child_main() -> None:
    """Serve acts from stdin until ``close`` or the end of the input. The first line describes the
    engine."""
    # Only this copy reaches the parent; whatever the engine prints goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        start = json.loads(sys.stdin.readline())
        # vLLM's imports are most of a start, and collecting garbage is a fifth of them.
        gc.disable()
        child = _Child(_start_llm(start["llm"]), start["layout"])
        gc.enable()
        send({"result": None})
        for line in sys.stdin:
            act = json.loads(line)
            name = act.pop("act")
            print(f"--- {time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
            send({"result": getattr(child, name)(**act)})
            if name == "close":
                return
        child.close()
    except Exception as error:
        traceback.print_exc()  # before the parent, which is told now, kills this process
        send({"failure": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _start_llm(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    transfer = arguments.pop("kv_transfer_config", None)
    if transfer is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return LLM(**arguments)


if __name__ == "__main__":
    child_main()
