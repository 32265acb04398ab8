# SPDX-License-Identifier: Apache-2.0
"""Run the commands on a store made for it; keep what they print in docs/output, and pictures of them in docs/pictures.

Needs Chromium, or Chrome, in the PATH, and the packages of the tests. The store (600 MB) is made in DIR, which must not
exist and is removed at the end; the pages call it ``/nvme/kv``. Afterwards ``tools/make_docs.py`` puts the outputs into
docs/CLI.md. Commands that this kvdisk does not have are left out, and said.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo_store import demo_store
from make_docs import DOCS, OUTPUT, commands
from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COMMAND = Path(sysconfig.get_path("scripts")) / "kvdisk"
PICTURES = DOCS / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_BYTES = 300_000
SCALE = 2


def _rgb(colours: str) -> list[tuple[int, int, int]]:
    """Read colours, six hex digits each."""
    found = [bytes.fromhex(colour) for colour in colours.split()]
    return [(red, green, blue) for red, green, blue in found]


THEME = TerminalTheme(
    *_rgb("1e212b d6dae4"),
    _rgb("454b5e f07178 98ce76 eebe62 68a0f8 c68cf0 54c8cd bcc2d0"),
    _rgb("626a82 ff8b92 b4e394 ffd682 8cb9ff dcaaff 78e1e4 ecedf6"),
)
# In the form that rich fills in; its own names a font on the network.
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
.{unique_id}-matrix {{
  font-family: "DejaVu Sans Mono", monospace; font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-family: "DejaVu Sans", sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Shown:
    """A command to run: what is typed, with STORE for the store's directory; the name of its output and picture.

    ``columns``: of the terminal. ``picture``: whether there is one. ``copy``: on a copy that nobody owns, since it
    changes the store. ``made``: a page that the command makes, to be shown in place of what it prints.
    """

    name: str
    typed: str
    columns: int = 100
    picture: bool = False
    copy: bool = False
    made: str = ""
    answer: str = ""

    @property
    def command(self) -> str:
        """Its first word."""
        return self.typed.split()[0]


SHOWN = (
    Shown("inspect", "inspect STORE", columns=100, picture=True),
    Shown("repair", "repair STORE", copy=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=Path("/nvme/kv"), metavar="DIR", help="where to make the store")
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    store = arguments.store.absolute()
    if store.exists():
        parser.error(f"{store} exists")
    known = {name for name, _ in commands()}
    OUTPUT.mkdir(exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    with removed(store), demo_store(store):
        for shown in SHOWN:
            if shown.command not in known:
                print(f"kvdisk: there is no command {shown.command}, so nothing is made for it")
            elif not arguments.names or shown.name in arguments.names:
                show(shown, store)
    return 0


@contextmanager
def removed(path: Path) -> Iterator[None]:
    """Remove a directory at the end."""
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


def show(shown: Shown, store: Path) -> None:
    """Make the output and the picture of one command."""
    if shown.copy:
        with aside(store):
            lines = printed(shown, store)
    else:
        lines = printed(shown, store)
    typed = "kvdisk " + shown.typed.replace("STORE", str(store))
    text = "\n".join(line.plain.rstrip() for line in lines).strip("\n")
    (OUTPUT / f"{shown.name}.txt").write_text(f"$ {typed}\n{text}\n")
    if shown.picture:
        draw(terminal(typed, lines, shown.columns), PICTURES / f"{shown.name}.png")


@contextmanager
def aside(store: Path) -> Iterator[None]:
    """Put a copy of the store, which nobody owns, into its place for a while."""
    kept = store.with_name(store.name + ".kept")
    store.rename(kept)
    try:
        shutil.copytree(kept, store)
        yield
    finally:
        shutil.rmtree(store, ignore_errors=True)
        kept.rename(store)


def printed(shown: Shown, store: Path) -> list[Text]:
    """Run a command as on a terminal of so many columns; return its lines."""
    arguments = [word.replace("STORE", str(store)) for word in shown.typed.split()]
    environment = {"COLUMNS": str(shown.columns), "LINES": "60", "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        [str(COMMAND), *arguments],
        input=shown.answer,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    print(f"kvdisk: {shown.typed} ended with {done.returncode}")
    return [Text.from_ansi(line) for line in done.stdout.rstrip().splitlines()]


def terminal(typed: str, lines: Sequence[Text], columns: int) -> str:
    """Return a picture of a terminal in which a command was typed, as SVG without anything from elsewhere."""
    console = Console(record=True, width=columns, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    return console.export_svg(title=typed, theme=THEME, code_format=SVG, unique_id="shown")


def draw(svg: str, target: Path) -> None:
    """Draw an SVG with a browser into a PNG of few colours."""
    width, height = (float(number) for number in re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2])
    shoot(f"<!doctype html><body style='margin:0'>{svg}", target, int(width), int(height))


def shoot(page: str, target: Path, width: int, height: int) -> None:
    """Open a page of HTML in a browser of this size, without a network, and keep what is seen."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"kvdisk: none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        source, taken = Path(folder) / "page.html", Path(folder) / "taken.png"
        source.write_text(page)
        options = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--virtual-time-budget=5000")
        own = (f"--user-data-dir={folder}/profile", "--host-resolver-rules=MAP * ~NOTFOUND")
        seen = (f"--force-device-scale-factor={SCALE}", f"--window-size={width},{height}", f"--screenshot={taken}")
        subprocess.run(
            [browser, "--headless=new", *options, *own, *seen, source.as_uri()],
            capture_output=True,
            check=True,
            timeout=120,
        )
        few = Image.open(taken).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        few.save(target, optimize=True)
    size = target.stat().st_size
    print(f"kvdisk: {target.name} has {size} bytes")
    assert size <= MOST_BYTES, f"{target} has {size} bytes, which is too much for a repository"


if __name__ == "__main__":
    sys.exit(main())
