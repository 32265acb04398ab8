# SPDX-License-Identifier: Apache-2.0
"""``WriteBackpressure``: tells vLLM's manager of tiers when to offer kvdisk no stores.

vLLM's own detector times the stores that have ended. This one knows what kvdisk's tier knows: how
many rows of vLLM's memory are held by stores that have not ended, and whether the write budget is
spent. See docs/OFFLOADING.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector, DropStorePolicy

from kvdisk.connector.hooks import refuse_other_hooks
from kvdisk.tier_settings import MOST_ROWS, check_backpressure


class WriteLoad(NamedTuple):
    """What a tier has to write. ``held_rows``: rows of vLLM's memory that stores hold, of ``rows``.
    ``is_budget_spent``: whether no store would be written."""

    held_rows: int
    rows: int
    is_budget_spent: bool


class WriteBackpressure(BackpressureDetector):  # type: ignore[misc]  # vLLM is untyped here
    """See the module. The thread of vLLM's scheduler makes all calls.

    ``policy``: vLLM's, or the user's, by ``policy_cls``; it asks ``is_under_pressure``. None: no
    store is offered under pressure. ``most_rows``: the share of memory's rows that stores may hold.
    Raises ConfigError.
    """

    def __init__(self, policy: Any = None, most_rows: float = MOST_ROWS, **unknown: Any) -> None:
        refuse_other_hooks(WriteBackpressure, {"follow"})
        check_backpressure({"most_rows": most_rows, "policy_cls": type(policy).__name__, **unknown})
        super().__init__(policy or DropStorePolicy())
        self._most_rows = most_rows
        self._look: Callable[[], WriteLoad] | None = None
        self._is_full = False

    def follow(self, look: Callable[[], WriteLoad]) -> None:
        """Ask this from now on for what there is to write. ``look`` must not raise: an exception
        here would end the engine."""
        self._look = look

    def is_under_pressure(self) -> bool:
        """Whether stores hold too many rows, until they hold half as many; or would not be
        written."""
        if self._look is None:
            return False
        load = self._look()
        most = self._most_rows * load.rows
        self._is_full = load.held_rows >= (most / 2 if self._is_full else most)
        return self._is_full or load.is_budget_spent

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Do nothing: how long a store took says less than what has not ended."""

    def reset(self) -> None:
        """Forget what was counted. What there is to write is asked for each time."""
        self._is_full = False
        self.policy.reset()

    @property
    def stats(self) -> dict[str, float]:
        """Return what vLLM writes into its log when pressure begins or ends."""
        return {} if self._look is None else {name: float(value) for name, value in self._look()._asdict().items()}
