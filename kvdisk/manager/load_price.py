# SPDX-License-Identifier: Apache-2.0
"""How long a hit must be to be worth a load: given by the user, or learnt. Scheduler thread only.

Learnt (``min_load_tokens: "auto"``): a load that ends takes some seconds however little it brings, and in that time
the engine computes tokens. So, for the tier that the slowest block of a hit comes from,

    least tokens = tokens computed per second x seconds of the quickest recent load from that tier

rounded down to whole blocks, and at most ``MOST_BLOCKS`` of them. That is on the side of loading: the part of a load
that grows with its length counts for nothing, the rate is of steps with the time between them, and until both are
known every hit is loaded. The bound keeps it harmless where the quickest load seen was a long one; and one request
in ``TRIED_ANYWAY`` has its short hit loaded all the same, so that what was learnt is tried again.
"""

from __future__ import annotations

from kvdisk.blocks import CPU, NVME, JobId, Tier
from kvdisk.manager.transfers import JobRecord
from kvdisk.messages import Job, JobKind

_LOAD = JobKind.LOAD

MOST_BLOCKS = 4
TRIED_ANYWAY = 16
LEAST_STEP_TOKENS = 256
"""Steps of fewer tokens say how fast the engine decodes, not how fast it computes a prompt."""
LONGEST_STEP_S = 5.0
"""What takes longer is a pause between steps."""
_SMOOTHING = 1 / 8
"""Weight of a new observation."""
_SLACK = 0.5
"""Blocks by which the estimate must leave the range of the threshold in use before that changes."""


class LoadPrice:
    """See the module. ``fixed_tokens``: given by the user; None: learn. ``step_tokens``: those of the largest block."""

    def __init__(self, fixed_tokens: int | None, step_tokens: int) -> None:
        self._fixed_tokens = fixed_tokens
        self._step_tokens = step_tokens
        self._rate: float | None = None
        self._seconds: dict[Tier, float] = {}
        self._least = {CPU: 0, NVME: 0}
        self._last_step: tuple[float, int] | None = None
        self._sent_s: dict[JobId, float] = {}

    def may_refuse(self, tokens: int) -> bool:
        """Whether a hit is so short that ``is_worth`` has to be asked."""
        bound = MOST_BLOCKS * self._step_tokens if self._fixed_tokens is None else self._fixed_tokens
        return tokens < bound

    def is_worth(self, tokens: int, tier: Tier, arrival: int) -> bool:
        """Whether to load a hit. ``tier``: the slowest that it comes from; ``arrival``: the request's number."""
        if self._fixed_tokens is not None:
            return tokens >= self._fixed_tokens
        return tokens >= self._least[tier] or arrival % TRIED_ANYWAY == 0

    def least_tokens(self, tier: Tier) -> int:
        """Return the shortest hit that is loaded from a tier."""
        return self._least[tier] if self._fixed_tokens is None else self._fixed_tokens

    def stepped(self, now: float, tokens: int, jobs: tuple[Job, ...]) -> None:
        """A step begins that computes so many tokens, and sends these jobs out; the one before has ended."""
        if self._fixed_tokens is not None:
            return
        last, self._last_step = self._last_step, (now, tokens)
        if last is not None and last[1] >= LEAST_STEP_TOKENS and 0 < now - last[0] <= LONGEST_STEP_S:
            rate = last[1] / (now - last[0])
            self._rate = rate if self._rate is None else self._rate + (rate - self._rate) * _SMOOTHING
            self._update()
        for job in jobs:
            if job.kind is _LOAD:
                self._sent_s[job.id] = now

    def settled(self, record: JobRecord, now: float) -> None:
        """A load was settled; of one that brought all that it was sent for the time is noted."""
        sent_s = self._sent_s.pop(record.job.id, None)
        if sent_s is None or record.failed or not record.job.moves:
            return
        sources = [move.nvme for move in record.job.moves]
        tier = CPU if sources.count(None) == len(sources) else NVME
        seconds, known = now - sent_s, self._seconds.get(tier)
        # At once down, and slowly up: the quickest of the last loads or so.
        quicker = known is None or seconds <= known
        self._seconds[tier] = seconds if known is None or quicker else known + (seconds - known) * _SMOOTHING
        self._update()

    def _update(self) -> None:
        """Take over what the estimates say, where they have left the range of the thresholds in use."""
        if self._rate is None:
            return
        for tier, seconds in self._seconds.items():
            blocks = min(self._rate * seconds / self._step_tokens, MOST_BLOCKS)
            current = self._least[tier] // self._step_tokens
            if not current - _SLACK <= blocks < current + 1 + _SLACK:
                self._least[tier] = int(blocks) * self._step_tokens
