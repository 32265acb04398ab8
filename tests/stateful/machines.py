# SPDX-License-Identifier: Apache-2.0
"""How the state machine is run, always on the same examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import invariant, run_state_machine_as_test
from support.manager_machine import ManagerMachine
from support.manager_parts import Sizes
from support.manager_watch import check_pins

EXAMPLES_FOR_A_BUG = (100, 1500)
"""At most, in one of the sizes: a few in each, then many in each. The first that fails ends the
search."""


@contextmanager
def _whatever_is_imported() -> Iterator[None]:
    """Have Hypothesis draw no constants of the modules that are imported: else examples would
    differ by what ran before in this process."""
    with (
        mock.patch.object(providers, "_get_local_constants", return_value=providers.Constants()),
        mock.patch.object(providers, "CONSTANTS_CACHE", LRUCache(1024)),
    ):
        yield


def run_machine(sizes: Sizes, examples: int, *, shrink: bool = True) -> None:
    """Run the machine over a size; raise what an example raises. ``shrink``: look for a smaller one
    first."""

    class Machine(ManagerMachine):
        @invariant()
        def every_job_holds_its_copies(self) -> None:
            check_pins(self.parts)

    Machine.sizes = sizes
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    how = settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=phases,
    )
    with _whatever_is_imported():
        run_state_machine_as_test(Machine, settings=how)


def search(all_sizes: Sequence[Sizes]) -> None:
    """Run the machine over these sizes until it fails; raise what it raises then."""
    for examples in EXAMPLES_FOR_A_BUG:
        for sizes in all_sizes:
            run_machine(sizes, examples, shrink=False)
