# SPDX-License-Identifier: Apache-2.0
"""Who may enter a tier: the protocol, and the policies by name. Scheduler thread only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from kvdisk.blocks import BlockKey
from kvdisk.config import make_own
from kvdisk.errors import ConfigError
from kvdisk.manager.reuse import places_for
from kvdisk.manager.reuse_admission import AdmitAdaptive, AdmitReused


class AdmissionPolicy(Protocol):
    """Decides for one tier. ``want`` is told before ``admits`` is asked for the same request.

    The CPU tier's is asked when a request offers a block. The NVMe tier's is asked when a copy in the CPU tier becomes
    READY, each time a request wants it there, and before it leaves; without a CPU tier, when a request offers it.
    """

    @property
    def is_open(self) -> bool:
        """Whether ``admits`` would now return True for whichever block: many are then let in without a question."""

    def want(self, keys: Sequence[BlockKey], request_id: str) -> Sequence[BlockKey]:
        """A request wanted these blocks (offered them, or was served from them). May be told again for the same one.

        Returns those of which ``admits`` may answer otherwise than before: where they were refused they are offered
        again.
        """

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether it may enter now."""

    def note_room(self, free: int, total: int) -> None:
        """Learn, once a step, how many of the tier's slots are free, of all that it may have."""

    def reset(self) -> None:
        """Forget all counts: the KV they stood for is gone."""


class AdmitAll:
    """Every block may enter."""

    is_open = True

    def want(self, keys: Sequence[BlockKey], request_id: str) -> Sequence[BlockKey]:  # noqa: ARG002
        """Nothing to remember: the answer never changes."""
        return ()

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return True for each."""
        return [True] * len(keys)

    def note_room(self, free: int, total: int) -> None:
        """It makes no difference."""

    def reset(self) -> None:
        """Nothing to forget."""


def make_admission(text: str, slots: int, key: str = "admission") -> AdmissionPolicy:
    """Return a new policy for a tier of so many slots. ``key``: the setting that ``text`` is the value of.

    Raises ConfigError.
    """
    if text == "all":
        return AdmitAll()
    if text == "adaptive":
        return AdmitAdaptive(places_for(slots))
    reuse = re.fullmatch(r"reuse\((\d+)\)", text)
    if reuse:
        return AdmitReused(int(reuse[1]), places_for(slots))
    if ":" not in text:
        raise ConfigError(f"{key} must be 'all', 'adaptive', 'reuse(n)' or 'module:Class', not {text!r}.")
    policy: AdmissionPolicy = make_own(key, text, AdmissionPolicy)
    return policy
