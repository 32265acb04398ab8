# SPDX-License-Identifier: Apache-2.0
"""The report of ``kvdisk report``: one HTML page with what ``kvdisk inspect`` prints, and with two
pictures, of the segments and of the tree of prefixes.

Pure: the same survey gives the same bytes. All text from a store is escaped where it is put into
the page.
"""

from __future__ import annotations

import html
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from kvdisk import __version__
from kvdisk.cli.inspect import prefix_table, print_survey
from kvdisk.cli.output import (
    ID_LETTERS,
    ago,
    duration,
    in_shares,
    miss_counts,
    number,
    plural,
    printable,
    share,
    short_model,
    size,
)
from kvdisk.cli.prefixes import Prefix, PrefixTree, each_prefix
from kvdisk.cli.report.look import SCRIPT, STYLE
from kvdisk.cli.survey import Home, Segment, Survey, read_run_blocks
from kvdisk.device.telemetry_file import TelemetryRecord
from kvdisk.stats import SOURCES, TIER_WORDS, TIERS

MARK = "<!doctype html><!-- kvdisk report -->"
"""The beginning of every report: a file that has it may be replaced by another report."""
COLUMNS = 120
"""Columns of what is printed as text."""
PREFIX_ROWS = 12
MOST_HOMES, MOST_CELLS, MOST_TREES = 50, 2000, 24
"""The engine stores, segments and trees that are shown at most, so that a report stays below 2
MB."""
REUSE_STEPS = ((0, "not reused"), (1, "1"), (3, "2-3"), (8, "4-8"), (32, "9-32"), (128, "33-128"), (None, "> 128"))
"""The colours: the most uses of a prefix's blocks on average that have each, and its name."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def page(survey: Survey, records: Sequence[TelemetryRecord] = ()) -> str:
    """Return the whole report. It names nothing outside itself. ``records``: from the FIGURES files
    of the store's engines."""
    name = f"kvdisk store {printable(survey.store.path)}"
    parts = [
        f'{MARK}\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(name)}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{escaped(name)}</h1><p>As of {moment(survey.surveyed_s)}, by kvdisk {escaped(__version__)}.</p>",
        *_tables(survey),
        *_requests(records),
        *_prefixes(survey),
        *_occupancy(survey),
        f"</main><script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def escaped(value: object) -> str:
    """Return a value of any origin as text for a page."""
    return html.escape(printable(value), quote=True)


def moment(at_s: float) -> str:
    """Return a time, given in seconds since the Unix epoch, in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(at_s, 1 << 35)))


def _printed(show: Callable[[Console], None]) -> str:
    """Return what ``show`` prints on a terminal as a part of a page."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), legacy_windows=False, markup=False, highlight=False, emoji=False
    )
    show(console)
    return f"<pre>{console.export_html(inline_styles=True, code_format='{code}')}</pre>"


def _tables(survey: Survey) -> Iterator[str]:
    """Yield what ``kvdisk inspect`` prints, but for the prefixes, which are drawn."""
    shown = replace(survey, engine_stores=survey.engine_stores[:MOST_HOMES])
    yield f"<section>{_printed(lambda console: print_survey(shown, console, ('models', 'stores', 'segments', 'ages')))}"
    if hidden := len(survey.engine_stores) - len(shown.engine_stores):
        yield f"<p>and {number(hidden)} more engine stores: kvdisk inspect</p>"
    yield "</section>"


# -- requests ----------------------------------------------------------------------------------


def _requests(records: Sequence[TelemetryRecord]) -> Iterator[str]:
    """Yield what the requests of each engine found, and why not more."""
    asked = [each for each in records if each.totals.get("lookup_tokens")]
    if not asked:
        return
    yield "<section><h2>What requests found</h2>"
    yield "<p>Of the tokens that the GPU had not got; of each engine since its start, as last written.</p>"
    for each in asked[:MOST_HOMES]:
        asked_tokens = each.totals["lookup_tokens"]
        hits = {tier: min(1.0, each.totals.get(f"hit_tokens.{tier}", 0) / asked_tokens) for tier in SOURCES}
        found = ", ".join(f"{TIER_WORDS[tier]} {share(hits[tier])}" for tier in SOURCES if tier in TIERS or hits[tier])
        saved = each.totals.get("saved_seconds", 0)
        lines = [f"{short_model(each.model)}, pid {each.pid} on {each.host}, until {moment(each.time_s)}"]
        lines.append(f"hits: {found}" + (f"; saved ~{duration(saved)} of computing" if saved else ""))
        if misses := miss_counts(each.totals):
            lines.append(f"{plural(sum(misses.values()), 'request')} missed something: {in_shares(misses)}")
        yield from (f"<p>{escaped(line)}</p>" for line in lines)
    yield "</section>"


# -- prefixes ----------------------------------------------------------------------------------


def _prefixes(survey: Survey) -> Iterator[str]:
    grown = [each for each in survey.namespaces if each.prefixes.tree]
    for namespace in grown[:MOST_TREES]:
        tree = namespace.prefixes
        whose = f"{escaped(namespace.fingerprint[:ID_LETTERS])}, {escaped(namespace.model)}"
        yield f"<section><h2>Prefixes of {whose}</h2>"
        yield "<p>A piece is a row of blocks that follow each other without a branch; what begins with it lies below. "
        yield "Widths are bytes, a piece with all that follows it."
        yield '<span class="hint"> Click to zoom in, on the top row or Escape to zoom out.</span></p>'
        listed = [prefix for _, prefix in each_prefix(tree.tree)]
        yield f"{_legend(listed)}{_icicle(tree, survey.surveyed_s)}"
        if hidden := tree.total - len(listed):
            yield f"<p>{plural(hidden, 'smaller piece')} with {plural(tree.hidden_blocks, 'block')} in "
            yield f"{size(tree.hidden_bytes)} are left out.</p>"
        yield f"{_most_used(listed, survey.surveyed_s)}</section>"


def _legend(listed: Sequence[Prefix]) -> str:
    has_uses = any(prefix.uses is not None for prefix in listed)
    title = "uses a block, in the mean:" if has_uses else "other chains that share it:"
    items = "".join(f'<span><i class="k{at}"></i>{escaped(name)}</span>' for at, (_, name) in enumerate(REUSE_STEPS))
    return f'<div class="legend"><span>{title}</span>{items}</div>'


def _icicle(tree: PrefixTree, now_s: int) -> str:
    """Return the tree: a row for each depth; widths by the bytes of a prefix and of all below
    it."""
    total = sum(prefix.bytes for _, prefix in each_prefix(tree.tree)) + tree.hidden_bytes
    everything = f"all {plural(tree.chains, 'chain')}, {size(total)}"
    pieces = "".join(_pieces(tree.tree, max(1, total), now_s))
    return (
        f'<div class="tree"><div class="node"><p class="all" tabindex="0" data-bytes="{total}">{everything}</p>'
        f"{pieces}</div></div>"
    )


def _pieces(prefixes: Iterable[Prefix], around_bytes: int, now_s: int) -> Iterator[str]:
    """Yield prefixes side by side, each with those that follow it below. ``around_bytes``: the
    bytes that their place is as wide as."""
    for prefix in prefixes:
        whole_bytes = prefix.bytes + prefix.below_bytes
        # Never rounded up: otherwise the pieces could together be wider than their place, and the
        # last would wrap.
        percent = int(1e6 * whole_bytes / around_bytes) / 1e4
        tokens = "" if prefix.tokens is None else f" · {number(prefix.tokens)} tokens"
        title = "\n".join(html.escape(line) for line in _title(prefix, now_s))
        yield (
            f'<div class="node" style="width:{percent}%">'
            f'<p class="k{_colour(prefix)}" tabindex="0" title="{title}" data-key="{escaped(prefix.key)}" '
            f'data-bytes="{prefix.bytes}" data-below="{prefix.below_bytes}">'
            f"{escaped(prefix.key[:ID_LETTERS])}{tokens}</p>"
        )
        yield from _pieces(prefix.tree, whole_bytes, now_s)
        yield "</div>"


def _title(prefix: Prefix, now_s: int) -> Iterator[str]:
    yield f"{prefix.key[:16]}…"
    tokens = "? tokens" if prefix.tokens is None else f"{number(prefix.tokens)} tokens"
    start = "" if not prefix.start_tokens else f" after {number(prefix.start_tokens)}"
    yield f"{tokens}{start}, {plural(prefix.blocks, 'block')}, {size(prefix.bytes)}"
    if prefix.below_blocks:
        yield f"shared by {plural(prefix.chains, 'chain')}; {plural(prefix.below_blocks, 'block')} follow"
    if prefix.first_uses is not None and prefix.last_uses is not None:
        yield f"used {number(prefix.first_uses)} times, its end {number(prefix.last_uses)} times"
        yield f"last use {ago(prefix.last_use_s, now_s)}" if prefix.last_use_s else "never used again"
    if prefix.hidden_children:
        yield f"{number(prefix.hidden_children)} smaller ones are not shown below"


def _colour(prefix: Prefix) -> int:
    """Return the colour of a prefix: by its uses, or by the chains that share it."""
    uses = prefix.chains - 1 if prefix.uses is None else prefix.uses / prefix.blocks
    return next(at for at, (bound, _) in enumerate(REUSE_STEPS) if bound is None or uses <= bound)


def _most_used(listed: Sequence[Prefix], now_s: int) -> str:
    best = sorted(
        (prefix for prefix in listed if prefix.chains > 1 or prefix.uses),
        key=lambda prefix: (-(prefix.uses or 0) * prefix.bytes // prefix.blocks, -prefix.bytes, prefix.key),
    )
    rows = [("", prefix) for prefix in best[:PREFIX_ROWS]]
    return _printed(lambda console: console.print(prefix_table("Most used", rows, now_s, COLUMNS))) if rows else ""


# -- occupancy ---------------------------------------------------------------------------------


def _occupancy(survey: Survey) -> Iterator[str]:
    filled = [home for home in survey.engine_stores if home.segments]
    if not filled:
        return
    yield "<section><h2>Occupancy</h2>"
    yield "<p>A cell is a segment: slots that hold blocks, from below; free slots in runs of less than 2 MiB, which "
    yield "larger writes go around; and free slots in longer runs.</p>"
    yield '<div class="legend"><span><i class="u"></i>blocks</span><span><i class="s"></i>free, in short runs</span>'
    yield '<span><i class="f"></i>free</span></div>'
    most = max(8, MOST_CELLS // min(len(filled), MOST_HOMES))
    for home in filled[:MOST_HOMES]:
        segments, each = home.segments, -(-len(home.segments) // most)
        owner = "in use" if home.alive else "of a stopped engine"
        yield f"<p>engine store {escaped(home.id[:ID_LETTERS])}, {owner}: {plural(len(segments), 'segment')}</p>"
        cells = (_cell(home, segments[start : start + each]) for start in range(0, len(segments), each))
        yield f'<div class="cells">{"".join(cells)}</div>'
    yield "</section>"


def _cell(home: Home, segments: Sequence[Segment]) -> str:
    """Return a cell for one segment or several: used, free in short runs, free in long runs."""
    first, last = segments[0].segment, segments[-1].segment
    name = f"segment {first}" if first == last else f"segments {first} to {last}"
    slots = sum(each.slots or 0 for each in segments)
    if not all(each.indexed for each in segments) or not slots:
        why = "not in the index" if home.index_readable else "the index cannot be read"
        why = "the index is on another host" if home.kind == "guest" else why
        return f'<div class="cell unknown" data-slots="{slots}" title="{escaped(name)}: {why}"></div>'
    used = sum(each.used_slots or 0 for each in segments)
    loose = sum(round((each.fragmentation or 0) * (each.free_slots or 0)) for each in segments)
    runs = sum(each.free_runs or 0 for each in segments)
    run = read_run_blocks(segments)
    title = (
        f"{name}: {number(used)} of {number(slots)} slots used ({share(used / slots)}), {plural(runs, 'free run')}, "
        f"{number(loose)} free slots in short runs" + (f", {run:.1f} blocks a read" if run else "")
    )
    return (
        f'<div class="cell" data-slots="{slots}" data-used="{used}" data-short="{loose}" title="{escaped(title)}">'
        f'<i class="s" style="height:{100 * loose / slots:.1f}%"></i>'
        f'<i class="u" style="height:{100 * used / slots:.1f}%"></i></div>'
    )
