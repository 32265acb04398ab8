# SPDX-License-Identifier: Apache-2.0
"""The report of ``kvdisk report``, from what a survey has found. Pure: the same facts give the same bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvdisk import __version__
from kvdisk.cli.block_facts import AGE_NAMES, REUSE_NAMES, PrefixTree
from kvdisk.cli.report.charts import REUSE_STEPS, bars, cells, escaped, icicle
from kvdisk.cli.report.look import SCRIPT, STYLE
from kvdisk.cli.store_facts import (
    HomeFacts,
    NamespaceFacts,
    SegmentFacts,
    StoreFacts,
    add_classes,
    fragmentation,
    read_run_bytes,
)
from kvdisk.cli.wording import ago, number, plural, printable, share, size

MARK = "<!doctype html><!-- kvdisk report -->"
"""How every report begins: such a file may be replaced by another report."""
MOST_ROWS = 200
PREFIX_ROWS = 12
MOST_CELLS, MOST_PARTS, MOST_TREES = 2000, 60, 24
"""What is drawn: cells of segments, homes on a drive, namespaces' trees. So the report stays below 2 MB."""
_ID_LETTERS = 8
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"
_APART = {"never", "not known"}


def document(facts: StoreFacts) -> str:
    """Return the whole report. It names nothing outside itself, and forbids the browser to ask for anything."""
    name = f"kvdisk store {printable(facts.path)}"
    parts = [
        f'{MARK}\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(name)}</title><style>{STYLE}</style></head><body><main>",
        *_header(facts),
        *_problems(facts),
        *_tiles(facts),
        *_prefixes(facts),
        *_histograms(facts),
        *_occupancy(facts),
        *_tables(facts),
        f"<footer>kvdisk {escaped(__version__)}, {_moment(facts.surveyed_s)}. Bytes are those of slots on all ranks, "
        "headers included, unless it says otherwise.</footer>",
        f"</main><script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _moment(moment_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment_s))


def _header(facts: StoreFacts) -> Iterator[str]:
    models = ", ".join(dict.fromkeys(printable(each.description.get("model")) for each in facts.namespaces))
    yield f"<header><h1>{escaped(printable(facts.path))}</h1>"
    made = "" if facts.created_s is None else f", made {ago(facts.created_s, facts.surveyed_s)}"
    yield f"<p>{escaped(models or 'no engine has used this store yet')}{escaped(made)}. "
    yield f"As of {_moment(facts.surveyed_s)}.</p></header>"


def _problems(facts: StoreFacts) -> Iterator[str]:
    if facts.problems:
        yield f'<section class="problems"><h2>{plural(len(facts.problems), "problem")}</h2><ul>'
        yield from (f"<li>{escaped(printable(problem))}</li>" for problem in facts.problems[:MOST_ROWS])
        if len(facts.problems) > MOST_ROWS:
            yield f"<li>and {number(len(facts.problems) - MOST_ROWS)} more</li>"
        yield "</ul></section>"


def _tiles(facts: StoreFacts) -> Iterator[str]:
    blocks = sum(home.blocks or 0 for home in facts.homes)
    used_bytes = sum(home.used_bytes or 0 for home in facts.homes)
    allocated_bytes = sum(home.allocated_bytes for home in facts.homes)
    slots = sum(home.slots for home in facts.homes)
    segments = [segment for home in facts.homes for segment in home.segments]
    alive = sum(home.alive for home in facts.homes)
    reuse = _sum(facts, "reuse")
    chains = sum(each.tree.chains for each in facts.namespaces if each.tree is not None)
    yield '<div class="tiles">'
    yield _tile(
        "blocks", "Blocks", number(blocks), f"{share(blocks / slots) if slots else 'none'} of {number(slots)} slots"
    )
    yield _tile("used", "In blocks", size(used_bytes), f"in {plural(chains, 'chain')}")
    if facts.cap_bytes:
        fraction = allocated_bytes / facts.cap_bytes
        meter = f'<div class="meter"><i style="width:{100 * min(1.0, fraction):.1f}%"></i></div>'
        yield _tile(
            "allocated", "Allocated", size(allocated_bytes), f"{share(fraction)} of {size(facts.cap_bytes)}", meter
        )
    else:
        yield _tile("allocated", "Allocated", size(allocated_bytes), "no live owner, so no cap")
    yield _tile(
        "homes", "Homes", number(len(facts.homes)), f"{alive} in use, {plural(len(facts.homes) - alive, 'orphan')}"
    )
    if reuse is None:
        yield _tile("reused", "Used again", "?", "no USES file yet")
    else:
        told = sum(reuse[:-1])
        again = told - reuse[0]
        yield _tile(
            "reused", "Used again", share(again / told) if told else "?", f"{number(again)} of {number(told)} blocks"
        )
    run = read_run_bytes(segments)
    loose = fragmentation(segments)
    yield _tile(
        "run",
        "Mean read",
        size(None if run is None else round(run)),
        "nothing is free" if loose is None else f"{share(loose)} of free bytes in short runs",
    )
    yield "</div>"


def _tile(name: str, title: str, value: str, note: str, meter: str = "") -> str:
    return (
        f'<div class="tile" data-tile="{name}"><span class="name">{escaped(title)}</span><b>{escaped(value)}</b>'
        f"{meter}<span>{escaped(note)}</span></div>"
    )


def _sum(facts: StoreFacts, name: str) -> tuple[int, ...] | None:
    known = [home.blocks_in_mass for home in facts.homes if home.blocks_in_mass is not None]
    return add_classes(getattr(mass, name) for mass in known)


# -- pictures ----------------------------------------------------------------------------------


def _histograms(facts: StoreFacts) -> Iterator[str]:
    stored, used, reuse = (_sum(facts, name) for name in ("stored", "used", "reuse"))
    yield "<section><h2>Age and reuse</h2>"
    yield '<p class="note">Blocks by time since they were stored, by time since a request last found them, and by how '
    yield "many requests have found them. The request that made a block is none of them.</p>"
    if stored is None:
        yield '<p class="soft">There are no blocks.</p></section>'
        return
    yield '<div class="pair">'
    yield f"<div><h3>Stored ago</h3>{_chart('stored', AGE_NAMES, stored)}</div>"
    names = (*AGE_NAMES, "never", "not known")
    unknown = '<p class="soft">Not known: no home has a USES file yet.</p>'
    yield f"<div><h3>Last used ago</h3>{unknown if used is None else _chart('used', names, used)}</div>"
    names = (*REUSE_NAMES, "not known")
    yield f"<div><h3>Times used</h3>{unknown if reuse is None else _chart('reuse', names, reuse)}</div></div></section>"


def _chart(name: str, labels: Sequence[str], counts: Sequence[int]) -> str:
    rows = [(label, count, label in _APART) for label, count in zip(labels, counts, strict=True)]
    return bars(name, [row for row in rows if row[0] != "not known" or row[1]])


def _occupancy(facts: StoreFacts) -> Iterator[str]:
    yield "<section><h2>Occupancy</h2>"
    yield '<p class="note">A cell is a segment: slots that hold blocks, from below; free slots in runs of less than '
    yield "2 MiB, which larger writes go around; and free slots in longer runs.</p>"
    yield '<div class="legend"><span><i style="background:var(--accent)"></i>blocks</span>'
    yield '<span><i style="background:var(--short)"></i>free, in short runs</span>'
    yield '<span><i style="background:var(--free)"></i>free</span></div>'
    parts = [
        (at, drive, home, segments)
        for at, drive in enumerate(facts.drives)
        for home in facts.homes
        if (segments := _segments_on(home, drive.store_id, at))
    ]
    most = max(8, MOST_CELLS // max(1, min(len(parts), MOST_PARTS)))
    before = -1
    for at, drive, home, segments in parts[:MOST_PARTS]:
        if at != before and len(facts.drives) > 1:
            where = "a directory that was not named" if drive.path is None else printable(drive.path)
            said = f"{plural(drive.segments, 'segment')}, {plural(drive.blocks, 'block')} in {size(drive.used_bytes)}"
            yield f'<h3>{escaped(where)} <span class="soft">{said}</span></h3>'
        before = at
        yield f'<div class="soft" data-drive="{at}">home <code>{home.id[:_ID_LETTERS]}</code>, {_owner(home)}: '
        yield f"{plural(len(segments), 'segment')}</div>{cells(home, segments, most)}"
    if len(parts) > MOST_PARTS:
        yield f'<p class="note">and {number(len(parts) - MOST_PARTS)} more homes: kvdisk inspect --all</p>'
    yield "</section>" if parts else '<p class="soft">There are no segments.</p></section>'


def _segments_on(home: HomeFacts, store_id: str | None, at: int) -> list[SegmentFacts]:
    """Return a home's segments on a drive of the store."""
    place = _drive_of(home, store_id, at)
    return [segment for segment in home.segments if segment.drive == place]


def _drive_of(home: HomeFacts, store_id: str | None, at: int) -> int:
    """Return which of a home's drives a directory is, or -1."""
    if home.record is None:
        return 0 if at == 0 else -1
    names = [drive.store_id for drive in home.record.drives]
    return names.index(store_id) if store_id in names else -1


def _owner(home: HomeFacts) -> str:
    return '<span class="alive">in use</span>' if home.alive else '<span class="orphan">orphan</span>'


def _prefixes(facts: StoreFacts) -> Iterator[str]:
    grown = [each for each in facts.namespaces if each.tree is not None and each.tree.prefixes]
    for namespace in grown[:MOST_TREES]:
        tree = namespace.tree
        assert tree is not None
        yield f"<section><h2>Shared prefixes{_of_model(namespace) if len(grown) > 1 else ''}</h2>"
        yield f'<p class="note">{_whose(namespace, len(grown) > 1)} A piece is a row of blocks that follow each other '
        yield "without a branch; what begins with it lies below. Widths are bytes, a piece with all that follows it."
        yield '<span class="hint"> Click to zoom in, on the top row or Escape to zoom out.</span></p>'
        yield f"{_legend(tree)}{icicle(tree, facts.surveyed_s)}"
        hidden = tree.prefixes_total - len(tree.prefixes)
        if hidden:
            yield f'<p class="note">{plural(hidden, "smaller piece")} with {plural(tree.hidden_blocks, "block")} in '
            yield f"{size(tree.hidden_bytes)} are left out.</p>"
        yield from _prefix_table(facts, tree)
        yield "</section>"


def _of_model(namespace: NamespaceFacts) -> str:
    return f" of {escaped(printable(namespace.description.get('model')))}"


def _whose(namespace: NamespaceFacts, is_titled: bool) -> str:
    model = "" if is_titled else f", {escaped(printable(namespace.description.get('model')))}"
    return f"Namespace <code>{namespace.fingerprint.hex()[:_ID_LETTERS]}</code>{model}."


def _legend(tree: PrefixTree) -> str:
    told = any(prefix.uses is not None for prefix in tree.prefixes)
    title = "uses a block, in the mean:" if told else "other chains that share it:"
    items = "".join(f'<span><i class="k{at}"></i>{escaped(name)}</span>' for at, (_, name) in enumerate(REUSE_STEPS))
    return f'<div class="legend"><span>{title}</span>{items}</div>'


def _prefix_table(facts: StoreFacts, tree: PrefixTree) -> Iterator[str]:
    best = sorted(
        (prefix for prefix in tree.prefixes if prefix.chains > 1 or prefix.uses),
        key=lambda prefix: (-(prefix.uses or 0) * prefix.bytes // prefix.blocks, -prefix.bytes, prefix.key),
    )[:PREFIX_ROWS]
    if not best:
        return
    yield "<h3>Most used</h3>"
    yield from _table(
        ("First block", "Starts at", "Tokens", "Bytes", "Chains", "Used", "Last use"),
        1,
        (
            (
                f"<code>{escaped(prefix.key[:16])}</code>",
                number(prefix.start_tokens),
                number(prefix.tokens),
                size(prefix.bytes),
                number(prefix.chains),
                number(prefix.first_uses) if prefix.first_uses == prefix.last_uses
                else f"{number(prefix.first_uses)} … {number(prefix.last_uses)}",
                "?" if prefix.last_use_s is None
                else ago(prefix.last_use_s, facts.surveyed_s) if prefix.last_use_s else "never",
            )
            for prefix in best
        ),
    )  # fmt: skip


# -- tables ------------------------------------------------------------------------------------


def _tables(facts: StoreFacts) -> Iterator[str]:
    if not facts.homes:
        return
    yield "<section><h2>Namespaces and homes</h2>"
    yield from _table(
        ("Namespace", "Model", "KV dtype", "TP", "Homes", "Blocks", "Bytes"),
        3,
        (
            (
                f"<code>{each.fingerprint.hex()[:_ID_LETTERS]}</code>",
                escaped(printable(each.description.get("model"))),
                escaped(_dtype(each)),
                escaped(printable(each.description.get("tensor_parallel", each.description.get("ranks")))),
                number(len(each.homes)),
                number(sum(home.blocks or 0 for home in each.homes)),
                size(each.used_bytes),
            )
            for each in facts.namespaces[:MOST_ROWS]
        ),
    )
    yield "<h3>Homes</h3>"
    yield from _table(
        ("Home", "Namespace", "Owner", "Blocks", "Slots", "Allocated", "Cap", "Fill", "Fragmentation", "Last use"),
        3,
        (_home_row(facts, home) for home in facts.homes[:MOST_ROWS]),
    )
    if len(facts.homes) > MOST_ROWS:
        yield f'<p class="note">and {number(len(facts.homes) - MOST_ROWS)} more</p>'
    segments = [(home, segment) for home in facts.homes for segment in home.segments]
    if segments:
        yield f"<details><summary>{plural(len(segments), 'segment')}</summary>"
        yield from _table(
            ("Home", "Segment", "Drive", "Slot", "Slots", "Used", "Free runs", "Fragmentation", "Blocks a read"),
            1,
            (
                (
                    f"<code>{home.id[:_ID_LETTERS]}</code>",
                    str(segment.segment),
                    str(segment.drive),
                    size(segment.slot_bytes),
                    number(segment.slots),
                    number(segment.used_slots),
                    number(segment.layout.free_runs if segment.layout else None),
                    "-" if segment.fragmentation is None else share(segment.fragmentation),
                    "-" if segment.read_run_blocks is None else f"{segment.read_run_blocks:.1f}",
                )
                for home, segment in segments[:MOST_ROWS]
            ),
        )
        if len(segments) > MOST_ROWS:
            yield f'<p class="note">and {number(len(segments) - MOST_ROWS)} more: kvdisk inspect --all</p>'
        yield "</details>"
    yield "</section>"


def _home_row(facts: StoreFacts, home: HomeFacts) -> tuple[str, ...]:
    record, loose = home.record, fragmentation(home.segments)
    return (
        f"<code>{home.id[:_ID_LETTERS]}</code>",
        f"<code>{record.fingerprint.hex()[:_ID_LETTERS]}</code>" if record else "?",
        _owner(home),
        number(home.blocks),
        number(home.slots),
        size(home.allocated_bytes),
        size(record.cap_bytes if record else None),
        share(home.fill),
        "?" if home.tallies is None else "-" if loose is None else share(loose),
        ago(record.last_use_s, facts.surveyed_s) if record else "?",
    )


def _dtype(namespace: NamespaceFacts) -> str:
    description = namespace.description
    kv_dtype = description.get("kv_dtype")
    chosen = description.get("dtype") if kv_dtype in {None, "auto"} else kv_dtype
    return printable(chosen).removeprefix("torch.")


def _table(headers: Sequence[str], texts: int, rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield a table whose first ``texts`` columns are text, the rest numbers. Cells are parts of a document already."""
    yield '<div class="scroll"><table><tr>'
    yield "".join(f"<th{'' if at < texts else ' class=n'}>{escaped(header)}</th>" for at, header in enumerate(headers))
    yield "</tr>"
    for row in rows:
        yield (
            "<tr>"
            + "".join(
                f'<td class="{"wrap" if at == 1 and texts > 1 else "" if at < texts else "n"}">{cell}</td>'
                for at, cell in enumerate(row)
            )
            + "</tr>"
        )
    yield "</table></div>"
