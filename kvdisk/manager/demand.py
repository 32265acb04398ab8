# SPDX-License-Identifier: Apache-2.0
"""Which blocks requests come to, told once to the history and to who admits. Scheduler thread
only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import BlockKey
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.requests import RequestState
from kvdisk.manager.reuse import STATES, ReuseHistory


class Demand:
    """Counts which blocks requests come to: each once for each request, in the order of its
    prompt."""

    def __init__(self, history: ReuseHistory, admissions: Sequence[AdmissionPolicy]) -> None:
        self._history = history
        self._admissions = admissions

    def reach(self, request: RequestState, group: int, stop: int) -> None:
        """A request has come to its first ``stop`` blocks of a group, or will: it wants all of its
        prompt, also those of later steps. Count those that it did not want before: of recurrent
        states the last of its prompt that any request left, which ``states`` takes."""
        start = request.counted[group]
        if start >= stop:
            return
        keys = request.keys[group]
        prompt_blocks = request.first_prompt_tokens // request.geometry.groups[group].block_tokens
        stop = request.counted[group] = max(stop, min(prompt_blocks, len(keys)))
        if group in self._history.state_groups:
            last = None if start else self._history.last_known(keys)
            if last is not None:
                self._want_state(request, last)
                request.states.append(last)
            return
        request.kin[group] = self._history.count(keys, start, stop, request.kin[group])
        self._want(request, keys[start:stop])

    def leave_state(self, request: RequestState, key: BlockKey) -> None:
        """A request leaves a recurrent state; the first that does wants it, too."""
        if not self._history.known(key)[0]:
            self._want_state(request, key)

    def _want_state(self, request: RequestState, key: BlockKey) -> None:
        self._history.count((key,), 0, 1, STATES)
        self._want(request, (key,))

    def _want(self, request: RequestState, keys: Sequence[BlockKey]) -> None:
        for admission in self._admissions:
            admission.want(keys, request.request_id)
