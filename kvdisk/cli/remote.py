# SPDX-License-Identifier: Apache-2.0
"""Surveys and verifies a remote store, for ``kvdisk inspect`` and ``kvdisk verify``.

``RemoteSurvey`` and ``RemoteVerdict`` are what ``--json`` prints. Objects are read as engines read
them, through ``Objects``; only the tools list a bucket.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvdisk.blocks import BlockKey
from kvdisk.cli.output import (
    ID_LETTERS,
    ago,
    left,
    make_lines,
    make_table,
    number,
    plural,
    print_list,
    print_note,
    size,
)
from kvdisk.config import Config
from kvdisk.device.header import payload_checksum, read_header
from kvdisk.errors import ConfigError, CorruptRecord, GeometryMismatch, printable
from kvdisk.geometry import FILE_EPOCH, HEADER_BYTES, Namespace
from kvdisk.remote.base import ANSWERS, ObjectOp, Objects, RemoteObject, Result, object_name
from kvdisk.remote.client import SEAL_BYTES, open_listed, open_remote
from kvdisk.remote.coding import CODEC_TYPES, codec_of
from kvdisk.remote.obstore_bucket import PAGE_OBJECTS, Listed, ObstoreBucket, why_failed

FromRemote = Annotated[
    str | None,
    typer.Option("--remote", metavar="CONFIG.json|URL", help="The remote store of a configuration, or its address."),
]
JSON_VERSION = 2
_ANY_CODEC = "any"
"""The ``remote_codec`` of an address alone, which says nothing of it."""
MOST_LISTED = 200_000
"""Objects that a survey looks at, over all namespaces."""
SAMPLE = 100
SHOWN = 14
_PLACES = 16
_BATCH_BYTES, _BATCH_OBJECTS = 64 << 20, 64
_BATCH_NAMES = 256
MOST_OBJECT_BYTES = 1 << 30
"""More than any block has on a rank: a longer object is none, and is not read."""
_LEAST_DEADLINE_S = 30.0
_POLL_S = 1.0
logging.getLogger("kvdisk.remote").addHandler(logging.NullHandler())  # the commands say it themselves
_FINGERPRINT = re.compile("[0-9a-f]{64}")
MOST_SILENT = 3
"""Batches in a row without any answer, after which no more are asked for."""
_WORDS = {
    Result.LATE: "it did not come in time",
    Result.REFUSED: "it was not asked for, as others had failed",
    Result.FAILED: "reading it failed",
}


@dataclass
class RemoteNamespace:
    """What was listed of a namespace. ``objects``: a block has one for each rank. ``bytes``: as the
    store keeps them; those of coded objects are in both. Times are seconds since the Unix epoch."""

    fingerprint: str
    objects: int = 0
    bytes: int = 0
    coded_objects: int = 0
    coded_bytes: int = 0
    oldest_s: int | None = None
    newest_s: int | None = None
    is_whole: bool = True

    def add(self, page: Sequence[Listed]) -> None:
        """Count a page of a listing."""
        stored_s = [one.stored_s for one in page]
        self.objects += len(page)
        self.bytes += sum(one.size_bytes for one in page)
        coded = [one.size_bytes for one in page if codec_of(one.name)]
        self.coded_objects += len(coded)
        self.coded_bytes += sum(coded)
        self.oldest_s = min(stored_s + ([] if self.oldest_s is None else [self.oldest_s]))
        self.newest_s = max(stored_s + ([] if self.newest_s is None else [self.newest_s]))


@dataclass
class RemoteSurvey:
    """What is in a remote store. ``most_listed``: objects that are listed of a namespace at most;
    one that has more is not ``is_whole``."""

    url: str
    namespaces: list[RemoteNamespace]
    most_listed: int
    surveyed_s: int


@dataclass(frozen=True)
class WrongObject:
    """An object that no engine would use. ``check``: "read", "seal", "code", "header", or
    "checksum"."""

    name: str
    check: str
    what: str


@dataclass
class RemoteVerdict:
    """What was found in a sample of objects. ``gone``: objects that were listed, but gone before
    they were read. ``late``: objects that did not come in time, which says nothing about them.
    ``unread``: objects that were not asked for, or could not be read. ``read_bytes``: as the store
    keeps them; ``decoded_bytes``: the same with the coded ones as they were before."""

    url: str
    seed: int
    objects: int = 0
    read_bytes: int = 0
    decoded_bytes: int = 0
    gone: int = 0
    late: list[str] = field(default_factory=list)
    unread: list[WrongObject] = field(default_factory=list)
    wrong: list[WrongObject] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """Whether all objects that are there were read, and none is wrong."""
        return not (self.wrong or self.late or self.unread)


def remote_config(named: str | None, directories: Sequence[Path] | None = None) -> Config:
    """Return the configuration that ``--remote`` names, with a deadline of at least
    _LEAST_DEADLINE_S. Of an address alone the objects of every codec count. Raises ConfigError,
    also where ``directories`` are named beside it, or nothing is."""
    if named is None or directories:
        raise ConfigError("name the directories of a store, or with --remote a remote store")
    is_address = "://" in named
    # They import all that an engine is made of, which takes longer than most commands.
    from kvdisk.cli.check import read_settings
    from kvdisk.tier_settings import check_either

    config = check_either({"remote": named} if is_address else read_settings(Path(named)))
    if config.remote is None:
        raise ConfigError(f"{named} names no remote store")
    if is_address:
        config = replace(config, remote_codec=_ANY_CODEC)
    return replace(config, remote_deadline_s=max(_LEAST_DEADLINE_S, config.remote_deadline_s))


@contextmanager
def listing(config: Config) -> Iterator[ObstoreBucket]:
    """Yield a bucket to list. Raises ConfigError where the remote store is no bucket, or listing
    fails."""
    bucket = open_listed(config)
    if bucket is None:
        raise ConfigError(f"{config.remote} cannot be listed: that takes a bucket")
    try:
        yield bucket
    except Exception as error:  # whatever the client raises
        raise ConfigError(f"{config.remote} cannot be listed: {why_failed(str(error))}") from error


def _folder(fingerprint: str) -> str:
    return f"kvdisk1/{fingerprint}/"


def _fingerprints(bucket: ObstoreBucket) -> list[str]:
    return [name for name in bucket.folders("kvdisk1/") if _FINGERPRINT.fullmatch(name)]


def survey_remote(config: Config, most: int = MOST_LISTED) -> RemoteSurvey:
    """List what is there, at most ``most`` objects. Raises ConfigError."""
    with listing(config) as bucket:
        found = [RemoteNamespace(fingerprint) for fingerprint in _fingerprints(bucket)]
        most_pages = max(1, most // PAGE_OBJECTS // max(1, len(found)))
        for namespace in found:
            pages = bucket.pages(_folder(namespace.fingerprint))
            for page in islice(pages, most_pages):
                namespace.add(page)
            namespace.is_whole = next(pages, None) is None
    assert config.remote is not None
    found.sort(key=lambda one: -one.bytes)
    return RemoteSurvey(config.remote, found, most_pages * PAGE_OBJECTS, int(time.time()))


def remote_blocks(config: Config, fingerprint: str, keys: Sequence[BlockKey], parts: int) -> set[BlockKey] | None:
    """Return those of the blocks whose shards are all there, with ``remote_codec`` coded or not;
    None where the store does not answer. Decodes nothing, and needs no package of the codec's."""
    namespace, found = Namespace(bytes.fromhex(fingerprint), FILE_EPOCH), set(keys)
    codecs = [codec for name, codec in CODEC_TYPES.items() if config.remote_codec in {name, _ANY_CODEC}]
    endings = [*(codec.suffix for codec in codecs), ""]
    with closing(open_remote(replace(config, remote_codec=None))) as objects:
        blocks = max(1, _BATCH_NAMES // parts)
        for start in range(0, len(keys), blocks):
            names = {
                object_name(namespace, key, part, parts): key
                for key in keys[start : start + blocks]
                for part in range(parts)
            }
            for ending in endings:
                there = _which_exist(objects, [name + ending for name in names])
                if there is None:
                    return None
                names = {name: key for name, key in names.items() if name + ending not in there}
            found -= set(names.values())
    return found


def _which_exist(objects: Objects, names: Sequence[str]) -> set[str] | None:
    """Return the names of which there is an object; None where the store does not answer."""
    if not names:
        return set()
    objects.submit(ObjectOp.EXISTS, [RemoteObject(name) for name in names])
    while not (ended := objects.poll(_POLL_S)):
        pass
    results = ended[0].results
    if not {Result.OK, Result.ABSENT}.issuperset(results):
        return None
    return {name for name, result in zip(names, results, strict=True) if result is Result.OK}


def _sample(bucket: ObstoreBucket, count: int, choose: random.Random) -> list[Listed]:
    """Return so many objects at random: from each namespace's first page, and where that is full,
    from pages at random places, as keys are hashes."""
    found: set[Listed] = set()
    for fingerprint in _fingerprints(bucket):
        page = next(bucket.pages(_folder(fingerprint)), [])
        found.update(page)
        for _ in range(_PLACES if len(page) == PAGE_OBJECTS else 0):
            place = choose.randbytes(4).hex()
            after = f"{_folder(fingerprint)}{FILE_EPOCH}/{place[:2]}/{place}"
            found.update(next(bucket.pages(_folder(fingerprint), after), []))
    return choose.sample(sorted(found), min(count, len(found)))


def verify_remote(config: Config, count: int, seed: int) -> RemoteVerdict:
    """Read and check ``count`` objects, chosen at random by ``seed``. Raises ConfigError. Ends
    early, with what was found, on KeyboardInterrupt. Coded objects are read as they lie there, and
    decoded here."""
    assert config.remote is not None
    verdict, started_s = RemoteVerdict(config.remote, seed), time.monotonic()
    with listing(config) as bucket:
        chosen = _sample(bucket, count, random.Random(seed))  # noqa: S311 - what is read is no secret
    seal_bytes = SEAL_BYTES if config.remote_key_file else 0
    try:
        with closing(open_remote(replace(config, remote_codec=None))) as objects:
            _read_all(objects, chosen, seal_bytes, verdict)
    except KeyboardInterrupt:
        verdict.stopped = True
    verdict.seconds = round(time.monotonic() - started_s, 3)
    return verdict


def _read_all(objects: Objects, chosen: Sequence[Listed], seal_bytes: int, verdict: RemoteVerdict) -> None:
    """Read and check objects. Where some of a batch are late, they are asked for again in smaller
    batches: alone an object may come in time. Waits while the store is left alone, unless nothing
    is answered any more."""
    too_long = [one for one in chosen if one.size_bytes > MOST_OBJECT_BYTES]
    verdict.wrong += [WrongObject(one.name, "header", f"{size(one.size_bytes)} are no slot") for one in too_long]
    verdict.objects += len(too_long)
    waiting, silent = deque(_batches([one for one in chosen if one.size_bytes <= MOST_OBJECT_BYTES])), 0
    while waiting:
        some = waiting.popleft()
        if silent >= MOST_SILENT:
            verdict.late += [one.name for one in some]
            continue
        while objects.pause_s:
            time.sleep(min(_POLL_S, objects.pause_s))
        buffers = [bytearray(max(0, one.size_bytes - seal_bytes)) for one in some]
        asked = [RemoteObject(one.name, memoryview(buffer)) for one, buffer in zip(some, buffers, strict=True)]
        objects.submit(ObjectOp.GET, asked)
        while not (ended := objects.poll(_POLL_S)):
            pass
        results = ended[0].results
        silent = silent + 1 if ANSWERS.isdisjoint(results) else 0
        late = [one for one, result in zip(some, results, strict=True) if result is Result.LATE]
        if len(some) > 1 and late and silent < MOST_SILENT:
            half = -(-len(late) // 2)
            waiting.extendleft(reversed([each for each in (late[:half], late[half:]) if each]))
        else:
            verdict.late += [one.name for one in late]
        for one, buffer, result in zip(some, buffers, results, strict=True):
            if result is not Result.LATE:
                _judge(verdict, one, memoryview(buffer), result)


def _batches(chosen: Sequence[Listed]) -> Iterator[list[Listed]]:
    some: list[Listed] = []
    for one in chosen:
        is_full = sum(each.size_bytes for each in some) + one.size_bytes > _BATCH_BYTES or len(some) >= _BATCH_OBJECTS
        if some and is_full:
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def _judge(verdict: RemoteVerdict, one: Listed, body: memoryview, result: Result) -> None:
    if result is Result.ABSENT:
        verdict.gone += 1
        return
    if result in _WORDS:
        verdict.unread.append(WrongObject(one.name, "read", _WORDS[result]))
        return
    coded_by, codec = codec_of(one.name), None
    if coded_by is not None and result is Result.OK:
        try:
            codec = coded_by()
        except ConfigError:
            verdict.unread.append(WrongObject(one.name, "read", f"it is coded: install {coded_by.package}"))
            return
    verdict.objects += 1
    if result is Result.BAD:
        verdict.wrong.append(WrongObject(one.name, "seal", "its seal is not ours, or its length has changed"))
        return
    verdict.read_bytes += one.size_bytes
    if codec is not None:
        decoded = codec.decode(body, min(codec.raw_bytes_of(body) or 0, MOST_OBJECT_BYTES))
        if decoded is None:
            verdict.wrong.append(WrongObject(one.name, "code", "it cannot be decoded"))
            return
        body = decoded.data
    verdict.decoded_bytes += len(body)
    wrong = check_object(one.name.removesuffix("" if coded_by is None else coded_by.suffix), body)
    if wrong is not None:
        verdict.wrong.append(replace(wrong, name=one.name))


def check_object(name: str, body: memoryview) -> WrongObject | None:
    """Check an object as a load does: its header must name the block of the object's name, and its
    payload must have the header's checksum. Return what is wrong; None where nothing is."""
    try:
        if len(body) < HEADER_BYTES:
            raise CorruptRecord(f"slot header: {len(body)} bytes are no slot")
        block, _, checksum, kind = read_header(body[:HEADER_BYTES])
        named = object_name(block.namespace, block.key, block.rank, block.rank_count)
        if name != named:
            raise CorruptRecord(f"slot header: it is that of {named}")
        if len(body) < HEADER_BYTES + block.payload_bytes:
            raise CorruptRecord(f"slot header: {block.payload_bytes} bytes of payload, and {len(body)} bytes in all")
    except (CorruptRecord, GeometryMismatch) as error:
        return WrongObject(name, "header", str(error).removeprefix("slot header: "))
    if payload_checksum(body[HEADER_BYTES : HEADER_BYTES + block.payload_bytes], kind) != checksum:
        return WrongObject(name, "checksum", "checksum of the payload does not match")
    return None


# -- for people --------------------------------------------------------------------------------


def print_remote_survey(survey: RemoteSurvey, console: Console) -> None:
    """Print what is there, at most SHOWN namespaces."""
    lines, known = make_lines(), survey.namespaces
    lines.add_row("Remote", Text(printable(survey.url), "bold cyan"))
    more = "" if all(one.is_whole for one in known) else "more than "
    total = f"{more}{number(sum(one.objects for one in known))} objects, {size(sum(one.bytes for one in known))}"
    lines.add_row("Holds", f"{total}, in {plural(len(known), 'namespace')}" if known else "no blocks")
    if coded := sum(one.coded_objects for one in known):
        lines.add_row("Coded", f"{number(coded)} of them, {size(sum(one.coded_bytes for one in known))}")
    console.print(lines)
    if not known:
        return
    table = make_table("", console.width, left("Namespace", "magenta"), "Objects", "Bytes", "Oldest", "Newest")
    for one in known[:SHOWN]:
        mark = "" if one.is_whole else "> "
        times = (ago(one.oldest_s, survey.surveyed_s), ago(one.newest_s, survey.surveyed_s))
        table.add_row(one.fingerprint[:ID_LETTERS], f"{mark}{number(one.objects)}", f"{mark}{size(one.bytes)}", *times)
    console.print("", table, sep="\n")
    if len(known) > SHOWN:
        console.print(Text(f"{len(known) - SHOWN} more namespaces (see --json)", "dim"))
    if more:
        stopped = f"the listing stopped after {number(survey.most_listed)} objects of a namespace (>)"
        print_note(f"{stopped}, and ages are of those", console)


def print_remote_verdict(verdict: RemoteVerdict, console: Console, most: int | None) -> None:
    """Print what was found. ``most``: wrong objects that are listed at most; None for all."""
    lines = make_lines()
    lines.add_row("Remote", Text(printable(verdict.url), "bold cyan"))
    decoded = f" ({size(verdict.decoded_bytes)} decoded)" if verdict.decoded_bytes > verdict.read_bytes else ""
    took = f"{size(verdict.read_bytes)}{decoded} in {verdict.seconds:.1f} s"
    lines.add_row("Read", f"{plural(verdict.objects, 'object')}, {took}; seed {verdict.seed}")
    if verdict.gone:
        lines.add_row("Gone", f"{plural(verdict.gone, 'object')}, before they were read")
    if verdict.late:
        lines.add_row("Late", f"{plural(len(verdict.late), 'object')}: with a higher remote_deadline_s they may come")
    if verdict.unread:
        lines.add_row("Not read", f"{plural(len(verdict.unread), 'object')}: {verdict.unread[0].what}")
    stopped = "stopped before the end; " if verdict.stopped else ""
    unread = len(verdict.late) + len(verdict.unread)
    good = (
        "all that was read is good" if verdict.objects else "nothing was read" if unread else "nothing is there to read"
    )
    bad = f"{plural(len(verdict.wrong), 'object')} wrong: no engine uses them; who computes one writes it over"
    rest = f"; of {number(unread)} nothing is known" if unread else ""
    style = "bold red" if verdict.wrong else "bold yellow" if unread else "green"
    lines.add_row("Result", Text(stopped + (bad if verdict.wrong else good) + rest, style))
    console.print(lines)
    wrong = [f"{one.what}: {one.name}" for one in verdict.wrong]
    print_list("Wrong", wrong, console, most, "--all or --json lists them")
