# SPDX-License-Identifier: Apache-2.0
"""``kvdisk prune`` and ``kvdisk clear``: a deletion is planned, shown, asked for and carried out.

Only deleting a segment or a whole engine store gives space back to the drive; a deleted block
leaves a slot for the next owner. docs/decisions/0024-prune.md has the order. Nothing is deleted in
an engine store that has an owner: the plan looks for one, and so does the deletion, under its lock.
With ``--live`` the owner is asked to do it itself (``device.orders``). Deleted blocks of one tenant
(``--salt``) are also overwritten: docs/decisions/0055-tenants.md.

``--json`` prints an object with ``json_version`` (2), ``kvdisk_version``, ``path``, ``dry_run``,
``asked`` (the arguments of ``make_plan``; ``everything``: none of them was given), ``before`` and
``after`` (what the store takes; ``after`` is null where nothing was deleted), and of the ``Plan``
``goes``, ``engine_stores``, ``in_use``, ``kept`` and ``short_bytes``. Bytes are integers, ``*_s``
whole seconds, ``null`` what is not known or does not apply.
"""

from __future__ import annotations

import errno
import math
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from kvdisk.blocks import AHEAD_S, BlockKey, Slot
from kvdisk.cli.indexes import ReadHome, find_namespace, read_homes
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    StoreDirectories,
    Yes,
    ago,
    ask,
    can_ask,
    engine_store,
    folded,
    left,
    make_lines,
    make_table,
    number,
    opening,
    parse_age,
    plural,
    print_json,
    print_list,
    print_note,
    printable,
    refusal,
    report_console,
    short_model,
    size,
    standard_output,
)
from kvdisk.cli.prefixes import climb, fold_up
from kvdisk.cli.repair import held_home
from kvdisk.cli.salts import digest_of
from kvdisk.cli.verify import why_unusable
from kvdisk.config import parse_bytes
from kvdisk.device.control import HomeSummary
from kvdisk.device.listing import list_homes
from kvdisk.device.orders import (
    MOST_RANGES,
    Answer,
    Request,
    is_taken,
    read_answer,
    read_request,
    withdraw,
    write_request,
)
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError, StoreLocked
from kvdisk.recovery import cut_home
from kvdisk.salts import DIGEST_BYTES

JSON_VERSION = 2
_POLL_S = 0.05
_ANSWER_S = 5.0
"""How long an engine whose time is over has to answer: it begins nothing more by then."""
OnlyStopped = Annotated[
    bool, typer.Option("--stopped", help="Skip the engine stores of running engines, instead of refusing.")
]
Live = Annotated[bool, typer.Option("--live", help="Ask running engines to delete their part, instead of refusing.")]
Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Of --live: how long to wait for each engine.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")]


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
    salt: Annotated[
        str | None,
        typer.Option("--salt", metavar="TEXT", help="Only blocks of this cache_salt; -: read from standard input."),
    ] = None,
    stopped: OnlyStopped = False,
    live: Live = False,
    wait: Wait = 60.0,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a part of a store: the oldest, what is old, one namespace, or one tenant.

    Only engine stores of stopped engines are changed, with --live also those of
    engines that run: these do it themselves. The plan is shown, and asked
    for, before anything is deleted. Of several conditions all must hold. A
    block was used when it was stored, or when one that comes after it in its
    prompt was. Whole engine stores and segments give space back to the drive;
    other deleted blocks make room for the next engine. With --salt these are
    overwritten with zeros, and blocks whose tenant nobody knows stay.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  less was deleted than asked for, and the report says why; or it found no room

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or one engine store less, because an engine owns it
    """
    if to is None and older_than is None and namespace is None and salt is None:
        raise refusal(
            "give what to delete: --to, --older-than, --namespace or --salt; kvdisk clear deletes everything."
        )
    if salt is not None and to is not None:
        raise refusal("--salt deletes blocks, and --to whole segments: give one of the two.")
    if salt is not None and live:
        raise refusal("--salt needs stopped engines: one that runs has the tenant's blocks in its memory, too.")
    wait_s = wait if live else None
    _delete(
        directories,
        to,
        older_than,
        namespace,
        salt,
        stopped=stopped,
        wait_s=wait_s,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
    )


def clear(
    directories: StoreDirectories,
    stopped: OnlyStopped = False,
    live: Live = False,
    wait: Wait = 60.0,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete everything that is in a store; the store itself stays, empty.

    Refuses while an engine uses the store, unless --stopped says to leave its
    part alone, or --live to have it deleted by the engine itself, which then
    serves nothing that was stored before, also not from kvdisk's memory.
    Behind vLLM's OffloadingConnector, vLLM's memory stays as it is. The plan is
    shown, and asked for, before anything is deleted.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  done, or there was nothing to delete

    [cyan]1[/cyan]  something could not be deleted, and the report says why; or it found no room

    [cyan]2[/cyan]  nothing was deleted: not a store, no permission, another
    format, wrong usage, or the answer was no

    [cyan]3[/cyan]  nothing was deleted, or one engine store less, because an engine owns it
    """
    wait_s = wait if live else None
    _delete(
        directories, None, None, None, None, stopped=stopped, wait_s=wait_s, dry_run=dry_run, yes=yes, as_json=as_json
    )


def _delete(
    directories: Sequence[Path],
    to: str | None,
    older_than: str | None,
    namespace: str | None,
    salt: str | None,
    *,
    stopped: bool,
    wait_s: float | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan, show, ask, delete and report. Ends the command with its exit code. ``wait_s``: None
    where running engines are not asked."""
    if stopped and wait_s is not None:
        raise refusal("--stopped skips running engines, and --live asks them: give one of the two.")
    now_s = int(time.time())
    with opening(directories) as named:
        store = Store.open(named, create=False)
        homes = [
            HomeState(home.summary, home.index, why_unusable(home, store.boot_id) or "")
            for home in read_homes(named, guests=True)
        ]
        asked: dict[str, Any] = {
            "to_bytes": None if to is None else parse_bytes("--to", to),
            "older_than_s": None if older_than is None else parse_age("--older-than", older_than),
            "namespace": None if namespace is None else bytes.fromhex(find_namespace(homes, namespace).id),
            "salt_digest": None if salt is None else digest_of(store.path, salt).to_bytes(DIGEST_BYTES, "big"),
        }
        plan = make_plan(homes, now_s, ask_live=wait_s is not None, **asked)
        for home in homes:
            if None in home.summary.folders and any(one.id == home.id for one in plan.engine_stores):
                not_named = f"{engine_store(home.id)} has a part on a drive that was not named"
                raise ConfigError(f"{not_named}; name all directories of the store.")
    if plan.in_use and not stopped:
        others = "" if len(plan.in_use) == 1 else " and others"
        owned = f"{_owned(plan)} ({plan.in_use[0][:ID_LETTERS]}{others}) that would have to change"
        way_out = "stop them, or give --stopped to delete only the engine stores of stopped engines"
        raise refusal(f"{owned}; {way_out}.", Exit.IN_USE)
    before, after = _held([home.summary for home in homes]), None
    must_ask = bool(plan.engine_stores) and not (yes or dry_run)
    if not as_json or must_ask:
        _show_plan(store.path, before, plan, report_console(stderr=as_json), now_s)
    if must_ask and not can_ask():
        raise refusal("nothing was deleted, since there is no terminal to ask on; give --yes to delete without asking.")
    if must_ask and not ask(f"Delete {size(plan.goes['bytes'])} from {printable(named[0])}?"):
        raise refusal("nothing was deleted.")
    if not dry_run:
        with opening(named):
            carry_out(store, plan, wait_s or 0.0)
            after = _held(list_homes(named)) if plan.engine_stores else None
    with standard_output(Exit.NOTHING_DONE if after is None else Exit.WRONG):
        if as_json:
            said = {name: getattr(plan, name) for name in ("goes", "engine_stores", "in_use", "kept", "short_bytes")}
            asked["everything"] = all(value is None for value in asked.values())
            head = {"path": store.path, "dry_run": dry_run, "asked": asked, "before": before}
            print_json(head | said | {"after": after}, JSON_VERSION)
        else:
            _show_result(plan, before, after, report_console(), dry_run=dry_run)
    results = {home.result for home in plan.engine_stores}
    if results & {"in use", "gone"}:
        raise typer.Exit(Exit.IN_USE)
    raise typer.Exit(Exit.WRONG if results & {"failed", "withdrawn"} or plan.kept or plan.short_bytes else Exit.FINE)


# -- what there is -----------------------------------------------------------------------------


def _held(homes: Sequence[HomeSummary]) -> dict[str, int]:
    """Return the number of engine stores, and what they take."""
    return {"engine_stores": len(homes), "allocated_bytes": sum(home.allocated_bytes for home in homes)}


@dataclass(frozen=True)
class HomeState(ReadHome):
    """An engine store that blocks may be chosen from. ``why_whole``: why it can only stay or go as
    a whole; empty where it can be cut."""

    why_whole: str = ""

    @cached_property
    def segment_bytes(self) -> Counter[int]:
        """Allocated bytes by segment."""
        found: Counter[int] = Counter()
        for file in self.summary.segments:
            found[file.segment] += file.allocated_bytes
        return found

    @property
    def unknown_segments(self) -> set[int]:
        """The segments that the index does not have: they are of no use, and removed with any
        cut."""
        return self.segment_bytes.keys() - {record.segment for record in self.index.segments}

    @cached_property
    def ages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The time of each block's last known use, and how many blocks come before it in its chain.

        An engine that stored a block had used all blocks before it: so a head's use is never older
        than those of its tails.
        """
        assert self.blocks is not None
        parents = self.blocks.parents.copy()
        depths, _ = climb(parents)  # a chain that bites its own tail, as in a damaged index, is cut
        return fold_up(self.blocks.columns.stored_s.astype(np.int64), parents, depths, max), depths

    def is_of(self, tenant: int) -> NDArray[np.bool_]:
        """Return for each block whether it belongs to a tenant: all of a chain does where any of it
        does, as the salt is in the hashes from the head on."""
        assert self.blocks is not None
        _, heads = climb(self.blocks.parents.copy())
        mine = self.records.columns.tenants == tenant
        found: NDArray[np.bool_] = np.isin(heads, heads[mine])
        return found


# -- the plan: no I/O, no clock ----------------------------------------------------------------


@dataclass
class HomePlan:
    """What is deleted of one engine store. ``whole``: the directory goes.

    ``blocks``: null where their number is not known. ``bytes``: what the drive gets back.
    ``result``: "deleted", "in use" (an engine has come), "gone" (an engine has taken it over, or it
    was deleted), "withdrawn" (its engine has not taken the request, and will not), "failed", or
    null in a dry run; ``why`` says more. ``live``: its engine is asked to delete; ``blocks`` and
    ``bytes`` are then what the engine says that it has deleted.
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
    live: bool = False


@dataclass
class Plan:
    """What is deleted of a store.

    ``engine_stores``: those of which something goes. ``erased``: slots that are overwritten, by
    engine store. ``keys``: blocks, with their epochs, that go from segments that stay, by engine
    store. ``requests``: what live engines are asked for, by engine store. ``in_use``: live engine
    stores that would have to change. ``kept``: sentences about engine stores that stay and might
    have gone. ``notes``: other sentences. ``short_bytes``: what is still allocated beyond
    ``to_bytes``.
    """

    engine_stores: list[HomePlan] = field(default_factory=list)
    erased: dict[str, list[Slot]] = field(default_factory=dict)
    keys: dict[str, list[tuple[int, BlockKey]]] = field(default_factory=dict)
    requests: dict[str, list[Request]] = field(default_factory=dict)
    in_use: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    short_bytes: int = 0

    @property
    def goes(self) -> dict[str, int]:
        """How much goes, of each kind. ``engine_stores``: those that go as a whole."""
        return {
            "engine_stores": sum(home.whole for home in self.engine_stores),
            "segments": sum(len(home.segments) for home in self.engine_stores),
            "blocks": sum(home.blocks or 0 for home in self.engine_stores),
            "bytes": sum(home.bytes for home in self.engine_stores),
        }


def make_plan(
    homes: Sequence[HomeState],
    now_s: int,
    *,
    to_bytes: int | None = None,
    older_than_s: int | None = None,
    namespace: bytes | None = None,
    salt_digest: bytes | None = None,
    ask_live: bool = False,
) -> Plan:
    """Choose what meets all conditions that are not None; the engine store with the oldest use goes
    first.

    ``to_bytes``: only until no more than that is allocated. ``older_than_s``: only blocks that were
    not used for so long. ``namespace``: only blocks of this fingerprint. ``salt_digest``: only
    blocks of this tenant. ``ask_live``: live engines can be asked.
    """
    plan, excess_bytes = Plan(), math.inf
    tenant = None if salt_digest is None else int.from_bytes(salt_digest, "big")
    unknown = 0
    before_s = None if older_than_s is None else now_s - older_than_s
    if to_bytes is not None:
        excess_bytes = sum(home.summary.allocated_bytes for home in homes) - to_bytes
    # An engine store that cannot be read goes before all others.
    for home in sorted(homes, key=lambda home: home.summary.record.last_use_s if home.summary.record else -1):
        record = home.summary.record
        if namespace is not None and (record is None or record.fingerprint != namespace):
            continue
        if excess_bytes <= 0:
            break
        if home.is_guest and home.summary.alive and ask_live:
            plan.kept.append(f"{engine_store(home.id)} stays as it is: its engine is on another host, ask that")
            continue
        chosen = _choose(home, before_s, excess_bytes, plan, tenant)
        if before_s is not None and not (home.why_whole or (chosen is not None and chosen.whole)):
            ahead = int((home.ages[0] > now_s + AHEAD_S).sum())
            why = "whose time is still to come: a clock was ahead, or this one is behind"
            plan.kept += [f"{engine_store(home.id)}: kept is {plural(ahead, 'block')} {why}"] if ahead else []
        unknown += int((home.records.columns.tenants == 0).sum())
        if chosen is not None and home.summary.alive and ask_live:
            everything = before_s is None and excess_bytes == math.inf
            chosen = _asked_of(home, chosen, plan, everything=everything)
            plan.engine_stores.append(chosen)
            excess_bytes -= chosen.bytes
        elif chosen is not None and home.summary.alive:
            plan.in_use.append(home.id)
        elif chosen is not None:
            plan.engine_stores.append(chosen)
            excess_bytes -= chosen.bytes
    if tenant is not None and unknown:
        whose = "they are of requests without a salt, or were stored before digests were kept or an index was rebuilt"
        plan.notes.append(f"{plural(unknown, 'block')} without a digest of a salt: {whose}")
    if to_bytes is not None:
        plan.short_bytes = max(0, int(excess_bytes))
        plan.in_use = plan.in_use if plan.short_bytes else []
    return plan


def _asked_of(home: HomeState, chosen: HomePlan, plan: Plan, *, everything: bool) -> HomePlan:
    """Return what a live engine is asked to drop; the engine store itself stays."""
    columns = home.records.columns
    known = {record.segment for record in home.index.segments}  # others are just being made
    segments = tuple(segment for segment in chosen.segments if segment in known)
    up_to = int(columns.generations.max(initial=0))
    names = set(plan.keys.get(home.id, ()))
    each = zip(columns.epochs.tolist(), columns.keys, strict=True) if names else ()
    rows = [row for row, name in enumerate(each) if name in names]
    asked = Request("", home.id, generation=up_to)
    requests = [asked._replace(everything=everything, segments=segments)] if everything or segments else []
    ranges = _ranges(sorted(zip(columns.segments[rows].tolist(), columns.indices[rows].tolist(), strict=True)))
    for start in range(0, len(ranges), MOST_RANGES):
        slots: dict[int, list[tuple[int, int]]] = {}
        for segment, first, count in ranges[start : start + MOST_RANGES]:
            slots.setdefault(segment, []).append((first, count))
        requests.append(asked._replace(slots=slots))
    plan.requests[home.id] = [request._replace(id=uuid.uuid4().hex) for request in requests]
    freed_bytes = sum(home.segment_bytes[segment] for segment in segments)
    return replace(chosen, whole=False, segments=segments, bytes=freed_bytes, live=True)


def _ranges(slots: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return ascending slots as ranges: segment, first slot, and how many."""
    found: list[tuple[int, int, int]] = []
    for segment, index in slots:
        if found and found[-1][0] == segment and sum(found[-1][1:]) == index:
            found[-1] = (segment, found[-1][1], found[-1][2] + 1)
        else:
            found.append((segment, index, 1))
    return found


def _choose(
    home: HomeState, before_s: int | None, excess_bytes: float, plan: Plan, tenant: int | None = None
) -> HomePlan | None:
    """Choose from one engine store; None where nothing goes. Blocks whose segments stay are added
    to ``plan``.

    ``before_s``: what was used since then stays; None: nothing has to stay. ``excess_bytes``: how
    much has to go; infinite: all that may. ``tenant``: only this tenant's blocks may go; None: all
    may.
    """
    record, alive = home.summary.record, home.summary.alive
    fits = home.summary.allocated_bytes <= excess_bytes
    all_old = before_s is None or (record is not None and record.last_use_s < before_s and not alive)
    if home.why_whole:
        if all_old and tenant is None:
            plan.notes += [] if fits or alive else [f"{engine_store(home.id)} goes as a whole: {home.why_whole}"]
            return _plan_for(home, home.segment_bytes)
        if (record is not None and not home.is_guest) or tenant is not None:  # else nobody knows how old it is
            plan.kept.append(f"{engine_store(home.id)} stays as it is: {home.why_whole}")
        return None
    columns, (last_use_s, _) = home.records.columns, home.ages
    is_old = last_use_s < (math.inf if before_s is None or all_old else before_s)
    if tenant is not None:
        is_old &= home.is_of(tenant)
        all_old = False
        if home.is_spread and is_old.any():
            plan.kept.append(
                f"{engine_store(home.id)}: what its ranks on other hosts have of it is not overwritten there until "
                "their files go; kvdisk clear removes them, on each host"
            )
    if not (all_old or is_old.any()):
        return None
    if fits and is_old.all():
        return _plan_for(home, home.segment_bytes)
    old, young = (set(columns.segments[rows].tolist()) for rows in (is_old, ~is_old))
    if excess_bytes < math.inf:
        return _cut_to(home, home.segment_bytes.keys() - young, excess_bytes)
    emptied = ((old - young) & home.segment_bytes.keys()) | home.unknown_segments
    rows = np.flatnonzero(is_old & ~np.isin(columns.segments, list(emptied))).tolist()
    plan.keys[home.id] = [(int(columns.epochs[row]), columns.keys[row]) for row in rows]
    if tenant is not None:
        plan.erased[home.id] = [Slot(int(columns.segments[row]), int(columns.indices[row])) for row in rows]
    return _plan_for(home, emptied, len(rows))


def _plan_for(home: HomeState, segments: Collection[int], other_blocks: int = 0) -> HomePlan:
    """Return a plan by which these segments go with their blocks, and so many other blocks; the
    whole engine store where these are all its segments."""
    record, numbers = home.summary.record, home.records.columns.segments
    whole = home.segment_bytes.keys() == set(segments)
    blocks = len(numbers) if whole else int(np.isin(numbers, list(segments)).sum()) + other_blocks
    return HomePlan(
        id=home.id,
        fingerprint=record.fingerprint if record else None,
        model=record.description.get("model") if record else None,
        last_use_s=record.last_use_s if record else None,
        whole=whole,
        segments=tuple(sorted(segments)),
        blocks=None if home.problem or home.is_guest else blocks,
        bytes=home.summary.allocated_bytes if whole else sum(home.segment_bytes[segment] for segment in segments),
    )


def _cut_to(home: HomeState, among: set[int], excess_bytes: float) -> HomePlan | None:
    """Choose segments until enough is free: those without blocks first, then those whose blocks
    were used longest ago on average. Among segments used at the same time, those with the heads of
    chains go last.
    """
    numbers, at, counts = np.unique(home.records.columns.segments, return_inverse=True, return_counts=True)
    used_s, depths = ((np.bincount(at, values) / counts).tolist() for values in home.ages)
    worth = {segment: (used_s[row], -depths[row]) for row, segment in enumerate(numbers.tolist())}
    chosen = set(home.unknown_segments)
    freed = sum(home.segment_bytes[segment] for segment in chosen)
    for segment in sorted(among - chosen, key=lambda one: (worth.get(one, (-1.0, 0.0)), -one)):
        if freed < excess_bytes:
            chosen.add(segment)
            freed += home.segment_bytes[segment]
    return _plan_for(home, chosen) if chosen or not home.segment_bytes else None


# -- the deletion ------------------------------------------------------------------------------


def carry_out(store: Store, plan: Plan, wait_s: float = 0.0) -> None:
    """Delete what is planned, and what a crash left in folders that no engine store names.
    ``wait_s``: seconds to wait for each live engine; Ctrl-C ends that, and what was asked of others
    is not begun.

    Raises StoreLocked and DeviceError before anything is deleted, unless nothing is planned. A
    failure with one engine store is that store's result.
    """
    try:
        store.tidy()
    except (StoreLocked, DeviceError):
        if plan.engine_stores:
            raise
    goes_on = True
    for home in plan.engine_stores:
        if not goes_on:
            home.result, home.why, home.blocks, home.bytes = "withdrawn", "the command was interrupted before it", 0, 0
        elif home.live:
            goes_on = _ask_engine(store, home, plan.requests[home.id], wait_s)
        else:
            keys, erased = plan.keys.get(home.id, []), plan.erased.get(home.id, [])
            home.result, home.why = _delete_of_home(store, home, keys, erased)


class _Unanswered(NamedTuple):
    """What has become of a request that its engine has not answered: see ``HomePlan``."""

    result: str
    why: str


def _ask_engine(store: Store, plan: HomePlan, requests: Sequence[Request], wait_s: float) -> bool:
    """Have a live engine delete its part; ``plan`` then has what it deleted, the result, and why.
    Return whether the command goes on: nobody has interrupted it."""
    path, deadline_s, waits, goes_on = store.home_path(plan.id), time.monotonic() + wait_s, False, True
    plan.blocks = plan.bytes = 0
    plan.result = "deleted"
    try:
        for request in requests:
            answer: Answer | _Unanswered = _Unanswered("withdrawn", "the command was interrupted")
            if goes_on:
                answer, goes_on = _ask_for(store, path, request, deadline_s, wait_s)
            if isinstance(answer, _Unanswered):
                plan.result, plan.why = answer
                break
            plan.blocks += answer.blocks
            plan.bytes += answer.bytes
            waits |= answer.waits
            if answer.why is not None:
                plan.result, plan.why = "failed", f"its engine has not done all of it: {answer.why}"
                break
    except FileNotFoundError:
        plan.result, plan.why = "gone", "its engine has ended, or it was deleted, meanwhile"
    except (OSError, KvdiskError) as error:
        plan.result, plan.why = "failed", str(error)
    if plan.result == "deleted":
        plan.why = "the drive gets the bytes back with the engine's next request" if waits else None
    elif plan.blocks:
        plan.why = f"{plan.why}; {plural(plan.blocks, 'block')} and {size(plan.bytes)} went, and the rest stays"
    return goes_on


def _post(store: Store, home_path: Path, request: Request, deadline_s: float) -> bool:
    """Make a request; return whether there was a place for it in time. Raises OSError, StoreLocked,
    DeviceError."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        with store.locked(timeout_s=left_s):  # or two commands would take one's request for the other's
            if not _is_waiting(home_path):
                write_request(home_path, request._replace(asked_s=time.time(), wait_s=left_s))
                return True
        time.sleep(_POLL_S)
    return False


def _is_waiting(home_path: Path) -> bool:
    """Whether a request waits that is still meant: one that a killed command has left is not."""
    try:
        found = read_request(home_path)
    except CorruptRecord:
        return False
    return found is not None and 0 <= time.time() - found.asked_s < found.wait_s


def _ask_for(
    store: Store, home_path: Path, request: Request, deadline_s: float, wait_s: float
) -> tuple[Answer | _Unanswered, bool]:
    """Make a request; return its engine's answer, or what has become of the request, and whether
    nobody has interrupted the command. Raises OSError, KvdiskError."""
    try:
        if not _post(store, home_path, request, deadline_s):
            why = f"another command's request was waiting for {wait_s:g} s"
            return _Unanswered("withdrawn", why), True
        return _answer_in_time(home_path, request, deadline_s, wait_s), True
    except KeyboardInterrupt:
        if not withdraw(home_path, request.id) and is_taken(home_path, request.id):
            left_s = max(0.0, deadline_s - time.monotonic())
            why = "the command was interrupted, and its engine has begun: it goes on until it is done, for"
            return _Unanswered("failed", f"{why} {left_s:.0f} s at most"), False
        answer = _own_answer(home_path, request)
        undone = _Unanswered("withdrawn", "the command was interrupted; it will not be done later either")
        return undone if answer is None else answer, False


def _answer_in_time(home_path: Path, request: Request, deadline_s: float, wait_s: float) -> Answer | _Unanswered:
    if (answer := _await_answer(home_path, request, deadline_s)) is not None:
        return answer
    if withdraw(home_path, request.id):
        why = f"its engine did not answer in {wait_s:g} s: it hangs, or runs an older kvdisk"
        return _Unanswered("withdrawn", f"{why}; it will not be done later either")
    if (answer := _await_answer(home_path, request, deadline_s + _ANSWER_S)) is not None:
        return answer
    if is_taken(home_path, request.id):
        why = "its engine has begun, and does not answer: it begins nothing more, and may have deleted a part"
    else:
        why = "its engine ignored it: it runs another version of kvdisk"
    return _Unanswered("failed", why)


def _await_answer(home_path: Path, request: Request, until_s: float) -> Answer | None:
    while (answer := _own_answer(home_path, request)) is None and time.monotonic() < until_s:
        home_path.stat()
        time.sleep(_POLL_S)
    return answer


def _own_answer(home_path: Path, request: Request) -> Answer | None:
    answer = read_answer(home_path)
    return answer if answer is not None and answer.id == request.id else None


def _delete_of_home(
    store: Store, plan: HomePlan, keys: Sequence[tuple[int, BlockKey]], erased: Sequence[Slot]
) -> tuple[str, str | None]:
    try:
        if plan.whole and not store.remove_home(plan.id):
            return "failed", "not all of it could be removed"
        if not plan.whole:
            with held_home(store, plan.id) as held:
                cut_home(held, keys, plan.segments, erased)
    except StoreLocked:
        return "in use", "an engine owns it now"
    except KvdiskError as error:
        if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
            return "gone", "an engine has taken it over, or it was deleted, meanwhile"
        return "failed", str(error)
    return "deleted", None


# -- for people --------------------------------------------------------------------------------


def _show_plan(path: Path, before: Mapping[str, int], plan: Plan, console: Console, now_s: int) -> None:
    goes_bytes, lines = plan.goes["bytes"], make_lines()
    lines.add_row("Store", Text(printable(path), "bold cyan"))
    lines.add_row("Holds", f"{size(before['allocated_bytes'])} in {plural(before['engine_stores'], 'engine store')}")
    lines.add_row("Delete", Text.assemble((size(goes_bytes), "bold"), f", {_count(plan.engine_stores)}"))
    lines.add_row("Keep", size(before["allocated_bytes"] - goes_bytes))
    console.print(lines)
    if plan.engine_stores:
        columns = (left("Engine store", "cyan"), left("Namespace", "magenta"), folded("Model"))
        table = make_table("To delete", console.width, *columns, "Last use", folded("Delete"), "Blocks", "Bytes")
        for home in plan.engine_stores:
            table.add_row(
                home.id[:ID_LETTERS],
                home.fingerprint.hex()[:ID_LETTERS] if home.fingerprint else Text("?", "red"),
                short_model(home.model).rstrip("/").rpartition("/")[2],
                ago(home.last_use_s, now_s),
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
    """Return in words what goes of an engine store."""
    if home.whole:
        return "all"
    said = [plural(len(home.segments), "segment")] if home.segments else []
    return ", ".join([*said, plural(other_blocks, "other block" if said else "block")] if other_blocks else said)


def _count(homes: Sequence[HomePlan]) -> str:
    whole, unknown = sum(home.whole for home in homes), sum(home.blocks is None for home in homes)
    more = f" and those of {plural(unknown, 'engine store')} that cannot be read" if unknown else ""
    said = f"{plural(sum(home.blocks or 0 for home in homes), 'block')}{more}"
    return f"{said}, {plural(whole, 'whole engine store')}" if whole else said


def _owned(plan: Plan) -> str:
    return f"live engines own {plural(len(plan.in_use), 'engine store')}"


def _show_result(
    plan: Plan, before: Mapping[str, int], after: Mapping[str, int] | None, console: Console, *, dry_run: bool
) -> None:
    if after is None:
        console.print("This was a dry run: nothing was deleted." if dry_run else "There is nothing to delete.")
    else:
        given = before["allocated_bytes"] - after["allocated_bytes"]
        asked = sum(home.bytes for home in plan.engine_stores if home.live)  # an engine does it with its next steps
        freed = size(max(given, asked))
        count = _count([home for home in plan.engine_stores if home.result == "deleted"])
        stays = f"{size(after['allocated_bytes'])} in {plural(after['engine_stores'], 'engine store')} stay"
        said = f"{freed}, {count}; {stays if after['engine_stores'] else 'the store is empty'}."
        console.print(Text.assemble(("\nDeleted ", "green"), said))
        others = [f"{engine_store(home.id)}: {home.why}" for home in plan.engine_stores if home.result != "deleted"]
        for home in plan.engine_stores:
            if home.live and home.result == "deleted":
                waits = f"; {home.why}" if home.why else ""
                said = f"{plural(home.blocks or 0, 'block')} and {size(home.bytes)}"
                console.print(Text(f"The engine of {engine_store(home.id)} deleted {said}{waits}."), soft_wrap=True)
        print_list("Left alone", others, console, None, "")
    if plan.short_bytes:
        short = f"{size(plan.short_bytes)} more than asked for stay"
        why = f"{_owned(plan)}, which may not change" if plan.in_use else "nothing else may be deleted"
        console.print(Text(f"{short}: {why}.", "yellow"), soft_wrap=True)
    elif plan.in_use:
        console.print(Text(f"Left alone: {_owned(plan)}.", "yellow"), soft_wrap=True)
