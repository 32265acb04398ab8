# SPDX-License-Identifier: Apache-2.0
"""Lanes whose work is done late and, between them, in any order that streams and events allow, as a
GPU does it: so that what a copy reads or writes meanwhile shows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvdisk.worker.copier import Lane, Rows
from kvdisk.worker.copier_base import Event
from support.addressed_device import CpuLanes

_VIEWS = {"as_strided", "slice", "split", "select", "view", "alias", "unflatten", "_unsafe_view", "detach"}
_WORK = {"copy_", "index_select.out", "index_copy_", "fill_.Scalar", "fill_.Tensor", "zero_"}


class LateEvent:
    """``Event`` of ``LateLanes``."""

    def __init__(self, lanes: LateLanes) -> None:
        self._lanes = lanes
        self.passed = False

    def query(self) -> bool:
        """See ``Event``."""
        self._lanes.go_on(self._lanes.chance.randrange(4))
        return self.passed

    def synchronize(self) -> None:
        """See ``Event``."""
        while not self.passed:
            assert self._lanes.go_on(1), "nothing can go on, and an event has not passed"


class _Later(TorchDispatchMode):  # type: ignore[misc]
    """Queues operations that move bytes, and fails those that would take memory."""

    def __init__(self, lanes: LateLanes, queue: deque[Any]) -> None:
        super().__init__()
        self._lanes, self._queue = lanes, queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = str(func).removeprefix("aten.").partition(".")
        kwargs = kwargs or {}
        if name in _VIEWS:
            return func(*args, **kwargs)
        assert name in _WORK or f"{name}.{overload}" in _WORK, f"{func} takes memory, or is not known to take none"
        if name == "copy_":
            self._lanes.copies += [(each.data_ptr(), args[0].nbytes) for each in args[:2]]
        self._queue.append(partial(func, *args, **kwargs))
        return kwargs.get("out", args[0])


class LateLanes(CpuLanes):
    """``chance``: of what goes on next. Lane None is the model's stream: it has a queue, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.copies: list[tuple[int, int]] = []
        """Of each copy both addresses, and its bytes."""
        self._queues: dict[Lane | None, deque[LateEvent | Callable[[], Any] | tuple[LateEvent]]] = {
            lane: deque() for lane in (None, *Lane)
        }

    def on(self, lane: Lane | None) -> AbstractContextManager[Any]:
        return self._on(lane)

    @contextmanager
    def _on(self, lane: Lane | None) -> Iterator[None]:
        with _Later(self, self._queues[lane]):
            yield

    def record(self, lane: Lane | None) -> Event:
        event = LateEvent(self)
        self._queues[lane].append(event)
        return event

    def wait(self, lane: Lane | None, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self._queues[lane].append((event,))

    def given(self, lane: Lane) -> int:
        """Return how much a lane has still to do."""
        return len(self._queues[lane])

    def synchronize(self, lane: Lane) -> None:
        while self._queues[lane]:
            assert self.go_on(1), "nothing can go on, and a lane has something to do"

    def copy_rows(
        self, lane: Lane, target: Rows, source: Rows, row_bytes: int, count: int, *, pinned: bool = False
    ) -> bool:
        self.copies += [(each.address, row_bytes * count) for each in (target, source)]
        self._queues[lane].append(partial(super().copy_rows, lane, target, source, row_bytes, count, pinned=pinned))
        return True

    def go_on(self, steps: int) -> bool:
        """Do so many steps, each of a lane that chance chooses; return whether there were any."""
        for _ in range(steps):
            ready = [queue for queue in self._queues.values() if queue and not self._waits(queue[0])]
            if not ready:
                return False
            step = self.chance.choice(ready).popleft()
            if isinstance(step, LateEvent):
                step.passed = True
            elif not isinstance(step, tuple):
                with _disable_current_modes():  # or who waits within a lane would queue it anew
                    step()
        return True

    def moved_bytes(self, first: int, end: int) -> list[int]:
        """Return how long each copy was to or from these addresses."""
        return [moved for address, moved in self.copies if first <= address < end]

    def finish(self) -> None:
        """Do all there is."""
        while self.go_on(1):
            pass
        assert not any(self._queues.values()), "lanes wait for each other"

    @staticmethod
    def _waits(step: object) -> bool:
        return isinstance(step, tuple) and not step[0].passed
