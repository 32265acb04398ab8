# SPDX-License-Identifier: Apache-2.0
"""The same machine with prompts that are longer than every bound of a step: searches that end
early, questions that are cut, and prompts that are counted and looked at in parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from machines import run_machine
from support import manager_sizes as on
from support.low_bounds import lower_bounds
from support.manager_parts import Sizes

from kvdisk.manager.demotions import Demotions
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.load_jobs import LoadJobs
from kvdisk.manager.manager import TierManager
from kvdisk.manager.questions import Questions
from kvdisk.manager.room import Room
from kvdisk.manager.step_work import Kind
from kvdisk.manager.stores import StorePlanner
from kvdisk.manager.victims import Victims

SIZES = on.LONG_SIZES | on.LONG_VICTIMS


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Low bounds, and how often each kind of them ended something."""
    lower_bounds(monkeypatch)
    counts: Counter[str] = Counter()

    def watch(owner: type, name: str, note: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = real(self, *args, **kwargs)
            counts.update({key: 1 for key, is_so in note(self, args, answer).items() if is_so})
            return answer

        monkeypatch.setattr(owner, name, watched)

    watch(TailFirst, "victims", lambda order, *_: {"a search ended early": order.ended_early})
    watch(Room, "_evict", lambda _, args, evicted: {"more left memory than had to": evicted > args[1]})
    watch(
        TierManager,
        "take_plan",
        lambda manager, *_: {"a prompt was counted in parts": manager._work.has(Kind.DEMAND)},
    )
    watch(
        StorePlanner, "_next_blocks", lambda _, args, __: {"more was reached than a step looks at": args[0].is_behind}
    )
    watch(Victims, "_divide", lambda _, __, answer: {"of a victim later steps save a part": any(map(len, answer[1]))})
    watch(LoadJobs, "begin", lambda self, args, _: {"a load had several jobs": args[0].request_id in self.unplanned})
    watch(Demotions, "plan", lambda self, *_: {"a backlog was longer than a step's jobs": self.dirty.total})
    watch(
        Questions,
        "_look_at_next",
        lambda self, args, _: {f"{self._counter} went on after a first stretch": args[0].asked},
    )
    return counts


EVERYWHERE = (
    "a prompt was counted in parts",
    "more was reached than a step looks at",
    "a load had several jobs",
)
VICTIMS = ("of a victim later steps save a part",)
ALSO = {
    "one group": (
        "a search ended early",
        "more left memory than had to",
        "a backlog was longer than a step's jobs",
        "foreign_questions went on after a first stretch",
    ),
    "two groups": ("a backlog was longer than a step's jobs",),
    "remote": ("remote_questions went on after a first stretch",),
}


@pytest.mark.parametrize(("name", "sizes"), SIZES.items(), ids=SIZES)
def test_the_invariants_hold_of_prompts_longer_than_every_bound(name: str, sizes: Sizes, crossed: Counter[str]) -> None:
    run_machine(sizes, examples=20)
    wanted = (VICTIMS if name in on.LONG_VICTIMS else EVERYWHERE) + ALSO.get(name, ())
    missing = [what for what in wanted if not crossed[what]]
    assert not missing, f"it never happened, so nothing is shown about it: {missing}, of {crossed}"


@pytest.mark.torture
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("crossed")
def test_they_hold_in_many_more_examples(sizes: Sizes) -> None:
    run_machine(sizes, examples=200, shrink=False)
