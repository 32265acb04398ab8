# SPDX-License-Identifier: Apache-2.0
"""Reads every slot that a store's indexes name, or a sample of them, and checks it as a load does. Writes nothing.

On a store in use blocks leave while it is read, and others take their slots. So what does not match is not wrong
before the index, asked anew, still has the same record.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvdisk.cli.block_reader import RecordsNow, read_blocks
from kvdisk.cli.verify_parts import HomeToRead, Part, PartRead, parts_of, read_parts
from kvdisk.cli.wording import plural
from kvdisk.device import paths
from kvdisk.device.control import INDEX, HomeRecord, HomeSummary, read_record
from kvdisk.device.home import INDEX_FILE
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.segment import segment_path
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord
from kvdisk.geometry import slot_offset
from kvdisk.index.base import BlockRecord

_ROUNDS = 3
_MOST_SUSPECTS = 256

Watch = Callable[[int, int], None]
"""Called with the bytes that have been read, and those that are to be read in all."""


class Finding(NamedTuple):
    """Something wrong with a slot; or with a file (``check`` "file"), of whose slots ``slots`` hold blocks.

    ``check``: see ``device.verify.WrongSlot``; also "group", for a block that does not fit into its segment.
    ``path``: the file; None where its drive was not named. Of a file as a whole ``slot`` and what follows from it are
    None.
    """

    home_id: str
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
    """What was found of a home. ``blocks``: in its index, None where that cannot be read.

    ``slots``, ``bytes``: what was looked at; a block has a slot on every rank. ``changed``: slots whose block left
    meanwhile. ``problems``: of the home as a whole, sentences. ``notes``: worth knowing, and not wrong. ``gone``: it
    was taken over or deleted while it was read.
    """

    id: str
    path: Path
    alive: bool
    blocks: int | None = None
    slots: int = 0
    bytes: int = 0
    changed: int = 0
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gone: bool = False

    @property
    def wrong_slots(self) -> int:
        """Slots that must not be used."""
        return sum(finding.slots for finding in self.findings)


@dataclass
class Verdict:
    """What was found of a store. ``percent``: of the blocks were read, None: all. ``stopped``: before the end."""

    path: Path
    percent: float | None
    seed: int | None
    homes: list[HomeVerdict] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong in what was read."""
        return not any(home.findings or home.problems for home in self.homes)


def verify_store(
    directories: Sequence[Path],
    *,
    home_id: str | None = None,
    percent: float | None = None,
    seed: int = 0,
    watch: Watch = lambda _done, _total: None,
) -> Verdict:
    """Read and check. ``percent``: of each home's blocks, at random by ``seed``, at least one; None: all.

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
            verdict.homes += [mine for mine, _ in homes]
            _read_slots([(mine, _sampled(home, percent, generator)) for mine, home in homes if home], watch)
            for mine, _ in homes:
                mine.gone = not mine.path.exists()
                if mine.gone:
                    mine.problems.clear()  # such as a missing index
            if not any(mine.gone for mine, _ in homes):
                break  # else its blocks are, by now, in a home of another name
    except KeyboardInterrupt:
        verdict.stopped = True
    verdict.seconds = time.monotonic() - started_s
    return verdict


# -- homes as a whole --------------------------------------------------------------------------


def _look_at_homes(
    directories: Sequence[Path], summaries: Sequence[HomeSummary]
) -> list[tuple[HomeVerdict, HomeToRead | None]]:
    """Read the indexes, and note what is wrong with homes as a whole; None with those whose slots cannot be read."""
    boot_id = Store.open(directories, create=False).boot_id
    found = []
    for summary, index in zip(summaries, read_blocks([one.index_path for one in summaries]), strict=True):
        mine, home = HomeVerdict(summary.id, summary.path, summary.alive), None
        record = summary.record
        if record is None:
            mine.problems += _why_no_record(summary.path)
        elif index.problem is not None:
            mine.problems.append(f"its index cannot be read ({index.problem})")
        elif not index.exists:
            mine.problems += ["its index is missing"] if summary.segments and not summary.alive else []
        else:
            mine.blocks = len(index.blocks)
            _compare_index(summary, record, boot_id, mine)
            try:
                shape = HomeShape.of(record.fingerprint, record.description)
                segments = {segment.segment: segment for segment in index.segments}
                home = HomeToRead(summary.id, summary.path, shape, summary.folders, segments, index.blocks)
            except CorruptRecord as error:
                mine.problems.append(str(error))
        found.append((mine, home))
    return found


def _why_no_record(path: Path) -> Iterator[str]:
    try:
        read_record(path)
    except FileNotFoundError:
        if path.exists():
            yield "its HOME file is missing, as after an interrupted deletion; the next engine that starts removes it"
    except (CorruptRecord, OSError) as error:
        yield f"its HOME file cannot be read ({str(error).replace(f'{path}/', '')})"


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


def _sampled(home: HomeToRead, percent: float | None, generator: random.Random) -> HomeToRead:
    if percent is None or not home.blocks:
        return home
    count = min(len(home.blocks), max(1, round(len(home.blocks) * percent / 100)))
    chosen = sorted(generator.sample(range(len(home.blocks)), count))
    return home._replace(blocks=[home.blocks[position] for position in chosen])


# -- slots -------------------------------------------------------------------------------------


def _read_slots(homes: Sequence[tuple[HomeVerdict, HomeToRead]], watch: Watch) -> None:
    parts: list[Part] = []
    verdicts = {home.id: mine for mine, home in homes}
    astray: list[tuple[HomeVerdict, HomeToRead, list[BlockRecord]]] = []
    for mine, home in homes:
        of_home, lost = parts_of(home)
        parts += of_home
        astray.append((mine, home, lost))
    done_bytes, total_bytes = 0, sum(part.byte_count for part in parts)
    watch(0, total_bytes)
    suspects: list[tuple[Part, PartRead]] = []
    with closing(RecordsNow()) as now, closing(read_parts(parts)) as reads:
        for mine, home, records in astray:
            if lost_blocks := sum(now.still_there(home.path / INDEX, records)):
                mine.problems.append(f"{plural(lost_blocks, 'block')} lie where its segments have no slots")
        try:
            for part, read in reads:
                done_bytes += part.byte_count
                watch(done_bytes, total_bytes)
                verdicts[part.home.id].slots += len(part.blocks)
                verdicts[part.home.id].bytes += 0 if read.failed else part.byte_count
                if read.wrong or read.failed:
                    suspects.append((part, read))
                    if sum(len(one.wrong) for _, one in suspects) >= _MOST_SUSPECTS:
                        _judge(suspects, verdicts, now)
        finally:
            _judge(suspects, verdicts, now)
    for mine, _ in homes:
        mine.findings = _one_a_file(mine.findings)


def _judge(suspects: list[tuple[Part, PartRead]], verdicts: dict[str, HomeVerdict], now: RecordsNow) -> None:
    """Ask whether the blocks are still where they were; note as wrong what then is, and empty the list."""
    for part, read in suspects:
        mine = verdicts[part.home.id]
        folder = part.home.folder(part.segment.drive)
        path = segment_path(folder, part.segment.segment, part.rank) if folder else None
        where = (part.home.id, part.segment.drive, part.segment.segment, part.rank, path)
        records = part.records() if read.failed else [part.record_of(one.slot) for one in read.wrong]
        still = now.still_there(part.home.path / INDEX, records)
        mine.changed += len(still) - sum(still)
        if read.failed is not None:
            # Dropping a segment takes the records of its blocks, then its files, then its own record.
            if any(still) or not (records or read.missing):
                mine.findings.append(Finding(*where, "file", read.failed, sum(still)))
            continue
        for one, is_there in zip(read.wrong, still, strict=True):
            if is_there:
                number, slot_bytes = one.slot.number, part.segment.slot_bytes
                offset_bytes = slot_offset(slot_bytes, number)
                epoch, key = one.slot.namespace.epoch, one.slot.key
                mine.findings.append(Finding(*where, one.check, one.what, 1, number, offset_bytes, epoch, key))
    suspects.clear()


def _one_a_file(findings: Sequence[Finding]) -> list[Finding]:
    """Join what is said of a file as a whole, and put all in the order of where it is."""
    of_slots = [finding for finding in findings if finding.slot is not None]
    of_files: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        if finding.slot is None:
            known = of_files.get(finding[:5])
            of_files[finding[:5]] = known._replace(slots=known.slots + finding.slots) if known else finding
    return sorted([*of_files.values(), *of_slots], key=lambda one: (one.drive, one.segment, one.rank, one.slot or 0))
