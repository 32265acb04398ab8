# SPDX-License-Identifier: Apache-2.0
"""What is in a remote store, and whether that is whole: for ``kvdisk inspect`` and ``verify``.

``RemoteSurvey`` and ``RemoteVerdict`` are what ``--json`` prints. Objects are read as engines do,
through ``Objects``; only the tools list.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvdisk.assembly import check_settings, open_remote
from kvdisk.blocks import BlockKey
from kvdisk.cli.check import read_settings
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
from kvdisk.errors import ConfigError, CorruptRecord, GeometryMismatch
from kvdisk.geometry import FILE_EPOCH, HEADER_BYTES, Namespace
from kvdisk.remote.base import ObjectOp, RemoteObject, Result, object_name
from kvdisk.remote.client import SEAL_BYTES
from kvdisk.remote.s3 import PAGE_OBJECTS, SCHEMES, Listed, S3Bucket, why_failed

FromRemote = Annotated[
    str | None,
    typer.Option("--remote", metavar="CONFIG.json|URL", help="The remote store of a configuration, or its address."),
]
JSON_VERSION = 1
MOST_LISTED = 200_000
"""Objects that a survey looks at, over all namespaces."""
SAMPLE = 100
SHOWN = 14
_PLACES = 16
_BATCH_BYTES = 64 << 20
_BATCH_BLOCKS = 256
_LEAST_DEADLINE_S = 30.0
_POLL_S = 1.0
logging.getLogger("kvdisk.remote").addHandler(logging.NullHandler())  # the commands say it themselves
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_WORDS = {
    Result.BAD: "its seal is not ours, or its length has changed",
    Result.LATE: "it did not come in time",
    Result.REFUSED: "it was not asked for, as others had failed",
    Result.FAILED: "it cannot be read",
}


@dataclass
class RemoteNamespace:
    """What a namespace has there, of what was listed. ``objects``: a block has one for each rank.
    Seconds since 1970."""

    fingerprint: str
    objects: int = 0
    bytes: int = 0
    oldest_s: int | None = None
    newest_s: int | None = None
    is_whole: bool = True

    def add(self, page: Sequence[Listed]) -> None:
        """Count a page of a listing."""
        stored_s = [one.stored_s for one in page]
        self.objects += len(page)
        self.bytes += sum(one.size_bytes for one in page)
        self.oldest_s = min(stored_s + ([] if self.oldest_s is None else [self.oldest_s]))
        self.newest_s = max(stored_s + ([] if self.newest_s is None else [self.newest_s]))


@dataclass
class RemoteSurvey:
    """What is in a remote store. ``most_listed``: of a namespace; one that has more is not
    ``is_whole``."""

    url: str
    namespaces: list[RemoteNamespace]
    most_listed: int
    surveyed_s: int


@dataclass(frozen=True)
class WrongObject:
    """An object that no engine would use. ``check``: "read", "seal", "header", or "checksum"."""

    name: str
    check: str
    what: str


@dataclass
class RemoteVerdict:
    """What was found of so many objects. ``gone``: of those that were listed, before they were
    read."""

    url: str
    seed: int
    objects: int = 0
    read_bytes: int = 0
    gone: int = 0
    wrong: list[WrongObject] = field(default_factory=list)
    seconds: float = 0.0
    stopped: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong in what was read."""
        return not self.wrong


def remote_config(named: str | None, directories: Sequence[Path] | None = None) -> Config:
    """Return the configuration that ``--remote`` names, with patience. Raises ConfigError, also
    where ``directories`` are named beside it, or nothing is."""
    if named is None or directories:
        raise ConfigError("name the directories of a store, or with --remote a remote store")
    config = check_settings({"remote": named} if "://" in named else read_settings(Path(named)))
    if config.remote is None:
        raise ConfigError(f"{named} names no remote store")
    return replace(config, remote_deadline_s=max(_LEAST_DEADLINE_S, config.remote_deadline_s))


@contextmanager
def listing(config: Config) -> Iterator[S3Bucket]:
    """Yield a bucket to list. Raises ConfigError where it is none, or fails."""
    assert config.remote is not None
    if config.remote.partition("://")[0] not in SCHEMES:
        raise ConfigError(f"{config.remote} cannot be listed: that takes a bucket")
    bucket = S3Bucket(config.remote, dict(config.remote_options), deadline_s=config.remote_deadline_s)
    try:
        yield bucket
    except Exception as error:  # whatever the client raises
        raise ConfigError(f"{config.remote} cannot be listed: {why_failed(str(error))}") from error


def _folder(fingerprint: str) -> str:
    return f"kvdisk1/{fingerprint}/"


def _fingerprints(bucket: S3Bucket) -> list[str]:
    return [name for name in bucket.folders("kvdisk1/") if _FINGERPRINT.fullmatch(name)]


def survey_remote(config: Config, most: int = MOST_LISTED) -> RemoteSurvey:
    """List what is there, at most so many objects. Raises ConfigError."""
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
    """Return those blocks of which all parts are there; None where the store does not answer."""
    namespace, found = Namespace(bytes.fromhex(fingerprint), FILE_EPOCH), set(keys)
    with closing(open_remote(config)) as objects:
        for start in range(0, len(keys), _BATCH_BLOCKS):
            some = [(key, part) for key in keys[start : start + _BATCH_BLOCKS] for part in range(parts)]
            asked = [RemoteObject(object_name(namespace, key, part, parts)) for key, part in some]
            objects.submit(ObjectOp.EXISTS, asked)
            while not (ended := objects.poll(_POLL_S)):
                pass
            results = ended[0].results
            if not {Result.OK, Result.ABSENT}.issuperset(results):
                return None
            found -= {key for (key, _), result in zip(some, results, strict=True) if result is Result.ABSENT}
    return found


def _sample(bucket: S3Bucket, count: int, choose: random.Random) -> list[Listed]:
    """Return so many objects at random: of each namespace from its first page, and where that is
    full, from pages at random places, as keys are hashes."""
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
    """Read and check so many objects, at random by ``seed``. Raises ConfigError. Ends early, with
    what was found, on KeyboardInterrupt."""
    assert config.remote is not None
    verdict, started_s = RemoteVerdict(config.remote, seed), time.monotonic()
    with listing(config) as bucket:
        chosen = _sample(bucket, count, random.Random(seed))  # noqa: S311 - what is read is no secret
    seal_bytes = SEAL_BYTES if config.remote_key_file else 0
    try:
        with closing(open_remote(config)) as objects:
            for some in _batches(chosen):
                buffers = [bytearray(max(0, one.size_bytes - seal_bytes)) for one in some]
                objects.submit(
                    ObjectOp.GET,
                    [RemoteObject(one.name, memoryview(buffer)) for one, buffer in zip(some, buffers, strict=True)],
                )
                while not (ended := objects.poll(_POLL_S)):
                    pass
                for one, buffer, result in zip(some, buffers, ended[0].results, strict=True):
                    _judge(verdict, one, buffer, result)
    except KeyboardInterrupt:
        verdict.stopped = True
    verdict.seconds = round(time.monotonic() - started_s, 3)
    return verdict


def _batches(chosen: Sequence[Listed]) -> Iterator[list[Listed]]:
    some: list[Listed] = []
    for one in chosen:
        if some and sum(each.size_bytes for each in some) + one.size_bytes > _BATCH_BYTES:
            yield some
            some = []
        some.append(one)
    if some:
        yield some


def _judge(verdict: RemoteVerdict, one: Listed, body: bytearray, result: Result) -> None:
    if result is Result.ABSENT:
        verdict.gone += 1
        return
    verdict.objects += 1
    if result is not Result.OK:
        check = "seal" if result is Result.BAD else "read"
        verdict.wrong.append(WrongObject(one.name, check, _WORDS[result]))
        return
    verdict.read_bytes += one.size_bytes
    wrong = check_object(one.name, memoryview(body))
    if wrong is not None:
        verdict.wrong.append(wrong)


def check_object(name: str, body: memoryview) -> WrongObject | None:
    """Check an object as a load does: its header, whose block must be that of the name, and its
    checksum."""
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
    lines.add_row("Remote", Text(survey.url, "bold cyan"))
    more = "" if all(one.is_whole for one in known) else "more than "
    total = f"{more}{number(sum(one.objects for one in known))} objects, {size(sum(one.bytes for one in known))}"
    lines.add_row("Holds", f"{total}, in {plural(len(known), 'namespace')}" if known else "no blocks")
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
    """Print what was found."""
    lines = make_lines()
    lines.add_row("Remote", Text(verdict.url, "bold cyan"))
    took = f"{size(verdict.read_bytes)} in {verdict.seconds:.1f} s"
    lines.add_row("Read", f"{plural(verdict.objects, 'object')}, {took}; seed {verdict.seed}")
    if verdict.gone:
        lines.add_row("Gone", f"{plural(verdict.gone, 'object')}, before they were read")
    stopped = "stopped before the end; " if verdict.stopped else ""
    good = "all that was read is good" if verdict.objects else "nothing is there to read"
    bad = f"{plural(len(verdict.wrong), 'object')} wrong: no engine uses them; delete them, and they are sent again"
    lines.add_row("Result", Text(stopped + (good if verdict.ok else bad), "green" if verdict.ok else "bold red"))
    console.print(lines)
    wrong = [f"{one.what}: {one.name}" for one in verdict.wrong]
    print_list("Wrong", wrong, console, most, "--all or --json lists them")
