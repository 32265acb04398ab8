# SPDX-License-Identifier: Apache-2.0
"""``kvdisk prune`` and ``kvdisk clear``: a deletion is planned, shown, asked for and carried out.

What gives space back to the drive is a segment, whose file goes, or a whole home; a block that goes
leaves a slot for the next owner. See docs/decisions/0024-prune.md for the order. Nothing is deleted
of a home that has an owner: that is looked at for the plan, and again, under the home's lock, when
it is carried out.

What ``--json`` prints; its shape changes only with ``json_version``. Bytes are integers, ``*_s``
whole seconds, ``null`` what is not known or does not apply::

    json_version       1
    kvdisk_version     of the command
    path               of the store
    dry_run            true: nothing was deleted
    asked              to_bytes, older_than_s, namespace (hex), everything (true for clear)
    before             homes, allocated_bytes
    goes               homes (whole), segments, blocks, bytes: what was planned
    homes[]            of which something goes: id, fingerprint (hex), model, last_use_s, whole, segments (numbers),
                       blocks, bytes, result ("deleted", "in use", "gone", "failed"; null in a dry run), why
    in_use             ids of homes that an engine owns, and that were left alone
    kept               sentences about homes that stay though they might have gone
    short_bytes        what is allocated beyond to_bytes even so
    after              homes, allocated_bytes; null in a dry run
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdisk import __version__
from kvdisk.blocks import BlockKey
from kvdisk.cli.indexes import Records
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    StoreDirectories,
    add_column,
    ago,
    ask,
    make_lines,
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
    size,
    store_paths,
)
from kvdisk.device import paths
from kvdisk.device.control import HomeRecord, HomeSummary
from kvdisk.device.drives import list_folders
from kvdisk.device.home import index_is_sound
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError, StoreLocked
from kvdisk.index.base import BlockRecord
from kvdisk.index.reader_process import IndexContent, read_indexes
from kvdisk.recovery import cut_home

OnlyOrphans = Annotated[
    bool, typer.Option("--orphans", help="Leave homes that an engine owns alone, instead of refusing.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class Asked(NamedTuple):
    """What the user asks for. ``orphans``: leave homes that an engine owns alone."""

    to_bytes: int | None = None
    older_than_s: int | None = None
    namespace: str | None = None
    orphans: bool = False
    dry_run: bool = False
    yes: bool = False
    as_json: bool = False


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

    Only homes that no engine owns are changed. What is to go is shown, and
    asked for, before anything is deleted. Of several conditions all must hold.
    A block was used when it was stored, or when one that comes after it in its
    prompt was. Space comes back by whole homes and segments; blocks that go
    beside make room for the next engine.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  less went than was asked for; the report says why

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or a home less, because an engine owns it
    """
    try:
        to_bytes = None if to is None else parse_size("--to", to)
        older_than_s = None if older_than is None else parse_age("--older-than", older_than)
    except ConfigError as error:
        raise refusal(str(error)) from None
    if to_bytes is None and older_than_s is None and namespace is None:
        raise refusal("say what shall go: --to, --older-than or --namespace; kvdisk clear deletes everything.")
    _delete(store_paths(directories), Asked(to_bytes, older_than_s, namespace, orphans, dry_run, yes, as_json))


def clear(
    directories: StoreDirectories,
    orphans: OnlyOrphans = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete everything that is in a store; the store itself stays, empty.

    Refuses while an engine owns a home, unless --orphans says to leave such
    homes alone. What is to go is shown, and asked for, before anything is
    deleted.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  something could not be deleted; the report says why

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or a home less, because an engine owns it
    """
    _delete(store_paths(directories), Asked(orphans=orphans, dry_run=dry_run, yes=yes, as_json=as_json))


def _delete(named: Sequence[Path], asked: Asked) -> None:
    """Plan, show, ask, delete and tell. Ends the command with its exit code."""
    now_s = int(time.time())
    with refusing(named):
        state = read_store(named, with_blocks=True)
        wish = Wish(
            asked.to_bytes,
            None if asked.older_than_s is None else now_s - asked.older_than_s,
            None if asked.namespace is None else _find_namespace(state.homes, asked.namespace),
        )
        plan = make_plan(wish, state.homes)
        _check_drives(state.store, [one.home for one in plan.homes])
    if plan.in_use and not asked.orphans:
        raise refusal(_in_use(plan, asked), Exit.IN_USE)
    after = None
    nothing = not plan.homes and not state.loose_bytes
    must_ask = not (asked.yes or asked.dry_run or nothing)
    if not asked.as_json or must_ask:
        _show_plan(plan, state, report_console(stderr=asked.as_json), now_s)
    if not (asked.dry_run or nothing):
        if must_ask:
            ask(f"Delete {size(plan.byte_count + state.loose_bytes)} from {printable(named[0])}?")
        with refusing(named):
            plan.homes = carry_out(state.store, plan.homes)
            after = read_store(named, with_blocks=False)
    if asked.as_json:
        _print_json(plan, state, after, asked)
    else:
        _show_result(plan, state, after, asked, report_console())
    results = {home.result for home in plan.homes}
    if results & {"in use", "gone"}:
        raise typer.Exit(Exit.IN_USE)
    raise typer.Exit(Exit.WRONG if "failed" in results or plan.kept or plan.short_bytes else Exit.FINE)


def _in_use(plan: Plan, asked: Asked) -> str:
    count = len(plan.in_use)
    owns = f"{'an engine owns' if count == 1 else 'engines own'} {plural(count, 'home')} ({plan.in_use[0].id}"
    owns += ")" if count == 1 else " and others)"
    if asked.to_bytes is not None:
        freed = f"only {size(plan.byte_count)} can be freed, {size(plan.short_bytes)} too little, because {owns}"
    else:
        freed = f"{owns} that would have to change"
    return f"{freed}; end what uses the store, or say --orphans to delete only of homes that nobody owns."


# -- what there is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class HomeState:
    """A home as far as it matters here. ``record``: None where HOME cannot be read.

    ``blocks``: None where the index cannot be read. ``why_whole``: why it can only stay or go as a
    whole; empty: it can be cut. ``segment_bytes``: allocated, by segment; ``slot_bytes``: of those
    that the index knows.
    """

    id: str
    record: HomeRecord | None
    alive: bool
    allocated_bytes: int
    blocks: Sequence[BlockRecord] | None
    segment_bytes: Mapping[int, int]
    slot_bytes: Mapping[int, int]
    why_whole: str = ""

    @property
    def last_use_s(self) -> int:
        """When it was last used; what cannot be read comes before all others."""
        return self.record.last_use_s if self.record else -1


@dataclass
class StoreState:
    """A store as it is. ``loose_bytes``: of folders on further drives that no home names."""

    store: Store
    homes: list[HomeState] = field(default_factory=list)
    loose_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """What the file systems hold for all of it."""
        return sum(home.allocated_bytes for home in self.homes) + self.loose_bytes


def read_store(directories: Sequence[Path], *, with_blocks: bool) -> StoreState:
    """Look at all homes; ``with_blocks``: and into their indexes. Raises as ``list_homes``."""
    state = StoreState(Store.open(directories, create=False))
    summaries = list_homes(directories)
    indexes = [IndexContent(problem="not looked at")] * len(summaries)
    if with_blocks:
        indexes = read_indexes([summary.index_path for summary in summaries])
    for summary, index in zip(summaries, indexes, strict=True):
        with paths.device_errors(f"reading home {summary.id}"):
            state.homes.append(_home_state(state.store, summary, index))
    named = {name for summary in summaries if summary.record for name in summary.record.drives}
    if all(summary.record for summary in summaries if summary.alive):  # else they may be that one's own
        for name, path in list_folders(state.store.drives).items():
            with paths.device_errors(f"measuring {path}"):
                state.loose_bytes += paths.allocated_bytes(path) if name not in named else 0
    return state


def _home_state(store: Store, summary: HomeSummary, index: IndexContent) -> HomeState:
    segment_bytes: dict[int, int] = {}
    for file in summary.segments:
        segment_bytes[file.segment] = segment_bytes.get(file.segment, 0) + file.allocated_bytes
    readable = index.problem is None and (index.exists or not summary.segments)
    return HomeState(
        id=summary.id,
        record=summary.record,
        alive=summary.alive,
        allocated_bytes=summary.allocated_bytes,
        blocks=Records(index.blocks) if readable else None,
        segment_bytes=segment_bytes,
        slot_bytes={segment.segment: segment.slot_bytes for segment in index.segments},
        why_whole=_why_whole(store, summary, index),
    )


def _why_whole(store: Store, summary: HomeSummary, index: IndexContent) -> str:
    """Say why a home without an owner cannot be cut; "" where it can."""
    why = ""
    if summary.record is None:
        why = "its HOME file cannot be read"
    elif index.problem is not None or not index.exists:
        why = f"its index cannot be read ({index.problem or 'it is missing'})"
    elif not summary.alive:
        try:
            lost = summary.segments and not index.segments
            if lost or not index_is_sound(summary.index_path, summary.record, store.boot_id):
                why = "its index is not to be trusted before kvdisk repair has made it anew"
            HomeShape.of(summary.record.fingerprint, summary.record.description)
        except CorruptRecord as error:
            why = str(error)
        except OSError as error:
            why = f"its index cannot be read ({error.strerror})"
    return why


def _check_drives(store: Store, homes: Sequence[HomeState]) -> None:
    """Raise ConfigError where one of these homes has a part on a drive that was not named."""
    for home in homes:
        if home.record is not None and None in store.folders(home.id, home.record):
            raise ConfigError(
                f"home {home.id} has a part on a drive that was not named; name all directories of the store."
            )


def _find_namespace(homes: Sequence[HomeState], wanted: str) -> bytes:
    """Return the fingerprint that begins so, or whose model has that name or ends with it.

    Raises ConfigError where there is none, or more than one.
    """
    described: dict[bytes, dict[str, Any]] = {}
    for home in sorted(homes, key=lambda home: home.last_use_s):
        if home.record is not None:
            described[home.record.fingerprint] = home.record.description
    names = {fingerprint: str(description.get("model", "")) for fingerprint, description in described.items()}
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


class Wish(NamedTuple):
    """What shall go: what all of these that are not None say. None of them: everything.

    ``to_bytes``: only until no more than that is allocated. ``before_s``: only blocks last used
    before this moment, in seconds since the Unix epoch. ``fingerprint``: only of this namespace.
    """

    to_bytes: int | None = None
    before_s: int | None = None
    fingerprint: bytes | None = None


@dataclass(frozen=True)
class HomePlan:
    """What goes of one home. ``whole``: the directory. ``keys``: of blocks whose segments stay.

    ``block_count``: of all blocks that go, None where that is not known. ``byte_count``: what the
    drive gets back. ``result``: how it ended: "deleted", "in use" (an engine has come), "gone" (an
    engine has taken it over, or it was deleted) or "failed"; ``why`` says more then.
    """

    home: HomeState
    whole: bool
    segments: frozenset[int]
    keys: tuple[tuple[int, BlockKey], ...]
    block_count: int | None
    byte_count: int
    result: str | None = None
    why: str | None = None


@dataclass
class Plan:
    """What goes of a store, home by home. ``in_use``: live homes that would have to change.

    ``kept``: sentences about homes that stay, and might have gone. ``short_bytes``: what would be
    allocated beyond ``Wish.to_bytes`` even so.
    """

    wish: Wish = field(default_factory=Wish)
    homes: list[HomePlan] = field(default_factory=list)
    in_use: list[HomeState] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    short_bytes: int = 0

    @property
    def byte_count(self) -> int:
        """What the drives get back."""
        return sum(home.byte_count for home in self.homes)

    @property
    def block_count(self) -> int:
        """Blocks that go, as far as that is known."""
        return sum(home.block_count or 0 for home in self.homes)


def make_plan(wish: Wish, homes: Sequence[HomeState]) -> Plan:
    """Choose."""
    plan = Plan(wish)
    wanted = [
        home
        for home in sorted(homes, key=lambda home: home.last_use_s)
        if wish.fingerprint is None or (home.record is not None and home.record.fingerprint == wish.fingerprint)
    ]
    excess_bytes = None
    if wish.to_bytes is not None:
        excess_bytes = sum(home.allocated_bytes for home in homes) - wish.to_bytes
    for home in wanted:
        if excess_bytes is not None and excess_bytes <= 0:
            break
        if home.alive and excess_bytes is not None:
            continue
        chosen = _choose(home, wish.before_s, excess_bytes, plan.kept)
        if chosen is None:
            continue
        if home.alive:
            plan.in_use.append(home)
        else:
            plan.homes.append(chosen)
            excess_bytes = None if excess_bytes is None else excess_bytes - chosen.byte_count
    if excess_bytes is not None and excess_bytes > 0:
        plan.short_bytes = excess_bytes
        plan.in_use += [home for home in wanted if home.alive and _choose(home, wish.before_s, excess_bytes, [])]
    return plan


def _choose(home: HomeState, before_s: int | None, excess_bytes: int | None, kept: list[str]) -> HomePlan | None:
    """Choose of one home; None: nothing."""
    if before_s is None:
        if excess_bytes is None or home.allocated_bytes <= excess_bytes or home.why_whole or not home.segment_bytes:
            return _whole(home)
        return _cut_to(home, home.segment_bytes, excess_bytes, _ages(home.blocks or ()))
    if home.record is None:
        return None  # nobody knows how old it is
    if home.record.last_use_s < before_s and not home.alive:
        return _whole(home) if excess_bytes is None or home.why_whole else _choose(home, None, excess_bytes, kept)
    if home.blocks is None or (home.why_whole and not home.alive):
        kept.append(f"home {home.id} stays as it is: {home.why_whole or 'its index cannot be read'}")
        return None
    return _cut_old(home, home.blocks, before_s, excess_bytes)


def _whole(home: HomeState) -> HomePlan:
    count = None if home.blocks is None else len(home.blocks)
    return HomePlan(home, True, frozenset(home.segment_bytes), (), count, home.allocated_bytes)


def _cut_old(
    home: HomeState, blocks: Sequence[BlockRecord], before_s: int, excess_bytes: int | None
) -> HomePlan | None:
    """Choose the blocks not used since, and the segments that have no others left."""
    ages = _ages(blocks)
    old = [age for age in ages if age.last_use_s < before_s]
    if not old:
        return None
    if len(old) == len(blocks) and (excess_bytes is None or home.allocated_bytes <= excess_bytes):
        return _whole(home)
    young = {age.block.slot.segment for age in ages if age.last_use_s >= before_s}
    emptied = {age.block.slot.segment for age in old} - young
    if excess_bytes is not None:
        bytes_of = {segment: home.segment_bytes.get(segment, 0) for segment in emptied}
        return _cut_to(home, bytes_of, excess_bytes, ages) if emptied else None
    keys = tuple((age.block.epoch, age.block.key) for age in old if age.block.slot.segment not in emptied)
    freed = sum(home.segment_bytes.get(segment, 0) for segment in emptied)
    return HomePlan(home, False, frozenset(emptied), keys, len(old), freed)


def _cut_to(home: HomeState, among: Mapping[int, int], excess_bytes: int, ages: Sequence[Age]) -> HomePlan | None:
    """Choose segments until enough is free: of the fullest slot size, the least worth first."""
    of_segment: dict[int, list[Age]] = {segment: [] for segment in among}
    for age in ages:
        if age.block.slot.segment in of_segment:
            of_segment[age.block.slot.segment].append(age)
    unknown = [segment for segment in among if segment not in home.slot_bytes]
    queues: dict[int, list[int]] = {}
    for segment in sorted(of_segment, key=lambda one: (_worth(of_segment[one]), one), reverse=True):
        if segment in home.slot_bytes:
            queues.setdefault(home.slot_bytes[segment], []).append(segment)
    totals = {size: sum(among[segment] for segment in queue) or 1 for size, queue in queues.items()}
    chosen = set(unknown)  # of no use to anybody, and removed with any cut
    freed = sum(among[segment] for segment in unknown)
    while freed < excess_bytes and any(queues.values()):
        fullest = max(queues, key=lambda size: sum(among[segment] for segment in queues[size]) / totals[size])
        segment = queues[fullest].pop()
        chosen.add(segment)
        freed += among[segment]
    if not chosen:
        return None
    if chosen == set(home.segment_bytes):
        return _whole(home)
    blocks = sum(len(of_segment[segment]) for segment in chosen)
    return HomePlan(home, False, frozenset(chosen), (), blocks, freed)


def _worth(ages: Sequence[Age]) -> tuple[float, int]:
    """Return what a segment is worth: how recently it was used, then how many blocks need it."""
    if not ages:
        return (-1.0, 0)
    return sum(age.last_use_s for age in ages) / len(ages), sum(age.needed_by for age in ages)


class Age(NamedTuple):
    """A block, when it was last known to be used, and how many blocks need it, itself included."""

    block: BlockRecord
    last_use_s: int
    needed_by: int


def _ages(blocks: Iterable[BlockRecord]) -> list[Age]:
    """Return the ages of a home's blocks.

    Who stored a block had used all that come before it in its chain: so a head is never older than
    its tails.
    """
    listed = list(blocks)
    place = {(block.epoch, block.key): at for at, block in enumerate(listed)}
    parents = [-1 if block.parent is None else place.get((block.epoch, block.parent), -1) for block in listed]
    last_use_s = [block.stored_s for block in listed]
    needed_by = [1] * len(listed)
    children = [0] * len(listed)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    ready = [at for at, count in enumerate(children) if not count]
    while ready:  # tails first; a chain that bites its own tail, as in a damaged index, is left as it is
        at = ready.pop()
        parent = parents[at]
        if parent >= 0:
            last_use_s[parent] = max(last_use_s[parent], last_use_s[at])
            needed_by[parent] += needed_by[at]
            children[parent] -= 1
            if not children[parent]:
                ready.append(parent)
    return [Age(*fields) for fields in zip(listed, last_use_s, needed_by, strict=True)]


# -- the deletion ------------------------------------------------------------------------------


def carry_out(store: Store, homes: Sequence[HomePlan]) -> list[HomePlan]:
    """Delete the folders that no home names, and what is planned; return plans with results.

    Raises StoreLocked and DeviceError before anything is deleted; what is wrong with one home is
    its result.
    """
    store.tidy()
    done = []
    for plan in homes:
        result, why = _delete_of_home(store, plan)
        done.append(replace(plan, result=result, why=why))
    return done


def _delete_of_home(store: Store, plan: HomePlan) -> tuple[str, str | None]:
    try:
        if plan.whole:
            gone = store.remove_home(plan.home.id)
            return ("deleted", None) if gone else ("failed", "not all of it could be removed")
        held = store.hold_home(plan.home.id)
        done = False
        try:
            cut_home(held, plan.keys, plan.segments)
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


def _parts_of_plan(plan: HomePlan) -> str:
    """Say what goes of a home."""
    if plan.whole:
        return "all"
    said = []
    if plan.segments:
        said.append(f"{len(plan.segments)} of {plural(len(plan.home.segment_bytes), 'segment')}")
    if plan.keys:
        said.append(plural(len(plan.keys), "other block" if said else "block"))
    return ", ".join(said)


def _show_plan(plan: Plan, state: StoreState, console: Console, now_s: int) -> None:
    lines = make_lines()
    lines.add_row("Store", Text(printable(state.store.path), "bold cyan"))
    lines.add_row("Holds", f"{size(state.allocated_bytes)} in {plural(len(state.homes), 'home')}")
    going = plan.byte_count + state.loose_bytes
    lines.add_row("Goes", Text.assemble((size(going), "bold"), f", {_count(plan)}"))
    if state.loose_bytes:
        lines.add_row("", f"{size(state.loose_bytes)} of it in folders that no home names, left by a crash")
    lines.add_row("Stays", size(state.allocated_bytes - going))
    console.print(lines)
    if plan.homes:
        console.print(_table(plan.homes, now_s))
    for home in plan.homes:
        if home.whole and home.home.why_whole and plan.wish.to_bytes is not None:
            print_note(f"home {home.home.id} goes as a whole: {home.home.why_whole}", console)
    if any(home.keys for home in plan.homes):
        freed = "Blocks in segments that stay leave their slots to the next engine"
        console.print(Text(f"{freed}; the drive gets nothing back for them.", "dim"))
    for kept in plan.kept:
        print_note(kept, console)


def _count(plan: Plan) -> str:
    whole = sum(home.whole for home in plan.homes)
    unknown = sum(home.block_count is None for home in plan.homes)
    more = f" and those of {plural(unknown, 'home')} that cannot be read" if unknown else ""
    said = f"{plural(plan.block_count, 'block')}{more}"
    return f"{said}, {plural(whole, 'home')} as a whole" if whole else said


def _table(homes: Sequence[HomePlan], now_s: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    add_column(table, "\nHome", style="cyan")
    add_column(table, "Name-\nspace", style="magenta")
    table.add_column("\nModel", overflow="fold")
    add_column(table, "\nLast use", "right")
    table.add_column("\nGoes", overflow="fold")
    add_column(table, "\nBlocks", "right")
    add_column(table, "\nBytes", "right")
    for plan in homes:
        record = plan.home.record
        table.add_row(
            plan.home.id[:ID_LETTERS],
            record.fingerprint.hex()[:ID_LETTERS] if record else Text("?", "red"),
            printable(record.description.get("model") if record else None).rstrip("/").rpartition("/")[2],
            ago(record.last_use_s, now_s) if record else "?",
            _parts_of_plan(plan),
            number(plan.block_count),
            size(plan.byte_count),
        )
    return table


def _show_result(plan: Plan, state: StoreState, after: StoreState | None, asked: Asked, console: Console) -> None:
    if after is None:
        console.print("This was a dry run: nothing was deleted." if asked.dry_run else "There is nothing to delete.")
    else:
        went = state.allocated_bytes - after.allocated_bytes
        count = _count(Plan(homes=[home for home in plan.homes if home.result == "deleted"]))
        left = f"{size(after.allocated_bytes)} in {plural(len(after.homes), 'home')} stay"
        stays = left if after.homes else "the store is empty"
        console.print(Text.assemble(("\nDeleted ", "green"), f"{size(went)}, {count}; {stays}."))
        for home in plan.homes:
            if home.result != "deleted":
                said = f"home {home.home.id} was left alone: {printable(home.why)}"
                console.print(Text.assemble(("  ✗ ", "red"), said), soft_wrap=True)
    if plan.short_bytes:
        short = f"{size(plan.short_bytes)} more than asked for stay, since {_owned(plan)}."
        console.print(Text(short, "yellow"), soft_wrap=True)
    elif plan.in_use:
        console.print(Text(f"Left alone: {_owned(plan)}.", "yellow"), soft_wrap=True)


def _owned(plan: Plan) -> str:
    if not plan.in_use:
        return "nothing else may go"
    return f"{plural(len(plan.in_use), 'home')} that engines own" + ("" if not plan.short_bytes else " may not change")


# -- for programs ------------------------------------------------------------------------------


def _print_json(plan: Plan, before: StoreState, after: StoreState | None, asked: Asked) -> None:
    print_json(
        {
            "json_version": 1,
            "kvdisk_version": __version__,
            "path": before.store.path,
            "dry_run": asked.dry_run,
            "asked": {
                "to_bytes": asked.to_bytes,
                "older_than_s": asked.older_than_s,
                "namespace": plan.wish.fingerprint,
                "everything": plan.wish == Wish(),
            },
            "before": {"homes": len(before.homes), "allocated_bytes": before.allocated_bytes},
            "goes": {
                "homes": sum(home.whole for home in plan.homes),
                "segments": sum(len(home.segments) for home in plan.homes),
                "blocks": plan.block_count,
                "bytes": plan.byte_count + before.loose_bytes,
            },
            "homes": [_home_json(home) for home in plan.homes],
            "in_use": [home.id for home in plan.in_use],
            "kept": plan.kept,
            "short_bytes": plan.short_bytes,
            "after": after and {"homes": len(after.homes), "allocated_bytes": after.allocated_bytes},
        }
    )


def _home_json(plan: HomePlan) -> dict[str, object]:
    record = plan.home.record
    return {
        "id": plan.home.id,
        "fingerprint": record.fingerprint if record else None,
        "model": record.description.get("model") if record else None,
        "last_use_s": record.last_use_s if record else None,
        "whole": plan.whole,
        "segments": sorted(plan.segments),
        "blocks": plan.block_count,
        "bytes": plan.byte_count,
        "result": plan.result,
        "why": plan.why,
    }
