# SPDX-License-Identifier: Apache-2.0
"""What a program leaves on a terminal: it runs on one of our own making, which understands what rich writes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

TOKEN = re.compile(
    r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b\].*?(?:\x07|\x1b\\)|\x1b.|\r|\n|\x08|[^\x1b\r\n\x08]"
)


class Screen:
    """Rows of cells, each a letter with the colours that it was written in."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._cells: list[list[tuple[str, str]]] = []
        self._row = self._column = 0
        self._style = ""
        self._erase_below(0)

    def write(self, text: str) -> None:
        """Take what a program wrote, whole escape sequences only."""
        for found in TOKEN.finditer(text):
            said = found[0]
            if found[2]:
                self._control(found[1], found[2])
            elif said == "\r":
                self._column = 0
            elif said == "\n":
                self._next_row()
            elif said == "\x08":
                self._column = max(0, self._column - 1)
            elif not said.startswith("\x1b"):
                self._letter(said)

    def lines(self) -> list[str]:
        """Return the rows down to the last one that has something, with escape sequences for the colours."""
        rows = [
            "".join(
                f"\x1b[0{style}m{''.join(letter for letter, _ in same)}" for style, same in groupby(row, itemgetter(1))
            )
            for row in self._cells
        ]
        used = [at for at, row in enumerate(self._cells) if any(letter != " " for letter, _ in row)]
        return rows[: max(used, default=-1) + 1]

    def _letter(self, letter: str) -> None:
        if self._column >= self._columns:
            self._column = 0
            self._next_row()
        self._cells[self._row][self._column] = (letter, self._style)
        self._column += 1

    def _next_row(self) -> None:
        self._row += 1
        if self._row == self._rows:
            self._row -= 1
            self._cells = [*self._cells[1:], self._empty()]

    def _empty(self) -> list[tuple[str, str]]:
        return [(" ", "")] * self._columns

    def _erase_below(self, row: int) -> None:
        self._cells[row:] = [self._empty() for _ in range(self._rows - row)]

    def _control(self, said: str, what: str) -> None:
        if said == "?1049" and what == "h":
            self._erase("J", 2)
            self._row = self._column = 0
        if said.startswith("?"):
            return
        numbers = [int(number or 0) for number in said.split(";")]
        if what == "m":
            before = self._style if numbers[0] else ""
            self._style = before + "".join(f";{number}" for number in numbers if number)
        elif what in "JK":
            self._erase(what, numbers[0])
        else:
            self._move(what, max(1, numbers[0]), max(1, [*numbers, 1][1]))

    def _move(self, what: str, count: int, column: int) -> None:
        match what:
            case "A":
                self._row -= count
            case "B":
                self._row += count
            case "C":
                self._column += count
            case "D":
                self._column -= count
            case "G":
                self._column = count - 1
            case "H" | "f":
                self._row, self._column = count - 1, column - 1
        self._row = min(max(0, self._row), self._rows - 1)
        self._column = min(max(0, self._column), self._columns - 1)

    def _erase(self, what: str, how: int) -> None:
        if how == 2 and what == "J":
            self._erase_below(0)
        elif how == 2:
            self._cells[self._row] = self._empty()
        else:
            self._cells[self._row][self._column :] = self._empty()[self._column :]
            if what == "J":
                self._erase_below(self._row + 1)


def watch(command: Sequence[str], columns: int, rows: int, seconds: float, environment: Mapping[str, str]) -> list[str]:
    """Run a program on a terminal for so long, and return what is to be seen then. It is interrupted, and must end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    program = subprocess.Popen(
        list(command), stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment, start_new_session=True
    )
    os.close(theirs)
    written, until_s = b"", time.monotonic() + seconds
    try:
        while (left_s := until_s - time.monotonic()) > 0 and program.poll() is None:
            if select.select([ours], [], [], min(left_s, 0.2))[0]:
                try:
                    written += os.read(ours, 1 << 16)
                except OSError:  # it has ended
                    break
    finally:
        if program.poll() is None:
            program.send_signal(signal.SIGINT)
        program.wait(20)
        os.close(ours)
    screen = Screen(columns, rows)
    # The terminal's own line discipline has made each newline a return and a newline.
    screen.write(written.decode(errors="replace"))
    return screen.lines()
