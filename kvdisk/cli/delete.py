# SPDX-License-Identifier: Apache-2.0
"""``kvdisk prune`` and ``kvdisk clear``: a deletion is planned, shown, asked for and carried out.

What gives space back to the drive is a segment, whose file goes, or a whole engine store; a block
that goes leaves a slot for the next owner. See docs/decisions/0024-prune.md for the order. Nothing
is deleted of an engine store that has an owner: the plan looks for one, and the deletion again,
under the engine store's lock.

``Deletion`` is what ``--json`` prints; its shape changes only with ``json_version``. Bytes are
integers, ``*_s`` whole seconds, ``null`` what is not known or does not apply.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from kvdisk import __version__
from kvdisk.blocks import BlockKey
from kvdisk.cli.indexes import HomeColumns, ReadHome, read_homes
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    StoreDirectories,
    ago,
    ask,
    folded,
    left,
    make_lines,
    make_table,
    number,
    parse_age,
    parse_size,
    plural,
    print_json,
    print_note,
    printable,
    refusal,
    refusing,
    report_console,
    right,
    short_model,
    size,
    store_paths,
)
from kvdisk.cli.prefixes import climb, fold_up
from kvdisk.device import paths
from kvdisk.device.control import HomeSummary
from kvdisk.device.drives import list_folders
from kvdisk.device.home import index_is_sound
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError, StoreLocked
from kvdisk.recovery import cut_home

OnlyOrphans = Annotated[
    bool, typer.Option("--orphans", help="Leave engine stores that an engine owns alone, instead of refusing.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def prune(
    directories: StoreDirectories,
    to: Annotated[
        str | None, typer.Option("--to", metavar="BYTES", help="Until no more than this is allocated: 500GiB.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Only blocks not used for so long: 12h, 7d, 2w.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="N", help="Only of this namespace: how its id begins, or its model."),
    ] = None,
    orphans: OnlyOrphans = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a part of a store: the oldest, what is old, or one namespace.

    Only what stopped engines left is deleted. The plan is shown, and asked
    for, before anything is deleted. Of several conditions all must hold. A
    block was used when it was stored, or when one that comes after it in its
    prompt was. Whole engine stores and segments give space back to the drive;
    other deleted blocks make room for the next engine.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  less was deleted than asked for; the report says why

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or one engine store less, because an engine owns it
    """
    try:
        to_bytes = None if to is None else parse_size("--to", to)
        older_than_s = None if older_than is None else parse_age("--older-than", older_than)
    except ConfigError as error:
        raise refusal(str(error)) from None
    if to_bytes is None and older_than_s is None and namespace is None:
        raise refusal("say what to delete: --to, --older-than or --namespace; kvdisk clear deletes everything.")
    asked = Condition(to_bytes, older_than_s, everything=False)
    _delete(directories, asked, namespace, orphans=orphans, dry_run=dry_run, yes=yes, as_json=as_json)


def clear(
    directories: StoreDirectories,
    orphans: OnlyOrphans = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete everything that is in a store; the store itself stays, empty.

    Refuses while an engine uses the store, unless --orphans says to leave its
    part alone. The plan is shown, and asked for, before anything is deleted.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  something could not be deleted; the report says why

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or one engine store less, because an engine owns it
    """
    _delete(directories, Condition(), None, orphans=orphans, dry_run=dry_run, yes=yes, as_json=as_json)


def _delete(
    directories: Sequence[Path],
    asked: Condition,
    namespace: str | None,
    *,
    orphans: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan, show, ask, delete and tell. Ends the command with its exit code."""
    named, now_s = store_paths(directories), int(time.time())
    with refusing(named):
        store = Store.open(named, create=False)
        homes = [HomeState(home.summary, home.index, _why_whole(store, home)) for home in read_homes(named)]
        before, loose_bytes = _held(store, [home.summary for home in homes])
        if namespace is not None:
            asked = replace(asked, namespace=_find_namespace(homes, namespace))
        plan = make_plan(asked, homes, now_s)
        _check_drives([home for home in homes if home.id in {one.id for one in plan.homes}])
    if plan.in_use and not orphans:
        raise refusal(_in_use(plan, asked), Exit.IN_USE)
    goes = Going(
        homes=sum(home.whole for home in plan.homes),
        segments=sum(len(home.segments) for home in plan.homes),
        blocks=sum(home.blocks or 0 for home in plan.homes),
        bytes=sum(home.bytes for home in plan.homes) + loose_bytes,
    )
    said = (plan.homes, plan.in_use, plan.kept, plan.short_bytes)
    deletion = Deletion(1, __version__, store.path, dry_run, asked, before, goes, *said)
    nothing = not plan.homes and not loose_bytes
    must_ask = not (yes or dry_run or nothing)
    if not as_json or must_ask:
        _show_plan(deletion, plan, loose_bytes, report_console(stderr=as_json), now_s)
    if not (dry_run or nothing):
        if must_ask:
            ask(f"Delete {size(goes.bytes)} from {printable(named[0])}?")
        with refusing(named):
            done = carry_out(store, plan)
            deletion = replace(deletion, homes=done, after=_held(store, list_homes(named))[0])
    print_json(deletion) if as_json else _show_result(deletion, report_console())
    results = {home.result for home in deletion.homes}
    if results & {"in use", "gone"}:
        raise typer.Exit(Exit.IN_USE)
    raise typer.Exit(Exit.WRONG if "failed" in results or plan.kept or plan.short_bytes else Exit.FINE)


def _in_use(plan: Plan, asked: Condition) -> str:
    count = len(plan.in_use)
    others = "" if count == 1 else " and others"
    owns = f"live engines own {plural(count, 'engine store')} ({plan.in_use[0]}{others})"
    if asked.to_bytes is not None:
        freed = sum(home.bytes for home in plan.homes)
        why = f"only {size(freed)} can be freed, {size(plan.short_bytes)} too little, because {owns}"
    else:
        why = f"{owns} that would have to change"
    return f"{why}; stop them, or say --orphans to delete only what stopped engines left."


# -- what there is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a store takes."""

    homes: int
    allocated_bytes: int


@dataclass(frozen=True)
class HomeState(ReadHome):
    """An engine store to choose of. ``why_whole``: why it can only stay or go as a whole; empty: it
    can be cut."""

    why_whole: str = ""

    @property
    def last_use_s(self) -> int:
        """When it was last used; what cannot be read comes before all others."""
        return self.summary.record.last_use_s if self.summary.record else -1

    @cached_property
    def segment_bytes(self) -> Counter[int]:
        """Allocated bytes by segment."""
        found: Counter[int] = Counter()
        for file in self.summary.segments:
            found[file.segment] += file.allocated_bytes
        return found

    @cached_property
    def ages(self) -> Ages:
        """When its blocks were last used, and how many blocks need them."""
        assert self.blocks is not None
        return ages_of(self.blocks)


def _held(store: Store, summaries: Sequence[HomeSummary]) -> tuple[Held, int]:
    """Return what a store takes, and how much of it in folders on further drives that no engine
    store names."""
    loose_bytes = 0
    named = {name for summary in summaries if summary.record for name in summary.record.drives}
    if all(summary.record for summary in summaries if summary.alive):  # else they may be that one's own
        for name, path in list_folders(store.drives).items():
            with paths.device_errors(f"measuring {path}"):
                loose_bytes += paths.allocated_bytes(path) if name not in named else 0
    held = Held(len(summaries), sum(summary.allocated_bytes for summary in summaries) + loose_bytes)
    return held, loose_bytes


def _why_whole(store: Store, read: ReadHome) -> str:
    """Say why an engine store cannot be cut; "" where it can, or has an owner."""
    summary, record, why = read.summary, read.summary.record, ""
    if record is None:
        why = "its HOME file cannot be read"
    elif read.problem is not None or not read.index.exists:
        why = read.problem or "its index is missing"
    elif not summary.alive:
        try:
            lost = summary.segments and not read.index.segments
            if lost or not index_is_sound(summary.index_path, record, store.boot_id):
                why = "its index is not to be trusted before kvdisk repair has made it anew"
            HomeShape.of(record.fingerprint, record.description)
        except CorruptRecord as error:
            why = str(error)
        except OSError as error:
            why = f"its index cannot be read ({error.strerror})"
    return why


def _check_drives(homes: Sequence[HomeState]) -> None:
    """Raise ConfigError where one of these has a part on a drive that was not named."""
    for home in homes:
        if None in home.summary.folders:
            raise ConfigError(
                f"engine store {home.id} has a part on a drive that was not named; name all directories of the store."
            )


def _find_namespace(homes: Sequence[HomeState], wanted: str) -> bytes:
    """Return the fingerprint that begins so, or whose model has that name or ends with it.

    Raises ConfigError where there is none, or more than one.
    """
    names = {
        home.summary.record.fingerprint: str(home.summary.record.description.get("model", ""))
        for home in sorted(homes, key=lambda home: home.last_use_s)
        if home.summary.record is not None
    }
    found = [fingerprint for fingerprint in names if wanted and fingerprint.hex().startswith(wanted.lower())]
    found = found or [fingerprint for fingerprint, name in names.items() if wanted and name == wanted]
    found = found or [one for one, name in names.items() if wanted and name.rstrip("/").rpartition("/")[2] == wanted]
    if not found:
        raise ConfigError(f"no namespace of this store begins with, or is of a model named, {wanted}.")
    if len(found) > 1:
        listed = ", ".join(f"{one.hex()[:12]} ({names[one]})" for one in sorted(found))
        raise ConfigError(f"{wanted} stands for more than one namespace: {listed}.")
    return found[0]


# -- the plan: no I/O, no clock ----------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """What to delete: what all of these that are not null say. ``everything``: none of them is
    given.

    ``to_bytes``: only until no more than that is allocated. ``older_than_s``: only blocks not used
    for so long. ``namespace``: only of this fingerprint.
    """

    to_bytes: int | None = None
    older_than_s: int | None = None
    namespace: bytes | None = None
    everything: bool = True


@dataclass(frozen=True)
class HomePlan:
    """What is deleted of one engine store. ``whole``: the directory. ``segments``: numbers.

    ``blocks``: null where it is not known. ``bytes``: what the drive gets back. ``result``: how it
    ended: "deleted", "in use" (an engine has come), "gone" (an engine has taken it over, or it was
    deleted), "failed", or null in a dry run; ``why`` says more then.
    """

    id: str
    fingerprint: bytes | None
    model: Any
    last_use_s: int | None
    whole: bool
    segments: tuple[int, ...]
    blocks: int | None
    bytes: int
    result: str | None = None
    why: str | None = None


@dataclass
class Plan:
    """What is deleted of a store. ``keys``: blocks whose segments stay, with epochs, by engine
    store.

    ``in_use``: live engine stores that would have to change. ``kept``: sentences about those that
    stay, and might have gone. ``notes``: other sentences. ``short_bytes``: what would be allocated
    beyond ``Condition.to_bytes`` even so.
    """

    homes: list[HomePlan] = field(default_factory=list)
    keys: dict[str, list[tuple[int, BlockKey]]] = field(default_factory=dict)
    in_use: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    short_bytes: int = 0


@dataclass(frozen=True)
class Going:
    """What was planned. ``homes``: those that go as a whole."""

    homes: int
    segments: int
    blocks: int
    bytes: int


@dataclass(frozen=True)
class Deletion:
    """What was asked for, planned and done. ``homes``: of which something goes; ``in_use``: ids of
    those that an engine owns; ``after``: null where nothing was deleted. See ``Plan``."""

    json_version: int
    kvdisk_version: str
    path: Path
    dry_run: bool
    asked: Condition
    before: Held
    goes: Going
    homes: list[HomePlan]
    in_use: list[str]
    kept: list[str]
    short_bytes: int
    after: Held | None = None


def make_plan(asked: Condition, homes: Sequence[HomeState], now_s: int) -> Plan:
    """Choose. Of several engine stores the one that was used longest ago goes first."""
    plan = Plan()
    before_s = None if asked.older_than_s is None else now_s - asked.older_than_s
    excess_bytes = None
    if asked.to_bytes is not None:
        excess_bytes = sum(home.summary.allocated_bytes for home in homes) - asked.to_bytes
    wanted = [
        home
        for home in sorted(homes, key=lambda home: home.last_use_s)
        if asked.namespace is None
        or (home.summary.record is not None and home.summary.record.fingerprint == asked.namespace)
    ]
    for home in wanted:
        if excess_bytes is not None and (excess_bytes <= 0 or home.summary.alive):
            continue
        chosen = _choose(home, before_s, excess_bytes, plan)
        if chosen is not None and home.summary.alive:
            plan.in_use.append(home.id)
        elif chosen is not None:
            plan.homes.append(chosen)
            excess_bytes = None if excess_bytes is None else excess_bytes - chosen.bytes
    if excess_bytes is not None and excess_bytes > 0:
        plan.short_bytes = excess_bytes
        plan.in_use = [
            home.id for home in wanted if home.summary.alive and _choose(home, before_s, excess_bytes, Plan())
        ]
    return plan


def _choose(home: HomeState, before_s: int | None, excess_bytes: int | None, plan: Plan) -> HomePlan | None:
    """Choose of one engine store; None: nothing. Blocks whose segments stay go to ``plan``."""
    record, alive = home.summary.record, home.summary.alive
    fits = excess_bytes is None or home.summary.allocated_bytes <= excess_bytes
    if before_s is None or (record is not None and record.last_use_s < before_s and not alive):
        if excess_bytes is not None and not fits and home.segment_bytes and not home.why_whole:
            return _cut_to(home, home.segment_bytes, excess_bytes)
        if home.why_whole and not fits:
            plan.notes.append(f"engine store {home.id} goes as a whole: {home.why_whole}")
        return _whole(home)
    if record is None:
        return None  # nobody knows how old it is
    if home.problem or (home.why_whole and not alive):
        plan.kept.append(f"engine store {home.id} stays as it is: {home.why_whole or home.problem}")
        return None
    is_old = home.ages.last_use_s < before_s
    if is_old.any() and is_old.all() and fits:
        return _whole(home)
    return _cut_old(home, is_old, excess_bytes, plan)


def _cut_old(home: HomeState, is_old: NDArray[np.bool_], excess_bytes: int | None, plan: Plan) -> HomePlan | None:
    """Choose old blocks, and the segments that have no others left."""
    assert home.blocks is not None
    columns = home.blocks.columns
    emptied = set(columns.segments[is_old].tolist()) - set(columns.segments[~is_old].tolist())
    if excess_bytes is not None:
        bytes_of = {segment: home.segment_bytes[segment] for segment in emptied}
        return _cut_to(home, bytes_of, excess_bytes) if emptied else None
    if not is_old.any():
        return None
    others = is_old & ~np.isin(columns.segments, list(emptied))
    rows = np.flatnonzero(others).tolist()
    plan.keys[home.id] = [(int(columns.epochs[row]), columns.keys[row]) for row in rows]
    return _cut(home, emptied, int(np.count_nonzero(is_old)))


def _whole(home: HomeState) -> HomePlan:
    cut = _cut(home, home.segment_bytes, None if home.problem else len(home.records))
    return replace(cut, whole=True, bytes=home.summary.allocated_bytes)


def _cut(home: HomeState, segments: Iterable[int], blocks: int | None) -> HomePlan:
    record = home.summary.record
    return HomePlan(
        id=home.id,
        fingerprint=record.fingerprint if record else None,
        model=record.description.get("model") if record else None,
        last_use_s=record.last_use_s if record else None,
        whole=False,
        segments=tuple(sorted(segments)),
        blocks=blocks,
        bytes=sum(home.segment_bytes[segment] for segment in segments),
    )


def _cut_to(home: HomeState, among: Mapping[int, int], excess_bytes: int) -> HomePlan | None:
    """Choose segments until enough is free: of the fullest slot size, the least worth first."""
    slot_bytes = {record.segment: record.slot_bytes for record in home.index.segments}
    worth, blocks_of = _worth(home)
    queues: dict[int, list[int]] = {}
    for segment in sorted(among, key=lambda one: (worth.get(one, (-1.0, 0)), one), reverse=True):
        if segment in slot_bytes:
            queues.setdefault(slot_bytes[segment], []).append(segment)
    totals = {size: sum(among[segment] for segment in queue) or 1 for size, queue in queues.items()}
    chosen = set(among) - slot_bytes.keys()  # of no use to anybody, and removed with any cut
    freed = sum(among[segment] for segment in chosen)
    while freed < excess_bytes and any(queues.values()):
        fullest = max(queues, key=lambda size: sum(among[segment] for segment in queues[size]) / totals[size])
        segment = queues[fullest].pop()
        chosen.add(segment)
        freed += among[segment]
    if chosen == set(home.segment_bytes):
        return _whole(home)
    return _cut(home, chosen, sum(blocks_of.get(segment, 0) for segment in chosen)) if chosen else None


def _worth(home: HomeState) -> tuple[dict[int, tuple[float, int]], dict[int, int]]:
    """Return of each segment how recently it was used and how many blocks need it, and how many it
    has."""
    assert home.blocks is not None
    numbers, at, counts = np.unique(home.blocks.columns.segments, return_inverse=True, return_counts=True)
    used_s = (np.bincount(at, home.ages.last_use_s) / counts).tolist()
    needed = np.bincount(at, home.ages.needed_by).astype(np.int64).tolist()
    listed: list[int] = numbers.tolist()
    return dict(zip(listed, zip(used_s, needed, strict=True), strict=True)), dict(
        zip(listed, counts.tolist(), strict=True)
    )


class Ages(NamedTuple):
    """When each block was last known to be used, and how many blocks need it, itself included."""

    last_use_s: NDArray[np.int64]
    needed_by: NDArray[np.int64]


def ages_of(blocks: HomeColumns) -> Ages:
    """Return the ages of an engine store's blocks.

    Who stored a block had used all that come before it in its chain: so a head is never older than
    its tails.
    """
    parents = blocks.parents.copy()
    depths, _ = climb(parents)  # a chain that bites its own tail, as in a damaged index, is cut
    last_use_s = fold_up(blocks.columns.stored_s.astype(np.int64), parents, depths, max)
    return Ages(last_use_s, fold_up(np.ones(len(parents), np.int64), parents, depths, add))


# -- the deletion ------------------------------------------------------------------------------


def carry_out(store: Store, plan: Plan) -> list[HomePlan]:
    """Delete what is planned, and the folders that no engine store names; return the plan with
    results.

    Raises StoreLocked and DeviceError before anything is deleted; what is wrong with one engine
    store is its result.
    """
    store.tidy()
    done = []
    for home in plan.homes:
        result, why = _delete_of_home(store, home, plan.keys.get(home.id, []))
        done.append(replace(home, result=result, why=why))
    return done


def _delete_of_home(store: Store, plan: HomePlan, keys: Sequence[tuple[int, BlockKey]]) -> tuple[str, str | None]:
    try:
        if plan.whole:
            gone = store.remove_home(plan.id)
            return ("deleted", None) if gone else ("failed", "not all of it could be removed")
        held = store.hold_home(plan.id)
        done = False
        try:
            cut_home(held, keys, plan.segments)
            done = True
        finally:
            held.close(clean=done, used=False)
    except StoreLocked:
        return "in use", "an engine owns it by now"
    except KvdiskError as error:
        if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
            return "gone", "an engine has taken it over, or it was deleted, meanwhile"
        return "failed", str(error)
    return "deleted", None


# -- for people --------------------------------------------------------------------------------


def _show_plan(deletion: Deletion, plan: Plan, loose_bytes: int, console: Console, now_s: int) -> None:
    before, goes = deletion.before, deletion.goes
    lines = make_lines()
    lines.add_row("Store", Text(printable(deletion.path), "bold cyan"))
    lines.add_row("Holds", f"{size(before.allocated_bytes)} in {plural(before.homes, 'engine store')}")
    lines.add_row("Delete", Text.assemble((size(goes.bytes), "bold"), f", {_count(plan.homes)}"))
    if loose_bytes:
        lines.add_row("", f"{size(loose_bytes)} of it in folders of no engine store, which a crash left behind")
    lines.add_row("Keep", size(before.allocated_bytes - goes.bytes))
    console.print(lines)
    if plan.homes:
        columns = (left("Engine store", "cyan"), left("Namespace", "magenta"), folded("Model"))
        numbers = (right("Last use"), folded("Delete"), right("Blocks"), right("Bytes"))
        table = make_table("To delete", console.width, *columns, *numbers)
        for home in plan.homes:
            table.add_row(
                home.id[:ID_LETTERS],
                home.fingerprint.hex()[:ID_LETTERS] if home.fingerprint else Text("?", "red"),
                short_model(home.model).rstrip("/").rpartition("/")[2],
                ago(home.last_use_s, now_s) if home.last_use_s is not None else "?",
                _parts_of(home, len(plan.keys.get(home.id, []))),
                number(home.blocks),
                size(home.bytes),
            )
        console.print(table)
    for note in [*plan.notes, *plan.kept]:
        print_note(note, console)
    if any(plan.keys.values()):
        freed = "Blocks in segments that stay leave their slots to the next engine"
        console.print(Text(f"{freed}; the drive gets nothing back for them.", "dim"))


def _parts_of(home: HomePlan, other_blocks: int) -> str:
    """Say what goes of an engine store."""
    if home.whole:
        return "all"
    said = [plural(len(home.segments), "segment")] if home.segments else []
    return ", ".join([*said, plural(other_blocks, "other block" if said else "block")] if other_blocks else said)


def _count(homes: Sequence[HomePlan]) -> str:
    whole, unknown = sum(home.whole for home in homes), sum(home.blocks is None for home in homes)
    more = f" and those of {plural(unknown, 'engine store')} that cannot be read" if unknown else ""
    said = f"{plural(sum(home.blocks or 0 for home in homes), 'block')}{more}"
    return f"{said}, {plural(whole, 'whole engine store')}" if whole else said


def _show_result(deletion: Deletion, console: Console) -> None:
    before, after = deletion.before, deletion.after
    if after is None:
        console.print("This was a dry run: nothing was deleted." if deletion.dry_run else "There is nothing to delete.")
    else:
        freed = size(before.allocated_bytes - after.allocated_bytes)
        count = _count([home for home in deletion.homes if home.result == "deleted"])
        stays = f"{size(after.allocated_bytes)} in {plural(after.homes, 'engine store')} stay"
        said = f"{freed}, {count}; {stays if after.homes else 'the store is empty'}."
        console.print(Text.assemble(("\nDeleted ", "green"), said))
        for home in deletion.homes:
            if home.result != "deleted":
                why = f"engine store {home.id} was left alone: {printable(home.why)}"
                console.print(Text.assemble(("  ✗ ", "red"), why), soft_wrap=True)
    owned = f"live engines own {plural(len(deletion.in_use), 'engine store')}"
    if deletion.short_bytes:
        short = f"{size(deletion.short_bytes)} more than asked for stay"
        why = f"{owned}, which may not change" if deletion.in_use else "nothing else may be deleted"
        console.print(Text(f"{short}: {why}.", "yellow"), soft_wrap=True)
    elif deletion.in_use:
        console.print(Text(f"Left alone: {owned}.", "yellow"), soft_wrap=True)
