# SPDX-License-Identifier: Apache-2.0
"""Models of other policies beside ``kvdisk replay``: LRU, ARC, S3-FIFO, and the optimum.

    python tools/replay_models.py TRACE --nvme 1%,5%,10% --picture docs/pictures/replay.svg

A model knows nothing of tiers or steps. It has the room of the NVMe tier, takes requests in order,
and counts by the same rule: a block hits when it and all before it in its prompt are there when the
request comes. Then every block of the prompt that is there is used and every other one is written,
the tail of the prompt first, so that its head is the last to be used.

LRU and ARC are what vLLM's own offloading has. No library of caches counts by
prefixes, so these are own.  ``belady`` knows the future: of the blocks that are
there, and the one that comes, it does not keep the one that is used again last, or never (Belady's
MIN, block by block, with bypass). Whoever asks for a block asks for those before it, so what it
keeps are prefixes, and no policy can hit more. It writes only what will hit.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, Protocol

from figures import Record, add_json_option
from rich.console import Console
from rich.table import Table

from kvdisk.cli.replay.run import run_all
from kvdisk.cli.replay.tiers import Capacity, Setting, make_geometry, parse_capacity, split
from kvdisk.cli.replay.trace import Trace, read_trace
from kvdisk.config import Config

Prompt = Sequence[Hashable]
"""The blocks of a request. Equal blocks have equal blocks before them."""
Blocks = OrderedDict[Hashable, None]
"""The one used last is the last."""


class Counts(NamedTuple):
    """``hits``: of each request, how many of its first blocks hit. ``written``: blocks."""

    hits: list[int]
    written: int


class Model(Protocol):
    """A cache of blocks."""

    def __contains__(self, block: Hashable) -> bool: ...
    def use(self, block: Hashable) -> None:
        """A block that is there is used."""

    def add(self, block: Hashable) -> None:
        """A block that is not there is written; others leave for it."""


class Lru:
    """The least recently used block is evicted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: Blocks = OrderedDict()

    def __contains__(self, block: Hashable) -> bool:
        return block in self._blocks

    def use(self, block: Hashable) -> None:
        """See ``Model``."""
        self._blocks.move_to_end(block)

    def add(self, block: Hashable) -> None:
        """See ``Model``."""
        self._blocks[block] = None
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Arc:
    """ARC (FAST '03): what was used once and what was used more often, in shares that follow what
    comes back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # of the first list's share
        self._once, self._often, self._left_once, self._left_often = (Blocks() for _ in range(4))

    def __contains__(self, block: Hashable) -> bool:
        return block in self._once or block in self._often

    def use(self, block: Hashable) -> None:
        """See ``Model``."""
        self._once.pop(block, None)
        self._often[block] = None
        self._often.move_to_end(block)

    def add(self, block: Hashable) -> None:
        """See ``Model``."""
        capacity, once, left_once, left_often = self._capacity, self._once, self._left_once, self._left_often
        count = len(once) + len(self._often) + len(left_once) + len(left_often)
        if block in left_once:
            self._target = min(float(capacity), self._target + max(1.0, len(left_often) / len(left_once)))
            self._replace(came_often=False)
            del left_once[block]
            self._often[block] = None
        elif block in left_often:
            self._target = max(0.0, self._target - max(1.0, len(left_once) / len(left_often)))
            self._replace(came_often=True)
            del left_often[block]
            self._often[block] = None
        else:
            if len(once) + len(left_once) == capacity:
                if left_once:
                    left_once.popitem(last=False)
                    self._replace(came_often=False)
                else:
                    once.popitem(last=False)
            elif count >= capacity:
                if count == 2 * capacity:
                    left_often.popitem(last=False)
                self._replace(came_often=False)
            once[block] = None

    def _replace(self, *, came_often: bool) -> None:
        """Make room for one block, if there is none."""
        count = len(self._once)
        if count + len(self._often) < self._capacity:
            return
        if count and (count > self._target or (came_often and count == self._target) or not self._often):
            self._left_once[self._once.popitem(last=False)[0]] = None
        else:
            self._left_often[self._often.popitem(last=False)[0]] = None


class S3Fifo:
    """S3-FIFO (SOSP '23): a tenth of the blocks on probation; those used there stay, and those that
    come back soon after they left."""

    _MOST_USES = 3

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._probation, self._main, self._left = (Blocks() for _ in range(3))
        self._uses: dict[Hashable, int] = {}

    def __contains__(self, block: Hashable) -> bool:
        return block in self._uses

    def use(self, block: Hashable) -> None:
        """See ``Model``."""
        self._uses[block] = min(self._MOST_USES, self._uses[block] + 1)

    def add(self, block: Hashable) -> None:
        """See ``Model``."""
        while len(self._uses) >= self._capacity:
            self._evict()
        self._uses[block] = 0
        if block in self._left:
            del self._left[block]
            self._main[block] = None
        else:
            self._probation[block] = None

    def _evict(self) -> None:
        """Make room for one block, or let one off probation."""
        if len(self._probation) >= max(1, self._capacity // 10) or not self._main:
            block, _ = self._probation.popitem(last=False)
            if self._uses[block]:
                self._uses[block] = 0
                self._main[block] = None
                return
            self._left[block] = None
            if len(self._left) > self._capacity * 9 // 10:
                self._left.popitem(last=False)
        else:
            block, _ = self._main.popitem(last=False)
            if self._uses[block]:
                self._uses[block] -= 1
                self._main[block] = None
                return
        del self._uses[block]


MODELS: dict[str, Callable[[int], Model]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}
REUSE = ", reuse(2)"
"""Behind a model's name: it admits what two requests have asked for."""


def run_model(name: str, prompts: Sequence[Prompt], capacity: int) -> Counts:
    """Replay prompts against a model, or ``belady``."""
    if name == "belady":
        return run_belady(prompts, capacity)
    model = MODELS[name.removesuffix(REUSE)](capacity)
    wants_reuse, known = name.endswith(REUSE), set[Hashable]()
    hits: list[int] = []
    written = 0
    for prompt in prompts:
        there = [block in model for block in prompt]
        hits.append(there.index(False) if False in there else len(there))
        for block in reversed(prompt):
            if block in model:
                model.use(block)
            elif capacity and (block in known or not wants_reuse):
                model.add(block)
                written += 1
        if wants_reuse:
            known.update(prompt)
    return Counts(hits, written)


def run_belady(prompts: Sequence[Prompt], capacity: int) -> Counts:
    """Replay prompts with knowledge of the future; see the module."""
    references = [block for prompt in prompts for block in prompt]
    never = len(references)
    next_uses, following = [never] * never, dict[Hashable, int]()
    for at in reversed(range(never)):
        next_uses[at] = following.get(references[at], never)
        following[references[at]] = at
    # The blocks that are there and when each is used again; the same as a heap, with some that have
    # gone.
    kept: dict[Hashable, int] = {}
    latest: list[tuple[int, Hashable]] = []
    fresh: set[Hashable] = set()  # have not hit yet
    hits: list[int] = []
    written = at = 0
    for prompt in prompts:
        hits.append(0)
        for position, block in enumerate(prompt):
            if kept.pop(block, None) is None:
                fresh.add(block)
            else:
                assert hits[-1] == position, "a block was kept, and one before it was not"
                hits[-1] += 1
                written += block in fresh
                fresh.discard(block)
            again = next_uses[at]
            at += 1
            if again == never:
                fresh.discard(block)
                continue
            kept[block] = again
            heappush(latest, (-again, block))
            while len(kept) > capacity:
                again, last = heappop(latest)
                if kept.get(last) == -again:
                    del kept[last]
                    fresh.discard(last)
    return Counts(hits, written)


class Figure(NamedTuple):
    """One run at a room. ``hit_tokens``, ``hit_blocks``: shares of all. ``written``: blocks."""

    policy: str
    hit_tokens: float
    hit_blocks: float
    written: int


def figures_of(trace: Trace, room: Capacity, models: Sequence[str]) -> list[Figure]:
    """Return what models come to at a room."""
    found = []
    for name in models:
        counts = run_model(name, [request.hashes for request in trace.requests], room.blocks)
        pairs = zip(trace.requests, counts.hits, strict=True)
        tokens = sum(trace.token_span(request, 0, count) for request, count in pairs)
        found.append(Figure(name, tokens / trace.tokens, sum(counts.hits) / trace.references, counts.written))
    return found


def draw(found: Sequence[tuple[float, list[Figure]]], path: Path) -> None:
    """Draw hits and writes over room, given in percent of the distinct blocks."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(10.0, 4.2), layout="constrained")
    plots = canvas.subplots(1, 2)
    rooms = [room for room, _ in found]
    for at, policy in enumerate(one.policy for one in found[0][1]):
        mine = [figures[at] for _, figures in found]
        look = {"linestyle": "--", "linewidth": 1.2} if at else {"color": "#d62728", "marker": "o", "linewidth": 1.8}
        plots[0].plot(rooms, [100 * one.hit_tokens for one in mine], label=policy, **look)
        plots[1].plot(rooms, [one.written / 1000 for one in mine], label=policy, **look)
    for axes, label in zip(plots, ("tokens that hit, % of all", "thousand blocks written"), strict=True):
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(rooms, [f"{room:.2g}" for room in rooms])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("room, % of the trace's distinct blocks")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.25)
    plots[0].legend(frameon=False)
    canvas.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the figures, of ``kvdisk replay`` with its defaults first, and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--nvme", default="1%,5%,10%,25%,50%", help="rooms, as kvdisk replay has them")
    parser.add_argument("--models", nargs="*", default=["lru", "arc", "belady"])
    parser.add_argument("--picture", type=Path, help="an SVG to draw")
    add_json_option(parser)
    options, record = parser.parse_args(), Record()
    trace, config = read_trace(options.trace), Config()
    geometry, none = make_geometry(trace, 1 << 20), Capacity("0", 0, 0)
    rooms = [parse_capacity("--nvme", text, trace, geometry, on_nvme=True) for text in split([options.nvme])]
    policies = config.eviction, config.cpu_admission, config.nvme_admission, config.store_policy
    settings = [Setting(*policies, none, room, 0) for room in rooms]
    table = Table("room", "policy", "hits", "of blocks", "written blocks")
    found = []
    for run in run_all(trace, settings, 1 << 20, 2, lambda _: None).runs:
        here = [Figure(run.policy, run.hit_rate, run.hit_blocks_rate, run.written_blocks)]
        here += figures_of(trace, run.room, options.models)
        found.append((100 * run.room.blocks / trace.distinct, here))
        for at, one in enumerate(here):
            shares = (f"{100 * share:.2f} %" for share in (one.hit_tokens, one.hit_blocks))
            table.add_row(run.room.given, one.policy, *shares, f"{one.written:,}")
            name = one.policy if at else "kvdisk"
            record.add("hits of blocks", run.room.given, name, [100 * one.hit_blocks], "%")
            record.add("blocks written", run.room.given, name, [one.written])
    Console().print(table)
    if options.picture:
        draw(found, options.picture)
    record.write(options.json)


if __name__ == "__main__":
    main()
