# SPDX-License-Identifier: Apache-2.0
"""A process of ``kvdisk.child`` that does one thing, by name."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from kvdisk.child import ParentPipe


def echo(pipe: ParentPipe) -> None:
    """Answer each message with itself, until the parent is gone; then with "bye"."""
    with suppress(EOFError):
        while True:
            pipe.send(pipe.receive())
    with suppress(OSError):
        pipe.send("bye")


def hang(_: ParentPipe) -> None:
    """Say nothing, and hear nothing."""
    time.sleep(3600)


def complain(pipe: ParentPipe) -> None:
    """Close the pipe, and end with two lines."""
    pipe.close()
    time.sleep(0.1)
    sys.exit("not this line\nthere is no such thing")


def die(_: ParentPipe, number: int) -> None:
    """End by a signal."""
    os.kill(os.getpid(), number)


def stutter(pipe: ParentPipe) -> None:
    """Say half of a message."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.sendall((100).to_bytes(8, "big") + b"half")
    hang(pipe)


def flood(pipe: ParentPipe) -> None:
    """Say so much that the pipe is full."""
    pipe.send(os.getpid())
    with suppress(OSError):
        while True:
            pipe.send(bytes(1 << 20))


def tell(pipe: ParentPipe, name: str) -> None:
    """Say what it has: the value in its environment, its descriptors, and its session."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = []
    for link in links:
        with suppress(OSError):
            files.append(os.readlink(link))
    pipe.send((os.environ.get(name), files, os.getsid(0), signal.getsignal(signal.SIGTERM) is signal.SIG_IGN))


def main(descriptor: int, parent: int, act: str, *arguments: Any) -> None:
    """Be the child."""
    globals()[act](ParentPipe(descriptor, parent), *arguments)
