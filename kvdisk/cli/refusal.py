# SPDX-License-Identifier: Apache-2.0
"""Why a store cannot be looked into, or not be changed: one sentence on standard error, the same for every command.

A command that takes DIR... declares ``StoreDirectories``, and does what can fail inside ``refusing``.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from kvdisk.cli.wording import printable
from kvdisk.device.control import STORE_FILE
from kvdisk.errors import ConfigError, DeviceError, KvdiskError

StoreDirectories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="The store: all that store_dirs names.", readable=False)
]

NOTHING_DONE = 2
"""Exit code, of every command, where a store cannot be opened or the usage is wrong."""

_DENIED = frozenset({errno.EACCES, errno.EPERM})


def store_paths(directories: Sequence[Path]) -> list[Path]:
    """Return the directories without symbolic links on the way, as a store wants to be named."""
    return [Path(os.path.realpath(directory)) for directory in directories]


@contextmanager
def refusing(paths: Sequence[Path]) -> Iterator[None]:
    """End the command with ``NOTHING_DONE``, and the reason in one sentence, where a KvdiskError comes out of it."""
    try:
        yield
    except KvdiskError as error:
        raise refusal(why_not(error, paths)) from None


def refusal(sentence: str, code: int = NOTHING_DONE) -> typer.Exit:
    """Say one sentence, which ends in a full stop, on standard error; return what ends the command."""
    typer.echo(f"kvdisk: {printable(sentence)}", err=True)
    return typer.Exit(code)


def why_not(error: KvdiskError, paths: Sequence[Path]) -> str:
    """Say in one sentence why a store cannot be opened, and what would help. ``paths``: all that were named."""
    first = paths[0]
    if isinstance(error, DeviceError) and error.errno in _DENIED:
        return f"no permission to read {first}; run this as the user whose engine made it{_owner(first)}{_what(error)}."
    why = next(filter(None, map(_why_no_store, paths)), None)
    if why is None and isinstance(error, ConfigError) and (status := first.stat()).st_uid != os.geteuid():
        why = f"{first} belongs to user {status.st_uid}{_owner(first)}; run this as that user"
    return (why or str(error).removeprefix("store_dirs: ").rstrip(".")) + "."


def _why_no_store(path: Path) -> str | None:
    if not os.path.lexists(path):
        return f"{path} does not exist"
    if not path.is_dir():
        return f"{path} is a file, and a store is a directory"
    if os.path.lexists(path / STORE_FILE):
        return None
    around = next((parent for parent in path.parents if os.path.lexists(parent / STORE_FILE)), None)
    if around is not None:
        return f"{path} is not a kvdisk store, but a part of {around}"
    with suppress(OSError):
        if not os.listdir(path):
            return f"{path} is not a kvdisk store, it is an empty directory"
    return f"{path} is not a kvdisk store"


def _owner(path: Path) -> str:
    try:
        return f" ({pwd.getpwuid(path.stat().st_uid).pw_name})"
    except (OSError, KeyError):
        return ""


def _what(error: DeviceError) -> str:
    """Name the file that cannot be read, where it is known."""
    cause = error.__cause__
    return f"; closed to this one is {cause.filename}" if isinstance(cause, OSError) and cause.filename else ""
