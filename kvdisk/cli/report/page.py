# SPDX-License-Identifier: Apache-2.0
"""The report of ``kvdisk report`` as one HTML page. Pure: the same survey gives the same bytes.

All text that comes from a store is escaped where it is put into the page.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from kvdisk import __version__
from kvdisk.cli.inspect import homes_table, namespaces_table, prefix_table, segments_table
from kvdisk.cli.output import ID_LETTERS, WIDE, ago, number, plural, printable, share, size
from kvdisk.cli.prefixes import Prefix, PrefixTree, each_prefix
from kvdisk.cli.report.look import SCRIPT, STYLE
from kvdisk.cli.survey import (
    AGE_NAMES,
    REUSE_NAMES,
    Home,
    Segment,
    Survey,
    fragmentation,
    read_run_blocks,
    read_run_bytes,
)

MARK = "<!doctype html><!-- kvdisk report -->"
"""How every report begins: such a file may be replaced by another report."""
MOST_ROWS = 200
PREFIX_ROWS = 12
MOST_CELLS, MOST_PARTS, MOST_TREES = 2000, 60, 24
"""What is drawn, so that a report stays below 2 MB: segments, homes on a drive, trees."""
REUSE_STEPS = ((0, "not reused"), (1, "1"), (3, "2-3"), (8, "4-8"), (32, "9-32"), (128, "33-128"), (None, "> 128"))
"""Up to how many uses of a prefix's blocks, in the mean, have a colour."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
_APART = {"never", "not known"}
_LONGEST_PERCENT = 62
"""Of a chart's width: the longest bar, beside its label and its count."""


def page(survey: Survey) -> str:
    """Return the whole report. It names nothing outside itself."""
    name = f"kvdisk store {printable(survey.store.path)}"
    parts = [
        f'{MARK}\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(name)}</title><style>{STYLE}</style></head><body><main>",
        *_header(survey),
        *_problems(survey),
        *_tiles(survey),
        *_prefixes(survey),
        *_histograms(survey),
        *_occupancy(survey),
        *_tables(survey),
        f"<footer>kvdisk {escaped(__version__)}, {_moment(survey.surveyed_s)}. Bytes are those of slots on all ranks, "
        "headers included, unless it says otherwise.</footer>",
        f"</main><script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def escaped(value: object) -> str:
    """Return text of any origin as part of a page."""
    return html.escape(printable(value), quote=True)


def _code(name: str | None) -> str:
    return "?" if name is None else f"<code>{escaped(name[:ID_LETTERS])}</code>"


def _moment(moment_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment_s))


def _header(survey: Survey) -> Iterator[str]:
    models = ", ".join(dict.fromkeys(printable(each.model) for each in survey.namespaces))
    created_s = survey.store.created_s
    made = "" if created_s is None else f", made {ago(created_s, survey.surveyed_s)}"
    yield f"<header><h1>{escaped(survey.store.path)}</h1>"
    yield f"<p>{escaped(models or 'no engine has used this store yet')}{escaped(made)}. "
    yield f"As of {_moment(survey.surveyed_s)}.</p></header>"


def _problems(survey: Survey) -> Iterator[str]:
    if survey.problems:
        yield f'<section class="problems"><h2>{plural(len(survey.problems), "problem")}</h2><ul>'
        yield from (f"<li>{escaped(problem)}</li>" for problem in survey.problems[:MOST_ROWS])
        if len(survey.problems) > MOST_ROWS:
            yield f"<li>and {number(len(survey.problems) - MOST_ROWS)} more</li>"
        yield "</ul></section>"


def _tiles(survey: Survey) -> Iterator[str]:
    totals, reuse = survey.totals, survey.reuse
    segments = [segment for home in survey.homes for segment in home.segments]
    chains = sum(each.prefixes.chains for each in survey.namespaces)
    filled = share(totals.blocks / totals.slots) if totals.slots else "none"
    yield '<div class="tiles">'
    yield _tile("blocks", "Blocks", number(totals.blocks), f"{filled} of {number(totals.slots)} slots")
    yield _tile("used", "In blocks", size(totals.used_bytes), f"in {plural(chains, 'chain')}")
    note, meter = "no live owner, so no cap", ""
    if totals.cap_bytes:
        fraction = totals.allocated_bytes / totals.cap_bytes
        meter = f'<div class="meter"><i style="width:{100 * min(1.0, fraction):.1f}%"></i></div>'
        note = f"{share(fraction)} of {size(totals.cap_bytes)}"
    yield _tile("allocated", "Allocated", size(totals.allocated_bytes), note, meter)
    orphans = plural(totals.homes - totals.live_homes, "orphan")
    yield _tile("homes", "Homes", number(totals.homes), f"{totals.live_homes} in use, {orphans}")
    if reuse.blocks is None:
        yield _tile("reused", "Used again", "?", "no USES file yet")
    else:
        told, again = sum(reuse.blocks), sum(reuse.blocks[1:])
        used = share(again / told) if told else "?"
        yield _tile("reused", "Used again", used, f"{number(again)} of {number(told)} blocks")
    run, loose = read_run_bytes(segments), fragmentation(segments)
    note = "nothing is free" if loose is None else f"{share(loose)} of free bytes in short runs"
    yield _tile("run", "Mean read", size(None if run is None else round(run)), note)
    yield "</div>"


def _tile(name: str, title: str, value: str, note: str, meter: str = "") -> str:
    return (
        f'<div class="tile" data-tile="{name}"><span class="name">{escaped(title)}</span><b>{escaped(value)}</b>'
        f"{meter}<span>{escaped(note)}</span></div>"
    )


# -- ages and reuse ----------------------------------------------------------------------------


def _histograms(survey: Survey) -> Iterator[str]:
    ages, reuse = survey.ages, survey.reuse
    yield "<section><h2>Age and reuse</h2>"
    yield '<p class="note">Blocks by time since they were stored, by time since a request last found them, and by how '
    yield "many requests have found them. The request that made a block is none of them.</p>"
    if not any(ages.stored):
        yield '<p class="soft">There are no blocks.</p></section>'
        return
    used = None if ages.used is None else [*ages.used, ages.never_used or 0, ages.unknown or 0]
    uses = None if reuse.blocks is None else [*reuse.blocks, reuse.unknown or 0]
    yield '<div class="pair">'
    yield f"<div><h3>Stored ago</h3>{_bars('stored', AGE_NAMES, ages.stored)}</div>"
    yield f"<div><h3>Last used ago</h3>{_bars('used', (*AGE_NAMES, 'never', 'not known'), used)}</div>"
    yield f"<div><h3>Times used</h3>{_bars('reuse', (*REUSE_NAMES, 'not known'), uses)}</div></div></section>"


def _bars(name: str, labels: Sequence[str], counts: Sequence[int] | None) -> str:
    """Return a bar chart of blocks by class."""
    if counts is None:
        return '<p class="soft">Not known: no home has a USES file yet.</p>'
    longest = max(1, *counts)
    rows = (
        f'<div title="{escaped(label)}: {plural(count, "block")}"><span>{escaped(label)}</span>'
        f'<i class="{"other" if label in _APART else ""}" data-label="{escaped(label)}" data-count="{count}" '
        f'style="width:{_LONGEST_PERCENT * count / longest:.2f}%"></i>{number(count)}</div>'
        for label, count in zip(labels, counts, strict=True)
        if label != "not known" or count
    )
    return f'<div class="chart" data-chart="{escaped(name)}">{"".join(rows)}</div>'


# -- occupancy ---------------------------------------------------------------------------------


def _occupancy(survey: Survey) -> Iterator[str]:
    yield "<section><h2>Occupancy</h2>"
    yield '<p class="note">A cell is a segment: slots that hold blocks, from below; free slots in runs of less than '
    yield "2 MiB, which larger writes go around; and free slots in longer runs.</p>"
    yield '<div class="legend"><span><i style="background:var(--accent)"></i>blocks</span>'
    yield '<span><i style="background:var(--short)"></i>free, in short runs</span>'
    yield '<span><i style="background:var(--free)"></i>free</span></div>'
    parts = [
        (at, drive, home, segments)
        for at, drive in enumerate(survey.drives)
        for home in survey.homes
        if (segments := _segments_on(home, drive.store_id, at))
    ]
    most = max(8, MOST_CELLS // max(1, min(len(parts), MOST_PARTS)))
    before = -1
    for at, drive, home, segments in parts[:MOST_PARTS]:
        if at != before and len(survey.drives) > 1:
            where = "a directory that was not named" if drive.path is None else drive.path
            said = f"{plural(drive.segments, 'segment')}, {plural(drive.blocks, 'block')} in {size(drive.used_bytes)}"
            yield f'<h3>{escaped(where)} <span class="soft">{said}</span></h3>'
        before = at
        each = -(-len(segments) // most)
        cells = "".join(_cell(home, segments[start : start + each]) for start in range(0, len(segments), each))
        yield f'<div class="soft" data-drive="{at}">home {_code(home.id)}, {_owner(home)}: '
        yield f'{plural(len(segments), "segment")}</div><div class="cells">{cells}</div>'
    if len(parts) > MOST_PARTS:
        yield f'<p class="note">and {number(len(parts) - MOST_PARTS)} more homes: kvdisk inspect --all</p>'
    yield "</section>" if parts else '<p class="soft">There are no segments.</p></section>'


def _segments_on(home: Home, store_id: str | None, at: int) -> list[Segment]:
    """Return a home's segments on a drive of the store."""
    if home.fingerprint is None:  # its HOME cannot be read: only what lies on the first drive is known
        place = 0 if at == 0 else -1
    else:
        place = home.drives.index(store_id) if store_id in home.drives else -1
    return [segment for segment in home.segments if segment.drive == place]


def _owner(home: Home) -> str:
    return '<span class="alive">in use</span>' if home.alive else '<span class="orphan">orphan</span>'


def _cell(home: Home, segments: Sequence[Segment]) -> str:
    """Return a cell for one segment or several: used, free in short runs, free in long ones."""
    first, last = segments[0].segment, segments[-1].segment
    name = f"segment {first}" if first == last else f"segments {first} to {last}"
    slots = sum(each.slots or 0 for each in segments)
    data = f'data-segments="{len(segments)}" data-slots="{slots}"'
    if not all(each.indexed for each in segments) or not slots:
        why = "not in the index" if home.index_readable else "the index cannot be read"
        return f'<div class="cell unknown" {data} title="{escaped(name)}: {why}"></div>'
    used = sum(each.used_slots or 0 for each in segments)
    loose = sum(round((each.fragmentation or 0) * (each.free_slots or 0)) for each in segments)
    runs = sum(each.free_runs or 0 for each in segments)
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


def _prefixes(survey: Survey) -> Iterator[str]:
    grown = [each for each in survey.namespaces if each.prefixes.tree]
    for namespace in grown[:MOST_TREES]:
        tree, model = namespace.prefixes, escaped(namespace.model)
        yield f"<section><h2>Shared prefixes{f' of {model}' if len(grown) > 1 else ''}</h2>"
        whose = f"Namespace {_code(namespace.fingerprint)}{'' if len(grown) > 1 else f', {model}'}."
        yield f'<p class="note">{whose} A piece is a row of blocks that follow each other '
        yield "without a branch; what begins with it lies below. Widths are bytes, a piece with all that follows it."
        yield '<span class="hint"> Click to zoom in, on the top row or Escape to zoom out.</span></p>'
        listed = [prefix for _, prefix in each_prefix(tree.tree)]
        yield f"{_legend(listed)}{_icicle(tree, survey.surveyed_s)}"
        if hidden := tree.total - len(listed):
            yield f'<p class="note">{plural(hidden, "smaller piece")} with {plural(tree.hidden_blocks, "block")} in '
            yield f"{size(tree.hidden_bytes)} are left out.</p>"
        yield from _most_used(listed, survey.surveyed_s)
        yield "</section>"


def _legend(listed: Sequence[Prefix]) -> str:
    told = any(prefix.uses is not None for prefix in listed)
    title = "uses a block, in the mean:" if told else "other chains that share it:"
    items = "".join(f'<span><i class="k{at}"></i>{escaped(name)}</span>' for at, (_, name) in enumerate(REUSE_STEPS))
    return f'<div class="legend"><span>{title}</span>{items}</div>'


def _icicle(tree: PrefixTree, now_s: int) -> str:
    """Return the tree: a row for each depth, widths by bytes of a prefix and all below it."""
    total = sum(prefix.bytes for _, prefix in each_prefix(tree.tree)) + tree.hidden_bytes
    everything = f"all {plural(tree.chains, 'chain')}, {size(total)}"
    pieces = "".join(_pieces(tree.tree, max(1, total), now_s))
    return (
        f'<div class="tree"><div class="node"><p class="all" tabindex="0" data-bytes="{total}">{everything}</p>'
        f"{pieces}</div></div>"
    )


def _pieces(prefixes: Iterable[Prefix], around_bytes: int, now_s: int) -> Iterator[str]:
    """Yield prefixes side by side, each with those that follow it below it. ``around_bytes``: what
    is as wide as the place that they have."""
    for prefix in prefixes:
        whole_bytes = prefix.bytes + prefix.below_bytes
        # Never rounded up: together they would be wider than their place, and the last be below.
        percent = int(1e6 * whole_bytes / around_bytes) / 1e4
        tokens = "" if prefix.tokens is None else f" · {number(prefix.tokens)} tokens"
        told = "\n".join(html.escape(line) for line in _told(prefix, now_s))
        yield (
            f'<div class="node" style="width:{percent}%">'
            f'<p class="k{_colour(prefix)}" tabindex="0" title="{told}" data-key="{escaped(prefix.key)}" '
            f'data-bytes="{prefix.bytes}" data-below="{prefix.below_bytes}">'
            f"{escaped(prefix.key[:ID_LETTERS])}{tokens}</p>"
        )
        yield from _pieces(prefix.tree, whole_bytes, now_s)
        yield "</div>"


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
    if prefix.hidden_children:
        yield f"{number(prefix.hidden_children)} smaller ones are not shown below"


def _colour(prefix: Prefix) -> int:
    """Return the colour of a prefix: by its uses, or by the chains that share it."""
    uses = prefix.chains - 1 if prefix.uses is None else prefix.uses / prefix.blocks
    return next(at for at, (bound, _) in enumerate(REUSE_STEPS) if bound is None or uses <= bound)


def _most_used(listed: Sequence[Prefix], now_s: int) -> Iterator[str]:
    best = sorted(
        (prefix for prefix in listed if prefix.chains > 1 or prefix.uses),
        key=lambda prefix: (-(prefix.uses or 0) * prefix.bytes // prefix.blocks, -prefix.bytes, prefix.key),
    )
    if best:
        yield from _table(prefix_table("Most used", [("", prefix) for prefix in best[:PREFIX_ROWS]], now_s, WIDE))


# -- tables ------------------------------------------------------------------------------------


def _tables(survey: Survey) -> Iterator[str]:
    """Yield the tables of ``kvdisk inspect``."""
    if not survey.homes:
        return
    shown = replace(survey, homes=survey.homes[:MOST_ROWS], namespaces=survey.namespaces[:MOST_ROWS])
    yield "<section>"
    yield from _table(namespaces_table(shown, WIDE))
    yield from _table(homes_table(shown, WIDE))
    if hidden := len(survey.homes) - len(shown.homes):
        yield f'<p class="note">and {number(hidden)} more: kvdisk inspect --all</p>'
    if count := sum(len(home.segments) for home in survey.homes):
        yield f"<details><summary>{plural(count, 'segment')}</summary>"
        yield from _table(segments_table(shown, WIDE, max(1, MOST_ROWS // len(shown.homes))))
        yield "</details>"
    yield "</section>"


def _table(table: Table) -> Iterator[str]:
    """Yield a table of the terminal as a part of a page."""
    columns = table.columns
    kinds = ["n" if each.justify == "right" else "wrap" if each.overflow == "fold" else "" for each in columns]
    headers = "".join(
        f'<th class="{kind}">{_cell_text(each.header)}</th>' for kind, each in zip(kinds, columns, strict=True)
    )
    yield f'<h3>{escaped(str(table.title).strip())}</h3><div class="scroll"><table><tr>{headers}</tr>'
    for cells in zip(*(each.cells for each in columns), strict=True):
        row = (f'<td class="{kind}">{_cell_text(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))
        yield f"<tr>{''.join(row)}</tr>"
    yield "</table></div>"


def _cell_text(cell: object) -> str:
    return escaped(str(cell).replace("\n", " "))
