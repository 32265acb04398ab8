# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify``: reads the slots that a store's indexes name, and checks them as a load does.

It writes nothing. On a store in use blocks are evicted while it is read, and others take their
slots. So what does not match is wrong only where the index, asked again afterwards, still has the
same record.
"""

from __future__ import annotations

import errno
import mmap
import random
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from kvdisk import __version__
from kvdisk.blocks import BlockKey, Slot, group_of
from kvdisk.cli.indexes import ReadHome, not_named, of_segments, places_of, read_homes, why_no_record
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
from kvdisk.device import paths
from kvdisk.device.control import INDEX, HomeRecord, HomeSummary, read_record
from kvdisk.device.home import INDEX_FILE
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.segment import open_segment, segment_path
from kvdisk.device.store import Store
from kvdisk.device.verify import NamedSlot, WrongSlot, check_slots, read_memory
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.geometry import Namespace, slot_offset
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.reader_process import ReaderProcess
from kvdisk.messages import SegmentSpec

SHOWN = 20
THREADS_PER_DRIVE = 4
MOST_THREADS = 16
PART_BYTES = 64 << 20
_ASK_AGAIN_S = 600.0
"""For an index that could be read at the start. Later its drive hangs, and what is wrong there is
said."""
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
    ``drive``: position among those of its engine store. ``what``: in words. ``offset_bytes``: of
    the slot in the file.
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


@dataclass
class HomeVerdict:
    """What was found of an engine store. ``blocks``: in its index, null where that cannot be read.

    ``slots``, ``read_bytes``: what was looked at; a block has a slot on every rank.
    ``changed_slots``: their blocks were evicted meanwhile, as in a store in use. ``gone``: taken
    over or deleted meanwhile. ``problems``: of the whole, sentences. ``notes``: worth
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
    """What was found of a store. ``sample_percent``: of each engine store's blocks, by ``seed``.

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
        """Sums over all engine stores. ``blocks``: in the indexes."""
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

    Only reads, so a store in use may be verified too: blocks that are evicted
    meanwhile are no error. Checked are all engine stores, ranks and drives, in
    the way in which an engine checks what it loads. Needs neither a GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  all is good

    [cyan]1[/cyan]  something is wrong, or cannot be read; the report says what and where

    [cyan]2[/cyan]  nothing was read: not a store, no such engine store, no permission,
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
        raise refusal(f"{named[0]} has no engine store {home}.")
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
    """Read and check. ``percent``: of each engine store's blocks, at random by ``seed``, at least
    one.

    Ends early, with what was found, on KeyboardInterrupt. Raises as ``list_homes``.
    """
    started_s = time.monotonic()
    verdict = Verdict(Path(directories[0]), percent, None if percent is None else seed)
    generator = random.Random(seed)  # noqa: S311 - which slots are read is no secret
    try:
        for _ in range(_ROUNDS):
            seen = {one.id for one in verdict.homes}
            read = read_homes(directories, lambda one: one.id not in seen and home_id in {None, one.id})  # noqa: B023
            boot_id = Store.open(directories, create=False).boot_id
            verdicts = [_verdict_of(home, boot_id) for home in read]
            verdict.homes += verdicts
            _read_slots(list(zip(read, verdicts, strict=True)), percent, generator, verdict.wrong, watch)
            for home, mine in zip(read, verdicts, strict=True):
                mine.gone = not home.summary.path.exists()
                if mine.gone:
                    mine.problems.clear()  # such as a missing index
            if not any(mine.gone for mine in verdicts):
                break  # else its blocks are, by now, in an engine store of another name
    except KeyboardInterrupt:
        verdict.stopped = True
    verdict.wrong = _one_a_file(verdict.wrong)
    for mine in verdict.homes:
        mine.wrong_slots = sum(finding.slots for finding in verdict.wrong if finding.home == mine.id)
    verdict.seconds = time.monotonic() - started_s
    return verdict


def _one_a_file(findings: Sequence[Finding]) -> list[Finding]:
    """Join what is said of a file as a whole, and put all in the order of where it is."""
    found: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        where = (one.home, one.drive, one.segment, one.rank, -1 if one.slot is None else one.slot)
        found[where] = replace(one, slots=one.slots + found[where].slots) if where in found else one
    return [found[where] for where in sorted(found)]


# -- engine stores as a whole ------------------------------------------------------------------


def _verdict_of(home: ReadHome, boot_id: str) -> HomeVerdict:
    """Note what is wrong with an engine store as a whole."""
    summary, record = home.summary, home.summary.record
    mine = HomeVerdict(summary.id, "alive" if summary.alive else "orphan")
    if record is None:
        why = why_no_record(summary.path)
        mine.problems += [why] if why and summary.path.exists() else []
    elif home.problem is not None:
        mine.problems.append(home.problem)
    elif home.index.exists:
        mine.blocks = len(home.records)
        if not summary.alive:
            _compare_index(summary, record, boot_id, mine)
    return mine


def _compare_index(summary: HomeSummary, record: HomeRecord, boot_id: str, mine: HomeVerdict) -> None:
    """Compare the index of an engine store without an owner with what HOME says of it."""
    if not record.index_sum:
        if record.boot_id != boot_id:
            mine.notes.append(
                "its index is not trusted, since the machine stopped, or is another one, and it was not closed in "
                "order: the next engine, or kvdisk repair, makes it anew"
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
    def path(self) -> Path | None:
        """The file; None where its directory was not named."""
        folder = self.home.folder(self.segment.drive)
        return segment_path(folder, self.segment.segment, self.rank) if folder else None


class PartRead(NamedTuple):
    """What a part's slots are like. ``failed``: why the file is of no use."""

    wrong: Sequence[WrongSlot] = ()
    failed: str | None = None
    missing: bool = False


def _read_slots(
    homes: Sequence[tuple[ReadHome, HomeVerdict]],
    percent: float | None,
    generator: random.Random,
    wrong: list[Finding],
    watch: Watch,
) -> None:
    parts: list[Part] = []
    verdicts = {mine.id: mine for _, mine in homes}
    with closing(IndexesNow()) as indexes:
        for home, mine in homes:
            if mine.blocks is not None:
                parts += _parts_of(home, mine, _sampled(mine.blocks, percent, generator), indexes)
        done_bytes, total_bytes = 0, sum(part.byte_count for part in parts)
        watch(0, total_bytes)
        with closing(read_parts(parts)) as reads:
            for part, read in reads:
                mine = verdicts[part.home.id]
                mine.slots += len(part.rows)
                mine.read_bytes += 0 if read.failed else part.byte_count
                wrong += _judge(part, read, mine, indexes)
                done_bytes += part.byte_count
                watch(done_bytes, total_bytes)


def _sampled(blocks: int, percent: float | None, generator: random.Random) -> Sequence[int]:
    """Return the rows of so many of the blocks, at least one."""
    if percent is None or not blocks:
        return range(blocks)
    return sorted(generator.sample(range(blocks), min(blocks, max(1, round(blocks * percent / 100)))))


class IndexesNow:
    """What the indexes of engine stores say after slots were read."""

    def __init__(self) -> None:
        self._reader = ReaderProcess()
        self._silent: set[str] = set()

    def still_have(self, home: ReadHome, records: Sequence[BlockRecord]) -> list[bool]:
        """Whether the index still has each block there. True for all where it cannot be asked."""
        keys: dict[int, list[BlockKey]] = {}
        for record in records:
            keys.setdefault(record.epoch, []).append(record.key)
        now: set[tuple[object, ...]] = set()
        try:
            for epoch, of_epoch in keys.items():
                if home.id not in self._silent:
                    found = self._reader.find(home.summary.path / INDEX, epoch, of_epoch, _ASK_AGAIN_S)
                    now.update(record[:4] for _, record in found.records)
        except KvdiskError:
            self._silent.add(home.id)
        is_silent = home.id in self._silent
        return [is_silent or record[:4] in now for record in records]

    def close(self) -> None:
        """End the process that reads them."""
        self._reader.stop()


def _judge(part: Part, read: PartRead, mine: HomeVerdict, indexes: IndexesNow) -> Iterator[Finding]:
    """Yield as wrong what does not match though its block is still where it was."""
    segment = part.segment
    where = (mine.id, segment.drive, segment.segment, part.rank, part.path)
    if read.failed:
        there = indexes.still_have(part.home, [part.home.records[row] for row in part.rows])
        # Dropping a segment takes the records of its blocks, then its files, then its own record.
        if any(there) or not (there or read.missing):
            yield Finding(*where, "file", read.failed, sum(there))
    else:
        there = indexes.still_have(part.home, [_record(segment, one.slot) for one in read.wrong])
        for one, is_there in zip(read.wrong, there, strict=True):
            if is_there:
                slot, at = one.slot, slot_offset(segment.slot_bytes, one.slot.number)
                yield Finding(*where, one.check, one.what, 1, slot.number, at, slot.namespace.epoch, slot.key)
    mine.changed_slots += len(there) - sum(there)


def _record(segment: SegmentRecord, slot: NamedSlot) -> BlockRecord:
    return BlockRecord(slot.namespace.epoch, slot.key, Slot(segment.segment, slot.number), slot.generation)


def _parts_of(home: ReadHome, mine: HomeVerdict, chosen: Sequence[int], indexes: IndexesNow) -> list[Part]:
    """Cut an engine store into parts, and note the blocks that lie where its segments have no
    slots."""
    record, blocks = home.summary.record, home.records.columns
    assert record is not None
    try:
        shape = HomeShape.of(record.fingerprint, record.description)
    except CorruptRecord as error:
        mine.problems.append(str(error))
        return []
    rows = np.array(chosen, np.int64)
    slots = of_segments(blocks.segments, {each.segment: each.slot_count for each in home.index.segments}, 0)
    is_astray = blocks.indices[rows] >= slots[rows]
    astray = [home.records[row] for row in rows[is_astray].tolist()]
    if lost_blocks := sum(indexes.still_have(home, astray)):
        mine.problems.append(f"{plural(lost_blocks, 'block')} lie where its segments have no slots")
    rows = rows[~is_astray]
    rows = rows[np.argsort(places_of(blocks)[rows], kind="stable")]
    numbers = blocks.segments[rows]
    parts = []
    for segment in home.index.segments:
        of_segment: list[int] = rows[numbers == segment.segment].tolist()
        most = max(1, PART_BYTES // max(1, segment.slot_bytes))
        for first in range(0, max(1, len(of_segment)), most):
            cut = of_segment[first : first + most]
            parts += [Part(home, shape, segment, rank, cut) for rank in range(shape.rank_count)]
    return parts


def read_parts(parts: Iterable[Part]) -> Generator[tuple[Part, PartRead]]:
    """Read parts on threads. Yields them drive by drive in turn."""
    by_drive: dict[Path | None, list[Part]] = {}
    for part in parts:
        folder = part.home.folder(part.segment.drive)
        by_drive.setdefault(folder.path.parent if folder else None, []).append(part)
    threads = min(MOST_THREADS, THREADS_PER_DRIVE * max(1, len(by_drive)))
    in_turn = [part for turn in zip_longest(*by_drive.values()) for part in turn if part is not None]
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvdisk-verify")
    try:
        yield from zip(in_turn, pool.map(read_part, in_turn), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


_of_thread = threading.local()


def _memory(slot_bytes: int) -> mmap.mmap:
    if len(getattr(_of_thread, "memory", b"")) < slot_bytes:
        _of_thread.memory = read_memory(slot_bytes)
    memory: mmap.mmap = _of_thread.memory
    return memory


def read_part(part: Part) -> PartRead:
    """Read and check the slots of a part."""
    shape, segment = part.shape, part.segment
    folder = part.home.folder(segment.drive)
    if folder is None:
        return PartRead(failed=not_named(segment.drive))
    wrong, slots = [], []
    for record in (part.home.records[row] for row in part.rows):
        group = group_of(record.key)
        known = group < len(shape.groups) and shape.groups[group].slot_bytes == segment.slot_bytes
        payload_bytes = shape.groups[group].payload_bytes if known else 0
        namespace = Namespace(shape.fingerprint, record.epoch)
        slot = NamedSlot(record.slot.index, namespace, record.key, record.generation, record.parent, payload_bytes)
        if known:
            slots.append(slot)
        else:
            what = f"slots of {segment.slot_bytes} bytes hold no blocks of KV-cache group {group}"
            wrong.append(WrongSlot(slot, "group", what))
    ranks = shape.rank_count
    spec = SegmentSpec(segment.segment, segment.slot_bytes, segment.slot_count, segment.drive, create=False)
    try:
        file = open_segment(folder, spec, part.rank, ranks, shape.fingerprint, writable=False)
    except KvdiskError as error:
        missing = isinstance(error, DeviceError) and error.errno == errno.ENOENT
        said = "there is no such file" if missing else str(error).replace(f"{folder.path}/", "")
        return PartRead(failed=said, missing=missing)
    try:
        if slots:  # so the file is as long as HOME and the index say, however large that is
            wrong += check_slots(file, ranks, slots, _memory(segment.slot_bytes))
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
    lines.add_row("Holds", f"{plural(totals['blocks'], 'block')} in {plural(len(homes), 'engine store')}{in_use}")
    rate = f" ({size(round(read_bytes / verdict.seconds))}/s)" if verdict.seconds > 0 and read_bytes else ""
    lines.add_row("Read", f"{slots}, {size(read_bytes)} in {verdict.seconds:.1f} s{rate}")
    if verdict.sample_percent is not None:
        lines.add_row("Sample", f"{verdict.sample_percent:g} % of the blocks, seed {verdict.seed}")
    if changed := totals["changed_slots"]:
        lines.add_row("Changed", f"{plural(changed, 'slot')} whose block was evicted meanwhile")
    lines.add_row("Result", _result(verdict))
    console.print(lines)
    for home in homes:
        gone = ["it was taken over or deleted meanwhile, what it held was read in part"] if home.gone else []
        for note in [*home.notes, *gone]:
            print_note(f"engine store {home.id}: {note}", console)
    wrong = [f"engine store {home.id}: {problem}" for home in homes for problem in home.problems]
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
    said += [f"{plural(problems, 'problem')} of engine stores"] if problems else []
    return text.append(", ".join(said), "bold red")


def _wrong_line(finding: Finding) -> str:
    place = (
        f"engine store {finding.home[:ID_LETTERS]} drive {finding.drive} segment {finding.segment} rank {finding.rank}"
    )
    path = f" ({finding.path})" if finding.path else ""
    if finding.slot is None:
        return f"{place}, all of its {plural(finding.slots, 'block')}: {finding.what}{path}"
    key = (finding.key or b"").hex()
    shown = key if len(key) <= _KEY_LETTERS else f"{key[:_KEY_LETTERS]}…"
    return f"{place} slot {finding.slot}: {finding.what}; key {shown}, byte {finding.offset_bytes} of {finding.path}"
