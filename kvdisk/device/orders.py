# SPDX-License-Identifier: Apache-2.0
"""REQUEST and ANSWER: the files by which a command asks something of a running engine, and the
engine answers.

Both are JSON in the engine store, never synced. The engine takes a request by giving REQUEST the
name TAKEN: until then the command can withdraw it, and one of the two succeeds. It names the owner
and the time for which it is meant, so that no later owner obeys what a killed command has left.

A command that clears a full drive finds no room for a file. So there always is one of SLIP_BYTES,
which is written over: an old ANSWER becomes REQUEST where there is no room for a new one, and TAKEN
becomes ANSWER.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import is_home_id
from kvdisk.errors import CorruptRecord

REQUEST_FILE, TAKEN_FILE, ANSWER_FILE = "REQUEST", "REQUEST.taken", "ANSWER"
JSON_VERSION = 2
SLIP_BYTES = 4096
"""What each of these files takes at least: most requests and all answers fit."""
_NUMBER_LIMIT = 1 << 63
MOST_RANGES = 4096
"""Ranges in one request at most, so that an engine reads it in no time."""

Ranges = Sequence[tuple[int, int]]
"""Ranges of slots: the first slot, and how many."""


class Request(NamedTuple):
    """Asks an engine to drop blocks, and with them the segments that are empty then.

    ``home_id``: the engine store of the owner that is asked. ``asked_s``: when, in seconds since
    the Unix epoch; ``wait_s``: for how long from then on it is meant. ``everything``: drop all
    blocks, those in memory too. Otherwise drop all blocks of ``segments``, and those of ``slots``
    by segment, but none with a generation above ``generation``: it was stored since.
    """

    id: str
    home_id: str
    asked_s: float = 0.0
    wait_s: float = 0.0
    everything: bool = False
    generation: int = 0
    segments: tuple[int, ...] = ()
    slots: Mapping[int, Ranges] = {}  # never written to


class Answer(NamedTuple):
    """What an engine has done. ``bytes``: of the segments that go, over all ranks. ``waits``: their
    files go with the engine's next step, and it has taken none yet. ``why``: why it has not done
    all; None where it has."""

    id: str
    blocks: int
    segments: int
    bytes: int
    waits: bool
    why: str | None = None


def write_request(home_path: Path, request: Request) -> None:
    """Make REQUEST. The caller has seen to it that there is none. Raises OSError."""
    fields = request._asdict() | {"slots": {str(number): ranges for number, ranges in request.slots.items()}}
    encoded = _encode(fields)
    try:
        paths.replace_file(home_path / REQUEST_FILE, [encoded])
    except OSError as error:
        if error.errno not in paths.NO_ROOM or len(encoded) > SLIP_BYTES:
            raise
        try:
            _write_over(home_path / ANSWER_FILE, home_path / REQUEST_FILE, encoded)
        except FileNotFoundError:
            raise error from None


def read_request(home_path: Path, name: str = REQUEST_FILE) -> Request | None:
    """Return what REQUEST, or another file, says; None where there is none. Raises CorruptRecord,
    OSError."""
    fields = _read(home_path / name)
    if fields is None:
        return None
    try:
        slots = {
            _number(int(segment)): [(_number(first), _number(count)) for first, count in ranges]
            for segment, ranges in fields["slots"].items()
        }
        return Request(
            _id(fields["id"]),
            _id(fields["home_id"]),
            float(fields["asked_s"]),
            float(fields["wait_s"]),
            fields["everything"] is True,
            _number(fields["generation"]),
            tuple(_number(segment) for segment in fields["segments"]),
            slots,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptRecord(f"{home_path / name} does not have the fields of a request") from error


def take_request(home_path: Path) -> Request | None:
    """Take a request, which nobody can withdraw from then on; None where there is none. Raises
    CorruptRecord, OSError."""
    try:
        (home_path / REQUEST_FILE).rename(home_path / TAKEN_FILE)
    except FileNotFoundError:
        return None
    return read_request(home_path, TAKEN_FILE)


def is_taken(home_path: Path, request_id: str) -> bool:
    """Whether the engine has taken a request, and not answered it. Raises OSError."""
    with suppress(CorruptRecord):
        found = read_request(home_path, TAKEN_FILE)
        return found is not None and found.id == request_id
    return False


def withdraw(home_path: Path, request_id: str) -> bool:
    """Take a request back; return whether the engine will never see it. Raises OSError."""
    aside = home_path / f"{REQUEST_FILE}.{request_id}"
    try:
        (home_path / REQUEST_FILE).rename(aside)
    except FileNotFoundError:
        return False
    with suppress(CorruptRecord):
        found = read_request(home_path, aside.name)
        if found is not None and found.id != request_id:  # another command's, since ours was taken
            aside.rename(home_path / REQUEST_FILE)
            return False
    aside.unlink(missing_ok=True)
    return True


def write_answer(home_path: Path, answer: Answer) -> None:
    """Replace ANSWER by what becomes of TAKEN, if there is that. Raises OSError."""
    encoded = _encode(answer._asdict())
    try:
        _write_over(home_path / TAKEN_FILE, home_path / ANSWER_FILE, encoded)
    except FileNotFoundError:
        paths.replace_file(home_path / ANSWER_FILE, [encoded])


def keep_answer(home_path: Path) -> None:
    """Make ANSWER where there is no such file, nor one that becomes it; a full drive does without.
    Raises OSError."""
    if not any(os.path.lexists(home_path / name) for name in (ANSWER_FILE, TAKEN_FILE, REQUEST_FILE)):
        try:
            paths.replace_file(home_path / ANSWER_FILE, [_encode(Answer("0" * 32, 0, 0, 0, waits=False)._asdict())])
        except OSError as error:
            if error.errno not in paths.NO_ROOM:
                raise


def read_answer(home_path: Path) -> Answer | None:
    """Return what ANSWER says; None where there is none. Raises CorruptRecord, OSError."""
    fields = _read(home_path / ANSWER_FILE)
    if fields is None:
        return None
    try:
        why = fields["why"]
        blocks, segments, size = (_number(fields[name]) for name in ("blocks", "segments", "bytes"))
        said = None if why is None else str(why)
        return Answer(_id(fields["id"]), blocks, segments, size, fields["waits"] is True, said)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"{home_path / ANSWER_FILE} does not have the fields of an answer") from error


def _write_over(source: Path, target: Path, encoded: bytes) -> None:
    """Write over a file, under a name by which nobody reads it, and then give it that of
    ``target``. Raises OSError."""
    temporary = target.with_name(target.name + ".tmp")
    source.rename(temporary)
    fd = paths.open_regular(temporary, os.O_WRONLY)
    if fd < 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    try:
        if os.pwrite(fd, encoded, 0) != len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))
        os.ftruncate(fd, len(encoded))
    finally:
        os.close(fd)
    temporary.replace(target)


def _encode(fields: dict[str, Any]) -> bytes:
    return paths.encode_json({"json_version": JSON_VERSION} | fields).ljust(SLIP_BYTES)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields = paths.read_control(path)
    except FileNotFoundError:
        return None
    if fields.get("json_version") != JSON_VERSION:
        raise CorruptRecord(f"{path} is of another format")
    return fields


def _id(value: Any) -> str:
    if not (isinstance(value, str) and is_home_id(value)):
        raise ValueError
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_LIMIT:
        raise ValueError
    return value
