# SPDX-License-Identifier: Apache-2.0
"""How long a hit must be to be worth its load.

A load takes its time however little it brings, and in that time the engine computes tokens. With
``min_load_tokens: "auto"`` the threshold is learnt, for the tier that the slowest block of a hit
comes from:

    least tokens = tokens computed per second x seconds of the quickest recent load from that tier

rounded down to whole blocks, and at most ``CAP_BLOCKS`` of them. Until both are known every hit is
loaded, and one request in ``TRIED_ANYWAY`` has its short hit loaded all the same, so that what was
learnt is tried again.
"""

from __future__ import annotations

from kvdisk.blocks import Tier

CAP_BLOCKS = 4
TRIED_ANYWAY = 16
LEAST_STEP_TOKENS = 256
"""Steps of fewer tokens say how fast the engine decodes, not how fast it computes a prompt."""
LONGEST_STEP_S = 5.0
"""What takes longer is a pause between steps."""
_SMOOTHING = 1 / 8
"""Weight of a new observation."""


class LoadThreshold:
    """How long a hit must be to be worth a load.

    ``fixed_tokens``: given by the user; None: learn. ``alignment_tokens``: what hits are multiples
    of. ``enough_tokens``: a hit of so many is loaded, whatever tier it comes from.
    """

    def __init__(self, fixed_tokens: int | None, alignment_tokens: int) -> None:
        self._most_tokens = CAP_BLOCKS * alignment_tokens if fixed_tokens is None else fixed_tokens
        self.enough_tokens = self._most_tokens if fixed_tokens is not None else 0
        self._is_fixed = fixed_tokens is not None
        self._alignment_tokens = alignment_tokens
        self.rate = 0.0
        """Tokens computed per second; 0: not known."""
        self._seconds: dict[Tier, float] = {}
        self._last_step: tuple[float, int] | None = None

    def is_worth(self, tokens: int, tier: Tier, arrival: int) -> bool:
        """Whether to load a hit. ``tier``: the slowest that it comes from; ``arrival``: the
        request's number."""
        return tokens >= self.least_tokens(tier) or (not self._is_fixed and arrival % TRIED_ANYWAY == 0)

    def least_tokens(self, tier: Tier) -> int:
        """Return the shortest hit that is loaded from a tier."""
        return self._most_tokens if self._is_fixed else self._computed_in(self._seconds.get(tier, 0.0))

    def _computed_in(self, seconds: float) -> int:
        """Return how many tokens the engine computes in the time of a load."""
        blocks = int(self.rate * seconds / self._alignment_tokens)
        return min(blocks * self._alignment_tokens, self._most_tokens)

    def _learn(self) -> None:
        if not self._is_fixed:
            self.enough_tokens = self._computed_in(max(self._seconds.values(), default=0.0))

    def stepped(self, now: float, tokens: int) -> None:
        """Take note that a step begins which computes so many tokens: for the engine's rate."""
        last, self._last_step = self._last_step, (now, tokens)
        if last is not None and last[1] >= LEAST_STEP_TOKENS and 0 < now - last[0] <= LONGEST_STEP_S:
            rate = last[1] / (now - last[0])
            self.rate += (rate - self.rate) * (_SMOOTHING if self.rate else 1.0)
            self._learn()

    def loaded(self, tier: Tier, seconds: float) -> None:
        """Take note of the time of a load that failed nowhere. ``tier``: the slowest it read."""
        known = self._seconds.get(tier, seconds)
        # At once down, and slowly up: the quickest of the last loads or so.
        self._seconds[tier] = min(seconds, known + (seconds - known) * _SMOOTHING)
        self._learn()
