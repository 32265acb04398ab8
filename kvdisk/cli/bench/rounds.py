# SPDX-License-Identifier: Apache-2.0
"""Measures contenders in turn, so that all of them see the same drive: one run, many rounds."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from kvdisk.cli.bench.cases import Contender, Group, GroupResult, Sample, Series
from kvdisk.cli.bench.scratch import signals_held
from kvdisk.errors import KvdiskError

Step = Callable[[str], None]
"""Told after each measurement what was measured."""


def run_group(group: Group, rounds: int, step: Step = lambda _: None) -> GroupResult:
    """Measure every contender once to warm up and once in each round; who begins changes from round to round.

    One that fails is left out from there on, with what it had measured. Calls ``step`` after each measurement.
    """
    with ExitStack() as stack:
        contenders = list(group.make(stack))
        stack.enter_context(_settled_heap())
        passes = group.case.passes
        series = {one.name: Series(one.name, one.role, group.case.total_bytes * passes) for one in contenders}
        assert len(series) == len(contenders), "contenders of a group have different names"
        dropped: dict[str, str] = {}
        for turn in range(rounds + 1):
            for contender in _turned(contenders, turn):
                if contender.name in dropped:
                    continue
                try:
                    holding = signals_held() if contender.in_process else nullcontext()
                    with holding, busy_thread(group.case.busy and contender.in_process):
                        sample = contender.measure(passes if turn else 1)
                    if group.case.busy:  # the thread's time is in there
                        sample = Sample(sample.seconds)
                except (KvdiskError, OSError) as error:
                    dropped[contender.name] = str(error) or type(error).__name__
                    continue
                if turn:
                    series[contender.name].samples.append(sample)
                step(contender.name)
        kept = [one for name, one in series.items() if name not in dropped]
        return GroupResult(group.case, kept, dropped)


@contextmanager
def _settled_heap() -> Iterator[None]:
    """Keep Python's collector off what was there before, as vLLM does when an engine has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _turned(contenders: Sequence[Contender], turn: int) -> list[Contender]:
    """Return the contenders, each round beginning with another, every second round backwards."""
    if not contenders:
        return []
    start = turn % len(contenders)
    turned = [*contenders[start:], *contenders[:start]]
    return turned[::-1] if turn % 2 else turned


def timed(move: Callable[[], None]) -> Sample:
    """Run ``move`` and return what it took, of wall time and of this process's processor time (user and system)."""
    start_cpu = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    start = time.perf_counter()
    move()
    seconds = time.perf_counter() - start
    return Sample(seconds, time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - start_cpu)


@contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """Let a thread of this process run Python code without a pause meanwhile, as a model's Python does in vLLM."""
    if not wanted:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_spin, args=(ended,), name="kvdisk-bench-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _spin(ended: threading.Event) -> None:
    count = 0
    while not ended.is_set():
        for _ in range(1000):
            count += 1
