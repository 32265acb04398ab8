# SPDX-License-Identifier: Apache-2.0
"""The process of an index, as in a container: a process of the same number, in another container,
has the index open when this one opens it. Each file in a directory beside the index is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdisk.index import child_main
from kvdisk.index.child_main import Server

NAMESAKES = "namesakes"
_HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""
"""What LMDB does for a reader: it locks the byte of its number, for as long as it lives."""
_others: list[subprocess.Popen[bytes]] = []


class NamesakeServer(Server):
    """See the module."""

    def open(self, path: str, map_bytes: int) -> Iterator[int]:
        _meet(path)
        return super().open(path, map_bytes)

    def find(self, path: str, keys: Any) -> Iterator[Any]:
        _meet(path)
        return super().find(path, keys)

    def read(self, path: str) -> Iterator[Any]:
        _meet(path)
        return super().read(path)


def _meet(path: str) -> None:
    for left in list((Path(path).parent / NAMESAKES).glob("*"))[:1]:
        left.unlink()
        command = [sys.executable, "-c", _HOLD, str(Path(path) / "lock.mdb"), str(os.getpid())]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        _others.append(other)  # each ends when its stdin is closed: with this process


def main(descriptor: int, parent: int) -> None:
    """Be the child."""
    child_main.main(descriptor, parent, NamesakeServer)
