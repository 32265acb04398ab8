# SPDX-License-Identifier: Apache-2.0
"""Numbers, sizes and times as people read them. Pure."""

from __future__ import annotations

import time

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_LONGEST_AGE_DAYS = 99
_JUST_NOW_S = 5


def size(count_bytes: int | None) -> str:
    """Return bytes in the largest binary unit that leaves 1 or more: ``1.5 GiB``; ``?`` for None."""
    if count_bytes is None:
        return "?"
    if count_bytes < 1024:
        return f"{count_bytes} B"
    value = float(count_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95:  # what would be shown as 1024.0
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def number(count: int | None) -> str:
    """Return a count with its thousands apart: ``12,345``; ``?`` for None."""
    return "?" if count is None else f"{count:,}"


def share(fraction: float | None) -> str:
    """Return a share in per cent; 0 and 100 stand for exactly none and all. ``?`` for None."""
    if fraction is None:
        return "?"
    if 0 < fraction < 0.01:
        return "<1 %"
    percent = 99 if 0.99 <= fraction < 1 else round(fraction * 100)
    return f"{percent} %"


def bar(fraction: float, width: int) -> str:
    """Return a bar of ``width`` characters, filled in that share."""
    filled = min(width, max(0, round(fraction * width)))
    return "█" * filled + "░" * (width - filled)


def fine_bar(fraction: float, width: int) -> str:
    """Return a bar of up to ``width`` characters, in eighths of one; not empty unless the share is 0."""
    eighths = min(8 * width, max(1 if fraction > 0 else 0, round(fraction * 8 * width)))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def ago(then_s: int, now_s: int) -> str:
    """Return how long ago something was: ``3 min ago``; the date where that is long, or lies ahead."""
    age_s = now_s - then_s
    if age_s > _LONGEST_AGE_DAYS * _DAY_S or age_s < -_MINUTE_S:
        return time.strftime("%Y-%m-%d", time.localtime(then_s))
    if age_s < _JUST_NOW_S:
        return "just now"
    for unit_s, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if age_s >= unit_s:
            return f"{age_s // unit_s} {unit} ago"
    return f"{age_s} s ago"


def plural(count: int, noun: str) -> str:
    """Return ``1 home``, ``2 homes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(value: object) -> str:
    """Return a value of unknown origin as text that cannot steer a terminal; ``?`` for None."""
    if value is None:
        return "?"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value))
