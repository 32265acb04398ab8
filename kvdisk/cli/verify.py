# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify``: reads the slots that a store's indexes name, and checks them as a load does.

It writes nothing. In a store in use blocks are evicted while it is read, and others take their
slots. So a slot that does not match is wrong only where it does not match either when it is read
again at the end (its block may have left and come back), and the index then still has the same
record; and all this twice.
"""

from __future__ import annotations

import errno
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from kvdisk.blocks import group_of
from kvdisk.cli.indexes import GUEST, ReadHome, Records, find_home, not_named, places_of, read_homes, why_no_record
from kvdisk.cli.output import (
    SCREEN_LINES,
    AsJson,
    Exit,
    OnlyHome,
    StoreDirectoriesOrNone,
    byte_progress,
    engine_store,
    lines_of,
    make_lines,
    opening,
    plural,
    print_fitting,
    print_json,
    printable,
    refusal,
    report_console,
    share,
    size,
    speed,
)
from kvdisk.cli.remote import (
    JSON_VERSION as REMOTE_JSON_VERSION,
)
from kvdisk.cli.remote import SAMPLE, FromRemote, RemoteVerdict, print_remote_verdict, remote_config, verify_remote
from kvdisk.device.control import HomeRecord, read_record
from kvdisk.device.home import index_is_sound
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.segment import DriveFolder, open_segment, segment_path
from kvdisk.device.store import Store
from kvdisk.device.verify import NamedSlot, WrongSlot, check_slots, read_memory
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError
from kvdisk.geometry import Namespace, slot_offset
from kvdisk.index.base import SegmentRecord
from kvdisk.index.reader_process import IndexContent, read_indexes
from kvdisk.messages import SegmentSpec

JSON_VERSION = 2
SHOWN = 20
THREADS_PER_DRIVE = 4
MOST_THREADS = 16
PART_BYTES = 64 << 20
"""Bytes that one thread reads of a file before progress is shown, and before Ctrl-C is noticed."""
_ROUNDS = 3
_LOOKS = 2
"""How often slots that do not match, and then the index, are read again. A block may come back
between the two, but hardly each time."""

Watch = Callable[[int, int], None]
"""A function that is called with the bytes that were read, and the bytes to read in all."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a slot, or with a file in which ``slots`` slots hold blocks.

    ``check``: what failed first, as in ``WrongSlot``; "file" where nothing of the file can be used,
    and then the fields about one slot are null. ``path``: null where the drive was not named.
    ``drive``: position among those of its engine store. ``what``: in words. ``offset_bytes``: of
    the slot in the file.
    """

    engine_store: str
    drive: int
    segment: int
    rank: int
    path: Path | None
    check: str
    what: str
    slots: int = 1
    slot: int | None = None
    offset_bytes: int | None = None
    epoch: int | None = None
    key: bytes | None = None


@dataclass
class HomeVerdict:
    """What was found in an engine store. ``blocks``: in its index; null where that cannot be read.

    ``slots``, ``read_bytes``: what was looked at; a block has a slot on every rank.
    ``changed_slots``: slots whose blocks were evicted meanwhile, as in a store in use. ``gone``:
    taken over or deleted meanwhile. ``problems``: sentences about the whole engine store.
    ``notes``: sentences that are worth knowing, but name no fault.
    """

    id: str
    owner: Literal["alive", "stopped"]
    blocks: int | None = None
    slots: int = 0
    read_bytes: int = 0
    wrong_slots: int = 0
    changed_slots: int = 0
    gone: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What was found in a store. ``sample_percent``: of each engine store's blocks, chosen by
    ``seed``.

    ``stopped``: it was broken off; the rest is what was found until then.
    """

    path: Path
    sample_percent: float | None
    seed: int | None
    engine_stores: list[HomeVerdict] = field(default_factory=list)
    wrong: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong in what was read."""
        return not self.wrong and not any(home.problems for home in self.engine_stores)

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all engine stores. ``blocks``: in the indexes."""
        names = ("blocks", "slots", "read_bytes", "wrong_slots", "changed_slots")
        sums = {name: sum(getattr(home, name) or 0 for home in self.engine_stores) for name in names}
        return {"engine_stores": len(self.engine_stores)} | sums


def verify(
    directories: StoreDirectoriesOrNone = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="PERCENT|N",
            help="Read so many per cent of the blocks, at random: 5, or 0.1. Of a remote store: so many objects; 100.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Of the sample, as an earlier run printed it.")
    ] = None,
    home: OnlyHome = None,
    remote: FromRemote = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="List everything that is wrong.")] = False,
) -> None:
    """Read every slot that holds a block; check its header and its checksum.

    Only reads, so a store in use may be verified too: blocks that are evicted
    meanwhile are no error. Checked are all engine stores, ranks and drives, in
    the way in which an engine checks what it loads. With --remote, and without
    a DIR, some objects of a remote store. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is good

    [cyan]1[/cyan]  something is wrong, or cannot be read; the report says what and where

    [cyan]2[/cyan]  nothing was read: not a store, no such engine store, no permission,
    another format, or wrong usage

    [cyan]130[/cyan]  broken off by Ctrl-C; the report says what was found until then
    """
    if not directories or remote is not None:
        _verify_remote(directories, remote, sample, seed, as_json, None if everything else SHOWN)
    percent = _percent(sample)
    if percent is not None and seed is None:
        seed = secrets.randbelow(1 << 31)
    with opening(directories) as named, byte_progress("verifying") as watch:
        home_id = find_home(named, home)
        verdict = verify_store(named, home_id=home_id, percent=percent, seed=seed or 0, watch=watch)
    if as_json:
        judged = {"ok": verdict.ok, "totals": verdict.totals}
        print_json(judged | vars(replace(verdict, seconds=round(verdict.seconds, 3))), JSON_VERSION)
    else:
        _print(verdict, report_console(), everything=everything)
    raise _ending(verdict)


def _ending(verdict: Verdict | RemoteVerdict) -> typer.Exit:
    return typer.Exit(Exit.STOPPED if verdict.stopped else Exit.FINE if verdict.ok else Exit.WRONG)


def _verify_remote(
    directories: Sequence[Path] | None,
    remote: str | None,
    sample: str | None,
    seed: int | None,
    as_json: bool,
    most: int | None,
) -> NoReturn:
    """Verify objects of a remote store, print what was found, and end the command."""
    count = SAMPLE if sample is None else int(sample) if sample.isdecimal() else 0
    with opening([]):
        config = remote_config(remote, directories)
        if count < 1:
            raise ConfigError(f"--sample is a number of objects of a remote store, and not {sample}")
        verdict = verify_remote(config, count, secrets.randbelow(1 << 31) if seed is None else seed)
    if as_json:
        print_json({"ok": verdict.ok} | vars(verdict), REMOTE_JSON_VERSION)
    else:
        print_remote_verdict(verdict, report_console(), most)
    raise _ending(verdict)


def _percent(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise refusal(f"--sample is a percentage above 0 and up to 100, such as 5 or 0.1, and not {text}.")
    return percent


def verify_store(
    directories: Sequence[Path],
    *,
    home_id: str | None = None,
    percent: float | None = None,
    seed: int = 0,
    watch: Watch = lambda _done, _total: None,
) -> Verdict:
    """Read and check a store. ``percent``: the part of each engine store's blocks to read, chosen
    at random by ``seed``, at least one block.

    Ends early, with what was found, on KeyboardInterrupt. Raises as ``list_homes``.
    """
    started_s = time.monotonic()
    verdict = Verdict(Path(directories[0]), percent, None if percent is None else seed)
    boot_id = Store.open(directories, create=False).boot_id
    generator = random.Random(seed)  # noqa: S311 - which slots are read is no secret
    for _ in range(_ROUNDS):
        seen = {one.id for one in verdict.engine_stores}
        homes = read_homes(
            directories,
            lambda one: one.id not in seen and home_id in {None, one.id},  # noqa: B023
            guests=True,
        )
        checks = {home.id: HomeCheck(home, boot_id) for home in homes}
        verdict.engine_stores += [check.mine for check in checks.values()]
        try:
            parts = [part for check in checks.values() for part in check.parts(percent, generator)]
            done_bytes, total_bytes = 0, sum(part.byte_count for part in parts)
            watch(0, total_bytes)
            with closing(read_parts(parts)) as reads:
                for part, read in reads:
                    checks[part.home.id].take(part, read)
                    done_bytes += part.byte_count
                    watch(done_bytes, total_bytes)
        except KeyboardInterrupt:
            verdict.stopped = True
        for check in checks.values():
            check.judge(verdict)
        if verdict.stopped or not any(check.mine.gone for check in checks.values()):
            break  # else its blocks are, by now, in an engine store of another name
    verdict.wrong.sort(key=lambda one: (one.engine_store, one.drive, one.segment, one.rank, one.slot or 0))
    for mine in verdict.engine_stores:
        mine.wrong_slots = sum(finding.slots for finding in verdict.wrong if finding.engine_store == mine.id)
    verdict.seconds = time.monotonic() - started_s
    return verdict


# -- an engine store ---------------------------------------------------------------------------


class HomeCheck:
    """An engine store while it is verified. ``mine``: what was found in it."""

    def __init__(self, home: ReadHome, boot_id: str) -> None:
        self._home = home
        self._suspects: defaultdict[Finding, list[int]] = defaultdict(list)
        """What does not match, with the rows of the blocks that it is about."""
        self._slots_to_read_again: dict[Finding, Part] = {}
        summary, record = home.summary, home.summary.record
        self.mine = HomeVerdict(summary.id, "alive" if summary.alive else "stopped")
        if record is None:
            why = why_no_record(summary.path)
            self.mine.problems += [why] if why else []
        elif home.problem is not None:
            self.mine.problems.append(home.problem)
        elif home.is_guest:
            self.mine.notes.append(f"nothing was read: {GUEST}")
        elif home.index.exists:
            self.mine.blocks = len(home.records)
            why = None if summary.alive else why_distrusted(home, record, boot_id)
            if why:  # nobody promised that one that was not closed in order would be sound
                (self.mine.problems if record.index_sum else self.mine.notes).append(why)

    def parts(self, percent: float | None, generator: random.Random) -> Iterator[Part]:
        """Yield the parts of each file, with ``percent`` of the blocks, at least one. A file
        without blocks is opened too."""
        home, record = self._home, self._home.summary.record
        if self.mine.blocks is None or record is None:
            return
        try:
            shape = HomeShape.of(record.fingerprint, record.description)
        except CorruptRecord as error:
            self.mine.problems.append(str(error))
            return
        rows = np.arange(self.mine.blocks)
        if percent is not None and len(rows):
            rows = np.array(generator.sample(range(len(rows)), max(1, round(len(rows) * percent / 100))))
        rows = rows[np.argsort(places_of(home.records.columns)[rows], kind="stable")]
        numbers = home.records.columns.segments[rows]
        for number in np.setdiff1d(numbers, [segment.segment for segment in home.index.segments]).tolist():
            finding = Finding(home.id, 0, number, 0, None, "file", "the index does not have this segment")
            self._suspects[finding] += rows[numbers == number].tolist()
        for segment in home.index.segments:
            here: list[int] = rows[numbers == segment.segment].tolist()
            most = max(1, PART_BYTES // max(1, segment.slot_bytes))
            ranks = {file.rank for file in home.summary.segments if file.segment == segment.segment}
            for rank in range(shape.rank_count):
                if home.is_spread and rank not in ranks:
                    continue  # it is on another host, or a load will find that it is not
                for start in range(0, max(1, len(here)), most):
                    yield Part(home, shape, segment, rank, here[start : start + most])

    def take(self, part: Part, read: PartRead) -> None:
        """Take note of what was read of a part."""
        segment, mine = part.segment, self.mine
        where = (mine.id, segment.drive, segment.segment, part.rank, part.path)
        mine.slots += len(part.rows)
        if read.failed:
            self._suspects[Finding(*where, "file", read.failed)] += part.rows
            return
        mine.read_bytes += part.byte_count
        row_of = {part.home.records[row].slot.index: row for row in part.rows} if read.wrong else {}
        for slot, check, what in read.wrong:
            at = slot_offset(segment.slot_bytes, slot.number)
            finding = Finding(*where, check, what, 1, slot.number, at, slot.namespace.epoch, slot.key)
            self._suspects[finding].append(row_of[slot.number])
            if mine.owner == "alive":
                self._slots_to_read_again[finding] = part._replace(rows=[row_of[slot.number]])

    def judge(self, verdict: Verdict) -> None:
        """Add to the verdict what did not match and still does not, though its block is still where
        it was.

        An index that cannot be read again, or only after Ctrl-C, clears nothing.
        """
        self.mine.gone = not self._home.summary.path.exists()
        if self.mine.gone:
            self.mine.problems.clear()  # such as a missing index
        for _ in range(_LOOKS):
            try:
                if not verdict.stopped:
                    self._read_again()
                (index,) = read_indexes([self._home.summary.index_path]) if self._suspects else [IndexContent()]
            except KeyboardInterrupt:
                verdict.stopped, index = True, IndexContent(problem="broken off")
            self._clear(index)
            if verdict.stopped or not self._slots_to_read_again:
                break
        verdict.wrong += [replace(finding, slots=len(rows)) for finding, rows in self._suspects.items()]

    def _read_again(self) -> None:
        """Clear the slots that match by now."""
        findings = list(self._slots_to_read_again)
        with closing(read_parts(list(self._slots_to_read_again.values()))) as reads:
            for finding, (_, read) in zip(findings, reads, strict=True):
                if read == PartRead([]):
                    self._keep(finding, [])

    def _clear(self, index: IndexContent) -> None:
        """Clear the slots of blocks that are elsewhere or nowhere by now."""
        records, now = self._home.records, Records(index.blocks)
        keys = {records.columns.keys[row] for rows in self._suspects.values() for row in rows}
        there = {now[row][:4] for row, key in enumerate(now.columns.keys) if key in keys}
        unclear = index.problem or not (index.exists or self.mine.gone)
        for finding, rows in list(self._suspects.items()):
            self._keep(finding, rows if unclear else [row for row in rows if records[row][:4] in there])

    def _keep(self, finding: Finding, rows: list[int]) -> None:
        """Keep only these of a finding's rows under suspicion."""
        changed_slots = len(self._suspects[finding]) - len(rows)
        self.mine.changed_slots += changed_slots
        self._suspects[finding] = rows
        if changed_slots and not rows:
            del self._suspects[finding]
            self._slots_to_read_again.pop(finding, None)


def why_unusable(home: ReadHome, boot_id: str) -> str | None:
    """Say why no engine could take this engine store over as it is; None where one could, or where
    it has an owner."""
    record = home.summary.record
    if record is None:
        return "its HOME file cannot be read"
    if home.is_guest:
        return GUEST
    if home.problem is not None or home.summary.alive:
        return home.problem
    try:
        HomeShape.of(record.fingerprint, record.description)
    except CorruptRecord as error:
        return str(error)
    return why_distrusted(home, record, boot_id)


def why_distrusted(home: ReadHome, record: HomeRecord, boot_id: str) -> str | None:
    """Say why no engine would trust the index of this stopped engine's store; None where one
    would."""
    summary = home.summary
    try:
        lost = summary.segments and not home.index.segments
        if not lost and index_is_sound(summary.index_path, record, boot_id):
            return None
        if read_record(summary.path) != record:
            return None  # it has changed meanwhile
    except (FileNotFoundError, CorruptRecord):
        return None  # taken over or deleted meanwhile
    except OSError as error:
        return f"its index cannot be read ({error.strerror})"
    return "its index is not what its last owner committed: the next engine, or kvdisk repair, rebuilds it"


# -- slots -------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Slots of one file to read, by the rows of their blocks, ascending by slot."""

    home: ReadHome
    shape: HomeShape
    segment: SegmentRecord
    rank: int
    rows: Sequence[int]

    @property
    def byte_count(self) -> int:
        """Bytes to read."""
        return len(self.rows) * self.segment.slot_bytes

    @property
    def folder(self) -> DriveFolder | None:
        """The engine store's part on the drive; None where the directory was not named."""
        return self.home.folder(self.segment.drive)

    @property
    def path(self) -> Path | None:
        """The file; None where its directory was not named."""
        return segment_path(self.folder, self.segment.segment, self.rank) if self.folder else None


class PartRead(NamedTuple):
    """What was read of a part: the slots that are wrong. ``failed``: why the file is of no use."""

    wrong: Sequence[WrongSlot] = ()
    failed: str | None = None


def read_parts(parts: Sequence[Part]) -> Generator[tuple[Part, PartRead]]:
    """Read parts on threads, of which each drive has THREADS_PER_DRIVE."""
    drives = {part.folder.path.parent for part in parts if part.folder}
    threads = min(MOST_THREADS, THREADS_PER_DRIVE * max(1, len(drives)))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvdisk-verify")
    try:
        yield from zip(parts, pool.map(read_part, parts), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def read_part(part: Part) -> PartRead:
    """Read and check the slots of a part."""
    shape, segment, folder = part.shape, part.segment, part.folder
    if folder is None:
        return PartRead(failed=not_named(segment.drive))
    spec = SegmentSpec(segment.segment, segment.slot_bytes, segment.slot_count, segment.drive, create=False)
    try:
        file = open_segment(folder, spec, part.rank, shape.rank_count, shape.fingerprint, writable=False)
    except KvdiskError as error:
        if not (isinstance(error, DeviceError) and error.errno == errno.ENOENT):
            return PartRead(failed=str(error).replace(f"{folder.path}/", ""))
        # Dropping a segment takes the records of its blocks, then its files, then its own record.
        return PartRead(failed="there is no such file" if part.rows else None)
    sizes = [group.payload_bytes if group.slot_bytes == segment.slot_bytes else 0 for group in shape.groups]
    payload_bytes = dict(enumerate(sizes))  # 0, as no block has, where it cannot be in this segment
    slots = []
    for record in (part.home.records[row] for row in part.rows):
        namespace, size = Namespace(shape.fingerprint, record.epoch), payload_bytes.get(group_of(record.key), 0)
        slots.append(NamedSlot(record.slot.index, namespace, record.key, record.generation, record.parent, size))
    with closing(file):
        return PartRead(list(check_slots(file, shape.rank_count, slots, read_memory(segment.slot_bytes))))


# -- for people --------------------------------------------------------------------------------


def _print(verdict: Verdict, console: Console, *, everything: bool) -> None:
    homes, totals = verdict.engine_stores, verdict.totals
    slots, read_bytes = plural(totals["slots"], "slot"), totals["read_bytes"]
    lines = make_lines()
    lines.add_row("Store", Text(printable(verdict.path), "bold cyan"))
    alive = sum(home.owner == "alive" for home in homes)
    in_use = f" ({alive} in use)" if alive else ""
    lines.add_row("Holds", f"{plural(totals['blocks'], 'block')} in {plural(len(homes), 'engine store')}{in_use}")
    rate = f" ({speed(read_bytes / verdict.seconds)})" if verdict.seconds > 0 and read_bytes else ""
    lines.add_row("Read", f"{slots}, {size(read_bytes)} in {verdict.seconds:.1f} s{rate}")
    if verdict.sample_percent is not None:
        lines.add_row("Sample", f"{verdict.sample_percent:g} % of the blocks, seed {verdict.seed}")
    if changed := totals["changed_slots"]:
        lines.add_row("Changed", f"{plural(changed, 'slot')} whose block was evicted meanwhile")
    if not verdict.ok:
        lines.add_row("To do", _remedy(verdict))
    lines.add_row("Result", _result(verdict))
    gone = "it was taken over or deleted meanwhile, what it held was read in part"
    notes = [
        f"{engine_store(home.id)}: {note}" for home in homes for note in [*home.notes, *([gone] if home.gone else [])]
    ]
    wrong = [f"{engine_store(home.id)}: {problem}" for home in homes for problem in home.problems]
    wrong += [_wrong_line(finding) for finding in verdict.wrong]
    room = None if everything else SCREEN_LINES - lines_of(lines, console.width) - 1
    more = "--all or --json lists them"
    room = print_fitting("Wrong", wrong, "red", console, room, more)
    print_fitting("Worth knowing", notes, "yellow", console, room, more)
    if wrong or notes:
        console.print()
    console.print(lines)


def _result(verdict: Verdict) -> Text:
    wrong, slots = verdict.totals["wrong_slots"], verdict.totals["slots"]
    text = Text("stopped before the end; ", "yellow") if verdict.stopped else Text()
    if not (verdict.engine_stores or verdict.stopped):
        return text.append("the store is empty: there is nothing to check", "green")
    if verdict.ok:
        in_part = verdict.stopped or verdict.sample_percent
        return text.append("all that was read is good" if in_part else "all good", "green")
    said = [f"{plural(wrong, 'slot')} wrong ({share(wrong / slots)} of those read)"] if wrong and slots else []
    others = sum(finding.slots == 0 for finding in verdict.wrong) + sum(
        len(home.problems) for home in verdict.engine_stores
    )
    return text.append(", ".join([*said, plural(others, "other problem")] if others else said), "bold red")


def _remedy(verdict: Verdict) -> str:
    """Say what to do about what is wrong."""
    if any("kvdisk repair" in problem for home in verdict.engine_stores for problem in home.problems):
        return "run kvdisk repair"
    if any(finding.check == "file" and finding.path for finding in verdict.wrong):
        return "run kvdisk repair: it drops segments whose files are of no use"
    return "nothing: no engine uses what is wrong; if it comes again, test the drive and the memory"


def _wrong_line(finding: Finding) -> str:
    place = f"{engine_store(finding.engine_store)} drive {finding.drive} segment {finding.segment} rank {finding.rank}"
    path = f" ({finding.path})" if finding.path else ""
    if finding.slot is None:
        return f"{place}, all of its {plural(finding.slots, 'block')}: {finding.what}{path}"
    key = (finding.key or b"").hex()
    return f"{place} slot {finding.slot}: {finding.what}; key {key}, byte {finding.offset_bytes} of {finding.path}"
