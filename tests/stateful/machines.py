# SPDX-License-Identifier: Apache-2.0
"""How the state machine is run: always the same examples, nothing kept between runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test
from support.manager_machine import ManagerMachine
from support.manager_parts import ManagerParts, Sizes
from support.manager_sizes import ON_COMPUTE_SIZES

from kvdisk.blocks import Tier
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.jobs import JobRecord, Transfers
from kvdisk.manager.neighbours import is_neighbours
from kvdisk.messages import JobKind


def run_machine(sizes: Sizes, examples: int, steps: int = 60, *, shrink: bool = True) -> None:
    """Run the machine over a size; raise what an example raises. ``shrink``: look for a smaller one first."""

    class Machine(ManagerMachine):
        @invariant()
        def every_job_holds_its_copies(self) -> None:
            check_pins(self.parts)

    Machine.sizes = sizes
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=phases,
        ),
    )


EXAMPLES_FOR_A_BUG = (100, 1500)
"""At most, in one of the sizes: a few in each, then many in each. The first that fails ends the search."""
Patch = pytest.MonkeyPatch


class Bugs(dict[str, Callable[[Patch], None]]):
    """Bugs by name, each a function that plants it. ``sizes``: what the machine that has to find them runs over."""

    def __init__(self, sizes: tuple[Sizes, ...] = ON_COMPUTE_SIZES) -> None:
        super().__init__()
        self._sizes = sizes
        self._shows_in: dict[str, tuple[Sizes, ...]] = {}

    def plant_in(self, *sizes: Sizes) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
        """As ``plant``, of a bug that is looked for in these sizes alone: elsewhere it shows late, or never."""

        def plant(planted: Callable[[Patch], None]) -> Callable[[Patch], None]:
            self._shows_in[planted.__name__] = sizes
            return self.plant(planted)

        return plant

    def plant(self, planted: Callable[[Patch], None]) -> Callable[[Patch], None]:
        """Take a bug into the table; a decorator."""
        self[planted.__name__] = planted
        return planted

    def must_be_caught(self, name: str, patch: Patch) -> None:
        """Plant a bug; fail unless the machine fails."""
        self[name](patch)
        with pytest.raises((AssertionError, KeyError, IndexError, ExceptionGroup)):
            _search(self._shows_in.get(name, self._sizes))


def _search(all_sizes: tuple[Sizes, ...]) -> None:
    for examples in EXAMPLES_FOR_A_BUG:
        for sizes in all_sizes:
            run_machine(sizes, examples, shrink=False)


def wrap(patch: Patch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by ``around(original, self, ...)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kwargs: around(original, self, *args, **kwargs))


def tolerate_missing_pins(patch: Patch) -> None:
    """Let a pin be given back that was never taken."""

    def unpin(original: Any, self: Catalog, rows: Iterable[int], tier: Tier) -> None:
        original(self, [row for row in rows if self.pins(row, tier) > 0], tier)

    wrap(patch, Catalog, "unpin", unpin)


def forget_late(patch: Patch, kinds: set[JobKind]) -> None:
    """Let jobs of these kinds be settled as if nothing of them were late."""

    def absorb(original: Any, self: Transfers, report: Any) -> list[JobRecord]:
        known = {**self._records, **self._zombies}
        for job_id in [job_id for job_id in report.released if job_id not in known or known[job_id].job.kind in kinds]:
            del report.released[job_id]
        for job_id, result in report.results.items():
            if known[job_id].job.kind in kinds:
                result.late, result.late_ranks = set(), 0
        return original(self, report)

    wrap(patch, Transfers, "absorb", absorb)


def check_pins(parts: ManagerParts) -> None:
    """Assert that each copy has as many pins as jobs that read or write it, or may still do so (invariant 4)."""
    expected: Counter[tuple[int, Tier]] = Counter()
    records = [(record, range(len(record.details))) for record in parts.transfers._records.values()]
    zombies = [(record, record.late) for record in parts.transfers._zombies.values()]
    for record, held in [*records, *zombies]:
        for move, detail in ((record.job.moves[at], record.details[at]) for at in held):
            for tier, slot in move.slots.items():
                if detail.row >= 0 and slot is not None and not is_neighbours(slot):
                    expected[detail.row, tier] += 1
    for row in parts.catalog.rows():
        for tier in (Tier.CPU, Tier.NVME):
            assert parts.catalog.pins(row, tier) == expected[row, tier], f"pins of row {row} in {tier!r}"
