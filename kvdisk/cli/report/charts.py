# SPDX-License-Identifier: Apache-2.0
"""The pictures of the report, as SVG and HTML. Pure; all that comes from a store is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvdisk.cli.block_facts import Prefix, PrefixTree
from kvdisk.cli.store_facts import HomeFacts, SegmentFacts, read_run_blocks
from kvdisk.cli.wording import ago, number, plural, share, size

WIDTH = 1150.0
_ROW, _GAP = 26, 1
_SHORT_LETTERS = 8
THIN = 4
"""Narrower pieces have no edge: there would be nothing else to see."""
REUSE_STEPS = ((0, "not reused"), (1, "1"), (3, "2-3"), (8, "4-8"), (32, "9-32"), (128, "33-128"), (None, "> 128"))
"""Up to how many uses of a prefix's blocks, in the mean, have a colour."""


def escaped(value: object) -> str:
    """Return text of any origin as part of a document."""
    return html.escape(str(value), quote=True)


def short(count: int) -> str:
    """Return a count in few letters: ``812``, ``8.1k``, ``81k``, ``8.1M``."""
    value, unit = float(count), ""
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"


def bars(name: str, rows: Sequence[tuple[str, int, bool]]) -> str:
    """Return a bar chart. ``rows``: label, count, and whether it is apart from the scale (never, not known)."""
    width, row_height, left, right = 360.0, 21.0, 74.0, 52.0
    highest = max([1, *(count for _, count, _ in rows)])
    height = row_height * len(rows)
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escaped(name)}" '
        f'data-chart="{escaped(name)}">',
        f'<line class="axis" x1="{left:.0f}" x2="{left:.0f}" y1="0" y2="{height:.0f}"/>',
    ]
    for at, (label, count, other) in enumerate(rows):
        long = (width - left - right) * count / highest
        long = max(long, 1.5) if count else 0.0
        top = at * row_height
        kind = "bar other" if other else "bar"
        value = "value" if count else "none"
        parts.append(
            f"<g><title>{escaped(label)}: {plural(count, 'block')}</title>"
            f'<text x="{left - 8:.0f}" y="{top + 14.5:.1f}" text-anchor="end">{escaped(label)}</text>'
            f'<rect class="{kind}" data-label="{escaped(label)}" data-count="{count}" x="{left:.0f}" '
            f'y="{top + 3:.1f}" width="{long:.1f}" height="{row_height - 6:.0f}" rx="2"/>'
            f'<text class="{value}" x="{left + long + 6:.1f}" y="{top + 14.5:.1f}">{short(count)}</text></g>'
        )
    return "".join(parts) + "</svg>"


# -- occupancy ---------------------------------------------------------------------------------


def cells(home: HomeFacts, segments: Sequence[SegmentFacts], most: int) -> str:
    """Return a cell for each segment, or for several: how much is used, free in short runs, and free in long ones."""
    each = -(-len(segments) // most)
    parts = [_cell(home, segments[start : start + each]) for start in range(0, len(segments), each)]
    return f'<div class="cells">{"".join(parts)}</div>'


def _cell(home: HomeFacts, segments: Sequence[SegmentFacts]) -> str:
    first, last = segments[0].segment, segments[-1].segment
    name = f"segment {first}" if first == last else f"segments {first} to {last}"
    known = [each for each in segments if each.layout is not None]
    slots = sum(each.slots or 0 for each in segments)
    data = f'data-segments="{len(segments)}" data-slots="{slots}"'
    if len(known) < len(segments) or not slots:
        why = "not in the index" if home.tallies is not None else "the index cannot be read"
        return f'<div class="cell unknown" {data} title="{escaped(name)}: {why}"></div>'
    used = sum(each.used_slots or 0 for each in segments)
    loose = sum(each.layout.short_free_slots for each in segments if each.layout)
    runs = sum(each.layout.free_runs for each in segments if each.layout)
    run = read_run_blocks(segments)
    told = (
        f"{name}: {number(used)} of {number(slots)} slots used ({share(used / slots)}), {plural(runs, 'free run')}, "
        f"{number(loose)} free slots in short runs" + (f", {run:.1f} blocks a read" if run else "")
    )
    return (
        f'<div class="cell" {data} data-used="{used}" data-short="{loose}" title="{escaped(told)}">'
        f'<i class="s" style="height:{100 * loose / slots:.1f}%"></i>'
        f'<i class="u" style="height:{100 * used / slots:.1f}%"></i></div>'
    )


# -- prefixes ----------------------------------------------------------------------------------


class _Place(NamedTuple):
    prefix: Prefix
    start: float
    width: float


def icicle(tree: PrefixTree, now_s: int) -> str:
    """Return the tree of prefixes: a row for each depth, widths by the bytes of a prefix and all that follows it."""
    total = sum(prefix.bytes for prefix in tree.prefixes) + tree.hidden_bytes
    places = list(_places(tree.prefixes, max(1, total)))
    rows = 2 + max((place.prefix.depth for place in places), default=-1)
    height = rows * _ROW
    everything = f"all {plural(tree.chains, 'chain')}, {size(total)}"
    parts = [f'<svg class="tree" viewBox="0 0 {WIDTH:.0f} {height}" role="img" aria-label="prefix tree">']
    parts.append(_node("all", 0.0, 1.0, 0, everything, everything, everything, f'data-bytes="{total}"'))
    for prefix, start, width in places:
        key = prefix.key[:_SHORT_LETTERS]
        long = key if prefix.tokens is None else f"{key} · {number(prefix.tokens)} tokens"
        told = "\n".join(_told(prefix, now_s))
        data = f'data-bytes="{prefix.bytes}" data-below="{prefix.below_bytes}" data-key="{escaped(prefix.key)}"'
        parts.append(_node(f"r{_step(prefix)}", start, width, prefix.depth + 1, key, long, told, data))
    return "".join(parts) + "</svg>"


def _places(prefixes: Iterable[Prefix], total: int) -> Iterator[_Place]:
    """Yield each prefix with its place in a row of width 1: children side by side from their parent's start on."""
    starts = [0.0]
    for prefix in prefixes:
        del starts[prefix.depth + 1 :]
        start, width = starts[prefix.depth], (prefix.bytes + prefix.below_bytes) / total
        yield _Place(prefix, start, width)
        starts[prefix.depth] = start + width
        starts.append(start)


def _node(kind: str, start: float, width: float, row: int, key: str, long: str, told: str, data: str) -> str:
    x, w = start * WIDTH, width * WIDTH
    kind += " thin" if w < THIN else ""
    text = long if w > 8 * len(long) else key if w > 62 else ""
    return (
        f'<g class="{kind}" tabindex="0" data-x="{start:.6f}" data-w="{width:.6f}" data-short="{escaped(key)}" '
        f'data-long="{escaped(long)}" {data}>'
        f'<rect x="{x:.2f}" y="{row * _ROW}" width="{w:.2f}" height="{_ROW - _GAP}" rx="2"/>'
        f'<title>{escaped(told)}</title><text x="{x + 5:.2f}" y="{row * _ROW + 17}">{escaped(text)}</text></g>'
    )


def _told(prefix: Prefix, now_s: int) -> Iterator[str]:
    yield f"{prefix.key[:16]}…"
    tokens = "? tokens" if prefix.tokens is None else f"{number(prefix.tokens)} tokens"
    start = "" if not prefix.start_tokens else f" after {number(prefix.start_tokens)}"
    yield f"{tokens}{start}, {plural(prefix.blocks, 'block')}, {size(prefix.bytes)}"
    if prefix.below_blocks:
        yield f"shared by {plural(prefix.chains, 'chain')}; {plural(prefix.below_blocks, 'block')} follow"
    if prefix.first_uses is not None and prefix.last_uses is not None:
        yield f"used {number(prefix.first_uses)} times, its end {number(prefix.last_uses)} times"
        yield f"last use {ago(prefix.last_use_s, now_s)}" if prefix.last_use_s else "never used again"
    if prefix.hidden:
        yield f"{number(prefix.hidden)} smaller ones are not shown below"


def _step(prefix: Prefix) -> int:
    """Return the colour of a prefix; where uses are not known, chains that share it stand for them."""
    uses = prefix.chains - 1 if prefix.uses is None else prefix.uses / prefix.blocks
    bounds = [bound for bound, _ in REUSE_STEPS]
    return next(at for at, bound in enumerate(bounds) if bound is None or uses <= bound)
