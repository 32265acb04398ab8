# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify``: reads the slots that a store's indexes name, and checks them as a load does.

It writes nothing. On a store in use blocks leave while it is read, and others take their slots. So
what does not match is wrong only where the index, read again afterwards, still has the same record.
"""

from __future__ import annotations

import errno
import mmap
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Literal, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from kvdisk import __version__
from kvdisk.blocks import Slot, group_of
from kvdisk.cli.indexes import Records, of_segments, places_of
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    OnlyHome,
    StoreDirectories,
    byte_progress,
    make_lines,
    plural,
    print_json,
    print_list,
    print_note,
    printable,
    refusal,
    refusing,
    report_console,
    share,
    size,
    store_paths,
)
from kvdisk.cli.survey import why_no_record
from kvdisk.device import paths
from kvdisk.device.control import INDEX, DriveFolder, HomeRecord, HomeSummary, read_record
from kvdisk.device.home import INDEX_FILE
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.segment import open_segment, segment_path
from kvdisk.device.store import Store
from kvdisk.device.verify import NamedSlot, WrongSlot, check_slots, read_memory
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.geometry import Namespace, slot_offset
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.reader_process import IndexContent, read_indexes
from kvdisk.messages import SegmentSpec

SHOWN = 20
THREADS_PER_DRIVE = 4
MOST_THREADS = 16
PART_BYTES = 64 << 20
_ASK_AGAIN_S = 600.0
"""For an index that could be read at the start. Later its drive hangs, and what is wrong there is said."""
_MOST_SUSPECTS = 65536
"""Slots that do not match before the index is read again."""
_ROUNDS = 3
_KEY_LETTERS = 16

Watch = Callable[[int, int], None]
"""Called with the bytes that have been read, and those that are to be read in all."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a slot, or with a file, of whose slots ``slots`` hold blocks.

    ``check`` is what failed first. Of a slot: "read" (it cannot be read), "header" (it has no sound
    one), "version", "checksum" (of the payload), "group" (its segment has slots of another size),
    or the field of its header that says something else than the index: "namespace", "epoch", "key",
    "generation", "payload_bytes", "rank", "rank_count", "parent". Of a file of which nothing can be
    used: "file"; what is about one slot is null then. ``path``: null where the drive was not named.
    ``drive``: position among the home's. ``what``: in words. ``offset_bytes``: of the slot in the
    file.
    """

    home: str
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

    @property
    def file(self) -> tuple[str, int, int, int]:
        """Which file it is in."""
        return self.home, self.drive, self.segment, self.rank


@dataclass
class HomeVerdict:
    """What was found of a home. ``blocks``: in its index, null where that cannot be read.

    ``slots``, ``read_bytes``: what was looked at; a block has a slot on every rank.
    ``changed_slots``: their blocks left meanwhile, as they may in a store in use. ``gone``: taken
    over or deleted meanwhile. ``problems``: of the home as a whole, sentences. ``notes``: worth
    knowing, and not wrong.
    """

    id: str
    owner: Literal["alive", "orphan"]
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
    """What was found of a store. ``sample_percent``: of each home's blocks, by ``seed``.

    ``stopped``: broken off; the rest is what was found until then.
    """

    path: Path
    sample_percent: float | None
    seed: int | None
    homes: list[HomeVerdict] = field(default_factory=list)
    wrong: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong in what was read."""
        return not self.wrong and not any(home.problems for home in self.homes)

    @property
    def totals(self) -> dict[str, int]:
        """Sums over all homes. ``blocks``: in the indexes."""
        names = ("blocks", "slots", "read_bytes", "wrong_slots", "changed_slots")
        sums = {name: sum(getattr(home, name) or 0 for home in self.homes) for name in names}
        return {"homes": len(self.homes)} | sums


def verify(
    directories: StoreDirectories,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="PERCENT", help="Read so many per cent of the blocks, at random: 5, or 0.1."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Of the sample, as an earlier run printed it.")
    ] = None,
    home: OnlyHome = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="List everything that is wrong.")] = False,
) -> None:
    """Read every slot that holds a block; check its header and its checksum.

    Only reads, so a store in use may be verified too: blocks that leave
    meanwhile are no error. Checked are all homes, ranks and drives, in the
    way in which an engine checks what it loads. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is good

    [cyan]1[/cyan]  something is wrong, or cannot be read; the report says what and where

    [cyan]2[/cyan]  nothing was read: not a store, no such home, no permission,
    another format, or wrong usage

    [cyan]130[/cyan]  broken off by Ctrl-C; the report says what was found until then
    """
    percent = _percent(sample)
    if percent is not None and seed is None:
        seed = secrets.randbelow(1 << 31)
    named = store_paths(directories)
    with refusing(named), byte_progress("verifying") as watch:
        verdict = verify_store(named, home_id=home, percent=percent, seed=seed or 0, watch=watch)
    if home is not None and not verdict.homes and not verdict.stopped:
        raise refusal(f"{named[0]} has no home {home}.")
    if as_json:
        head = {"json_version": 1, "kvdisk_version": __version__, "ok": verdict.ok, "totals": verdict.totals}
        print_json(head | vars(replace(verdict, seconds=round(verdict.seconds, 3))))
    else:
        _print(verdict, report_console(), None if everything else SHOWN)
    if verdict.stopped:
        raise typer.Exit(Exit.STOPPED)
    raise typer.Exit(Exit.FINE if verdict.ok else Exit.WRONG)


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
    """Read and check. ``percent``: of each home's blocks, at random by ``seed``, at least one.

    Ends early, with what was found, on KeyboardInterrupt. Raises as ``list_homes``.
    """
    started_s = time.monotonic()
    verdict = Verdict(Path(directories[0]), percent, None if percent is None else seed)
    generator = random.Random(seed)  # noqa: S311 - which slots are read is no secret
    seen: set[str] = set()
    try:
        for _ in range(_ROUNDS):
            summaries = [one for one in list_homes(directories) if one.id not in seen and home_id in {None, one.id}]
            seen.update(summary.id for summary in summaries)
            homes = _look_at_homes(directories, summaries)
            mine = [verdict_of for verdict_of, _ in homes]
            verdict.homes += mine
            readable = [(one, home.sampled(percent, generator)) for one, home in homes if home]
            _read_slots(readable, verdict.wrong, watch)
            for one, summary in zip(mine, summaries, strict=True):
                one.gone = not summary.path.exists()
                if one.gone:
                    one.problems.clear()  # such as a missing index
            if not any(one.gone for one in mine):
                break  # else its blocks are, by now, in a home of another name
    except KeyboardInterrupt:
        verdict.stopped = True
    verdict.wrong = _one_a_file(verdict.wrong)
    for one in verdict.homes:
        one.wrong_slots = sum(finding.slots for finding in verdict.wrong if finding.home == one.id)
    verdict.seconds = time.monotonic() - started_s
    return verdict


def _one_a_file(findings: Sequence[Finding]) -> list[Finding]:
    """Join what is said of a file as a whole, and put all in the order of where it is."""
    of_slots = [finding for finding in findings if finding.slot is not None]
    of_files: dict[object, Finding] = {}
    for finding in findings:
        if finding.slot is None:
            known = of_files.get(finding.file)
            of_files[finding.file] = replace(known, slots=known.slots + finding.slots) if known else finding
    return sorted([*of_files.values(), *of_slots], key=lambda one: (*one.file, one.slot or 0))


# -- homes as a whole --------------------------------------------------------------------------


@dataclass(frozen=True)
class HomeToRead:
    """A home whose slots can be read. ``rows``: of the blocks to read, ascending."""

    id: str
    path: Path
    shape: HomeShape
    folders: tuple[DriveFolder | None, ...]
    index: IndexContent
    records: Records
    rows: Sequence[int]

    def folder(self, drive: int) -> DriveFolder | None:
        """Return the home's part on a drive; None where its directory was not named."""
        return self.folders[drive] if drive < len(self.folders) else None

    def sampled(self, percent: float | None, generator: random.Random) -> HomeToRead:
        """Return the home with so many of its blocks, at least one."""
        if percent is None or not self.rows:
            return self
        count = min(len(self.rows), max(1, round(len(self.rows) * percent / 100)))
        return replace(self, rows=sorted(generator.sample(self.rows, count)))


def _look_at_homes(
    directories: Sequence[Path], summaries: Sequence[HomeSummary]
) -> list[tuple[HomeVerdict, HomeToRead | None]]:
    """Read the indexes, and note what is wrong with homes as a whole."""
    boot_id = Store.open(directories, create=False).boot_id
    found = []
    for summary, index in zip(summaries, read_indexes([one.index_path for one in summaries]), strict=True):
        mine, home = HomeVerdict(summary.id, "alive" if summary.alive else "orphan"), None
        record = summary.record
        if record is None:
            why = why_no_record(summary.path)
            mine.problems += [why] if why and summary.path.exists() else []
        elif index.problem is not None:
            mine.problems.append(f"its index cannot be read ({index.problem})")
        elif not index.exists:
            mine.problems += ["its index is missing"] if summary.segments and not summary.alive else []
        else:
            records = Records(index.blocks)
            mine.blocks = len(records)
            _compare_index(summary, record, boot_id, mine)
            try:
                shape = HomeShape.of(record.fingerprint, record.description)
                rows = range(mine.blocks)
                home = HomeToRead(summary.id, summary.path, shape, summary.folders, index, records, rows)
            except CorruptRecord as error:
                mine.problems.append(str(error))
        found.append((mine, home))
    return found


def _compare_index(summary: HomeSummary, record: HomeRecord, boot_id: str, mine: HomeVerdict) -> None:
    """Compare the index of a home without an owner with what HOME says of it."""
    if summary.alive:
        return
    if not record.index_sum:
        if record.boot_id != boot_id:
            mine.notes.append(
                "its index is not trusted, since the machine stopped, or is another one, and the home was not closed "
                "in order: the next engine, or kvdisk repair, makes it anew"
            )
        return
    try:
        as_closed = paths.sum_of_file(summary.index_path / INDEX_FILE) == record.index_sum
        if not as_closed and read_record(summary.path) == record:
            mine.problems.append(
                "its index is not the one that its last owner closed: the next engine, or kvdisk repair, makes it anew"
            )
    except (FileNotFoundError, CorruptRecord):
        return  # taken over or deleted meanwhile
    except OSError as error:
        mine.problems.append(f"its index cannot be read ({error.strerror})")


# -- slots -------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Slots of one file, by the rows of their blocks, ascending by slot."""

    home: HomeToRead
    segment: SegmentRecord
    rank: int
    rows: Sequence[int]

    @property
    def byte_count(self) -> int:
        """Bytes to read."""
        return len(self.rows) * self.segment.slot_bytes

    def records(self) -> list[BlockRecord]:
        """Return the records of the blocks."""
        return [self.home.records[row] for row in self.rows]


class PartRead(NamedTuple):
    """What a part's slots are like. ``failed``: why the file is of no use."""

    wrong: Sequence[WrongSlot] = ()
    failed: str | None = None
    missing: bool = False


def _read_slots(homes: Sequence[tuple[HomeVerdict, HomeToRead]], wrong: list[Finding], watch: Watch) -> None:
    parts: list[Part] = []
    verdicts = {home.id: mine for mine, home in homes}
    astray: list[tuple[HomeVerdict, HomeToRead, list[BlockRecord]]] = []
    for mine, home in homes:
        of_home, lost = parts_of(home)
        parts += of_home
        astray.append((mine, home, lost))
    done_bytes, total_bytes = 0, sum(part.byte_count for part in parts)
    watch(0, total_bytes)
    still_astray = _still_there([(home, records) for _, home, records in astray])
    for (mine, _, _), still in zip(astray, still_astray, strict=True):
        if lost_blocks := sum(still):
            mine.problems.append(f"{plural(lost_blocks, 'block')} lie where its segments have no slots")
    suspects: list[tuple[Part, PartRead]] = []
    suspect_slots = 0
    with closing(read_parts(parts)) as reads:
        try:
            for part, read in reads:
                done_bytes += part.byte_count
                watch(done_bytes, total_bytes)
                verdicts[part.home.id].slots += len(part.rows)
                verdicts[part.home.id].read_bytes += 0 if read.failed else part.byte_count
                if read.wrong or read.failed:
                    suspects.append((part, read))
                    suspect_slots += len(part.rows if read.failed else read.wrong)
                if suspect_slots >= _MOST_SUSPECTS:
                    wrong += _judge(suspects, verdicts)
                    suspects, suspect_slots = [], 0
        finally:
            wrong += _judge(suspects, verdicts)


def _judge(suspects: Sequence[tuple[Part, PartRead]], verdicts: dict[str, HomeVerdict]) -> Iterator[Finding]:
    """Ask whether the blocks are still where they were; yield as wrong what then is."""
    by_home: dict[str, list[tuple[Part, PartRead, list[BlockRecord]]]] = {}
    for part, read in suspects:
        records = part.records() if read.failed is not None else [_record_of(part, one.slot) for one in read.wrong]
        by_home.setdefault(part.home.id, []).append((part, read, records))
    asked = [(found[0][0].home, [record for *_, records in found for record in records]) for found in by_home.values()]
    for found, still in zip(by_home.values(), map(iter, _still_there(asked)), strict=True):
        for part, read, records in found:
            there = [next(still) for _ in records]
            verdicts[part.home.id].changed_slots += len(there) - sum(there)
            yield from _findings(part, read, there)


def _findings(part: Part, read: PartRead, there: Sequence[bool]) -> Iterator[Finding]:
    folder, segment = part.home.folder(part.segment.drive), part.segment
    path = segment_path(folder, segment.segment, part.rank) if folder else None
    where = (part.home.id, segment.drive, segment.segment, part.rank, path)
    if read.failed is not None:
        # Dropping a segment takes the records of its blocks, then its files, then its own record.
        if any(there) or not (there or read.missing):
            yield Finding(*where, "file", read.failed, sum(there))
        return
    for one, is_there in zip(read.wrong, there, strict=True):
        if is_there:
            slot = one.slot
            offset_bytes = slot_offset(segment.slot_bytes, slot.number)
            yield Finding(*where, one.check, one.what, 1, slot.number, offset_bytes, slot.namespace.epoch, slot.key)


def _record_of(part: Part, slot: NamedSlot) -> BlockRecord:
    where = Slot(part.segment.segment, slot.number)
    return BlockRecord(slot.namespace.epoch, slot.key, where, slot.generation, slot.parent)


def _still_there(asked: Sequence[tuple[HomeToRead, Sequence[BlockRecord]]]) -> list[list[bool]]:
    """Whether each home's index still has each block there. True for all where it cannot be read."""
    paths_asked = [home.path / INDEX for home, records in asked if records]
    indexes = iter(read_indexes(paths_asked, _ASK_AGAIN_S))
    return [_among(next(indexes), records) if records else [] for _, records in asked]


def _among(index: IndexContent, records: Sequence[BlockRecord]) -> list[bool]:
    if index.problem is not None:
        return [True] * len(records)
    wanted = {record.key for record in records}
    read = Records(index.blocks)
    now = {read[row][:4] for row, key in enumerate(read.columns.keys) if key in wanted}
    return [record[:4] in now for record in records]


def parts_of(home: HomeToRead) -> tuple[list[Part], list[BlockRecord]]:
    """Cut a home into parts. Also returns the blocks that lie where its segments have no slots."""
    blocks, segments = home.records.columns, {segment.segment: segment for segment in home.index.segments}
    rows = np.array(home.rows, np.int64)
    slots = of_segments(blocks.segments, {number: segment.slot_count for number, segment in segments.items()}, 0)
    is_astray = blocks.indices[rows] >= slots[rows]
    astray = [home.records[row] for row in rows[is_astray].tolist()]
    rows = rows[~is_astray]
    rows = rows[np.argsort(places_of(blocks)[rows], kind="stable")]
    numbers = blocks.segments[rows]
    parts = []
    for number, segment in segments.items():
        start, end = np.searchsorted(numbers, np.array([number, number + 1], np.int64)).tolist()
        mine: list[int] = rows[start:end].tolist()
        most = max(1, PART_BYTES // max(1, segment.slot_bytes))
        for first in range(0, max(1, len(mine)), most):
            cut = mine[first : first + most]
            parts += [Part(home, segment, rank, cut) for rank in range(home.shape.rank_count)]
    return parts, astray


def read_parts(parts: Iterable[Part]) -> Generator[tuple[Part, PartRead]]:
    """Read parts on threads, a few ahead. Yields them drive by drive in turn."""
    by_drive: dict[Path | None, list[Part]] = {}
    for part in parts:
        folder = part.home.folder(part.segment.drive)
        by_drive.setdefault(folder.path.parent if folder else None, []).append(part)
    threads = min(MOST_THREADS, THREADS_PER_DRIVE * max(1, len(by_drive)))
    in_turn = (part for turn in zip_longest(*by_drive.values()) for part in turn if part is not None)
    memories: SimpleQueue[mmap.mmap] = SimpleQueue()

    def take_memory(slot_bytes: int) -> mmap.mmap:
        try:
            memory = memories.get_nowait()
        except Empty:
            memory = read_memory(slot_bytes)
        return memory if len(memory) >= slot_bytes else read_memory(slot_bytes)

    waiting: deque[tuple[Part, Future[PartRead]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvdisk-verify") as pool:
        try:
            for part in in_turn:
                waiting.append((part, pool.submit(read_part, part, take_memory, memories.put)))
                if len(waiting) > 2 * threads:
                    yield waiting[0][0], waiting[0][1].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        finally:
            for _, future in waiting:
                future.cancel()


def read_part(part: Part, take: Callable[[int], mmap.mmap], give_back: Callable[[mmap.mmap], None]) -> PartRead:
    """Read and check the slots of a part. ``take``: memory for slots of so many bytes."""
    home, segment = part.home, part.segment
    folder = home.folder(segment.drive)
    if folder is None:
        return PartRead(failed=f"drive {segment.drive} was not looked at, name its directory too")
    wrong, slots = [], []
    for record in part.records():
        group = group_of(record.key)
        known = group < len(home.shape.groups) and home.shape.groups[group].slot_bytes == segment.slot_bytes
        payload_bytes = home.shape.groups[group].payload_bytes if known else 0
        namespace = Namespace(home.shape.fingerprint, record.epoch)
        slot = NamedSlot(record.slot.index, namespace, record.key, record.generation, record.parent, payload_bytes)
        if known:
            slots.append(slot)
        else:
            what = f"slots of {segment.slot_bytes} bytes hold no blocks of KV-cache group {group}"
            wrong.append(WrongSlot(slot, "group", what))
    ranks = home.shape.rank_count
    spec = SegmentSpec(segment.segment, segment.slot_bytes, segment.slot_count, segment.drive, create=False)
    try:
        file = open_segment(folder, spec, part.rank, ranks, home.shape.fingerprint, writable=False)
    except KvdiskError as error:
        missing = isinstance(error, DeviceError) and error.errno == errno.ENOENT
        said = "there is no such file" if missing else str(error).replace(f"{folder.path}/", "")
        return PartRead(failed=said, missing=missing)
    try:
        if slots:  # so the file is as long as HOME and the index say, however large that is
            memory = take(segment.slot_bytes)
            wrong += check_slots(file, ranks, slots, memory)
            give_back(memory)
    finally:
        file.close()
    return PartRead(wrong)


# -- for people --------------------------------------------------------------------------------


def _print(verdict: Verdict, console: Console, most: int | None) -> None:
    homes, totals = verdict.homes, verdict.totals
    slots, read_bytes = plural(totals["slots"], "slot"), totals["read_bytes"]
    lines = make_lines()
    lines.add_row("Store", Text(printable(verdict.path), "bold cyan"))
    alive = sum(home.owner == "alive" for home in homes)
    in_use = f" ({alive} in use)" if alive else ""
    lines.add_row("Holds", f"{plural(totals['blocks'], 'block')} in {plural(len(homes), 'home')}{in_use}")
    rate = f" ({size(round(read_bytes / verdict.seconds))}/s)" if verdict.seconds > 0 and read_bytes else ""
    lines.add_row("Read", f"{slots}, {size(read_bytes)} in {verdict.seconds:.1f} s{rate}")
    if verdict.sample_percent is not None:
        lines.add_row("Sample", f"{verdict.sample_percent:g} % of the blocks, seed {verdict.seed}")
    if changed := totals["changed_slots"]:
        lines.add_row("Changed", f"{plural(changed, 'slot')} whose block left meanwhile")
    lines.add_row("Result", _result(verdict))
    console.print(lines)
    for home in homes:
        gone = ["it was taken over or deleted meanwhile, what it held was read in part"] if home.gone else []
        for note in [*home.notes, *gone]:
            print_note(f"home {home.id}: {note}", console)
    wrong = [f"home {home.id}: {problem}" for home in homes for problem in home.problems]
    wrong += [_wrong_line(finding) for finding in verdict.wrong]
    print_list("Wrong", wrong, console, most, "--all or --json lists them")


def _result(verdict: Verdict) -> Text:
    wrong, slots = verdict.totals["wrong_slots"], verdict.totals["slots"]
    text = Text("stopped before the end; ", "yellow") if verdict.stopped else Text()
    if verdict.ok:
        in_part = verdict.stopped or verdict.sample_percent
        return text.append("all that was read is good" if in_part else "all good", "green")
    said = [f"{plural(wrong, 'slot')} wrong ({share(wrong / slots)} of those read)"] if wrong and slots else []
    files = sum(finding.slots == 0 for finding in verdict.wrong)
    said += [f"{plural(files, 'file')} without blocks wrong"] if files else []
    problems = sum(len(home.problems) for home in verdict.homes)
    said += [f"{plural(problems, 'problem')} of homes"] if problems else []
    return text.append(", ".join(said), "bold red")


def _wrong_line(finding: Finding) -> str:
    place = f"home {finding.home[:ID_LETTERS]} drive {finding.drive} segment {finding.segment} rank {finding.rank}"
    path = f" ({finding.path})" if finding.path else ""
    if finding.slot is None:
        return f"{place}, all of its {plural(finding.slots, 'block')}: {finding.what}{path}"
    key = (finding.key or b"").hex()
    shown = key if len(key) <= _KEY_LETTERS else f"{key[:_KEY_LETTERS]}…"
    return f"{place} slot {finding.slot}: {finding.what}; key {shown}, byte {finding.offset_bytes} of {finding.path}"
