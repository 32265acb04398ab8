# SPDX-License-Identifier: Apache-2.0
"""How the state machine is run, always on the same examples; and how bugs are planted that it has
to catch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test
from support.manager_machine import ManagerMachine
from support.manager_parts import Sizes
from support.manager_watch import check_pins

EXAMPLES_FOR_A_BUG = (100, 1500)
"""At most, in one of the sizes: a few in each, then many in each. The first that fails ends the
search."""


def run_machine(sizes: Sizes, examples: int, *, shrink: bool = True) -> None:
    """Run the machine over a size; raise what an example raises. ``shrink``: look for a smaller one
    first."""

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
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=phases,
        ),
    )


def search(all_sizes: Sequence[Sizes]) -> None:
    """Run the machine over these sizes until it fails; raise what it raises then."""
    for examples in EXAMPLES_FOR_A_BUG:
        for sizes in all_sizes:
            run_machine(sizes, examples, shrink=False)


def plant(patch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> None:
    """Have the functions of a module run as if ``old``, which occurs once in its source, were
    ``new``."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module.__name__} has {source.count(old)} places of {old!r}"
    changed: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), changed)  # noqa: S102
    for name, function in _functions(vars(module), module.__name__):
        other = dict(_functions(changed, module.__name__))[name]
        if function.__code__ != other.__code__:
            patch.setattr(function, "__code__", other.__code__)


def _functions(names: dict[str, Any], module: str) -> Iterator[tuple[str, FunctionType]]:
    """Return the functions and methods that a module defines."""
    for name, value in list(names.items()):
        members = vars(value).items() if inspect.isclass(value) and value.__module__ == module else [("", value)]
        for member, found in members:
            function = getattr(found, "fget", None) or getattr(found, "__func__", found)
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield f"{name}.{member}", function
