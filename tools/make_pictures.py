# SPDX-License-Identifier: Apache-2.0
"""Run the commands on a store made for it; keep what they print in docs/output, and pictures of
them in docs/pictures.

Needs Chromium, or Chrome, in the PATH, and the packages of the tests. The store (600 MB) is made in
DIR, which must not exist and is removed at the end; the pages call it ``/nvme/kv``. Afterwards
``tools/make_docs.py`` puts the outputs into docs/CLI.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from demo_figures import demo_engines
from demo_store import LARGE, LLAMA_8B, SMALL, branching_block, demo_store, prompt_of
from make_docs import OUTPUT, PICTURES
from PIL import Image, ImageChops
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from support import ENVIRONMENT
from support.browser import BROWSERS, chromium
from support.s3_server import S3Server

from kvdisk.blocks import make_block_key
from kvdisk.cli.frames import FrameReader
from kvdisk.cli.top import draw
from kvdisk.cli.web.guard import Guard
from kvdisk.cli.web.questions import Asker
from kvdisk.cli.web.server import WebServer
from kvdisk.cli.web.watch import Watcher
from kvdisk.config import Config
from kvdisk.device.header import SlotIdentity, seal_slot
from kvdisk.geometry import FILE_EPOCH, Namespace
from kvdisk.remote.base import ObjectOp, RemoteObject, object_name
from kvdisk.remote.client import open_remote

COMMAND = Path(sysconfig.get_path("scripts")) / "kvdisk"
MOST_BYTES = 300_000
SCALE = 1.6
ROWS = 24
PAGE_WIDTH, PAGE_HEIGHT = 1280, 4000


# rich's own form names a font on the network.
SVG = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A command to run, and what to keep of it: its output as ``name``.txt, with ``picture`` also
    as ``name``.png.

    ``typed``: with STORE, KEY, DRIVE and TRACE for the store, a block in it, the directory it lies
    in, and a trace. Where the last word is a page (.html) that the command makes, that is the
    picture. ``columns``: of the terminal. ``copy``: on a copy that nobody owns, since it changes
    the store. ``live``: on the store of two engines under load, for so many seconds; what is on the
    terminal then is kept. ``browsed``: a page that it serves, of engines that are made up, is the
    picture, wide and narrow.
    """

    name: str
    typed: str
    columns: int = 80
    picture: bool = False
    copy: bool = False
    live: float = 0
    browsed: bool = False


SHOWN = (
    Shown("inspect", "inspect STORE", picture=True),
    Shown("inspect-1", "inspect STORE KEY"),
    Shown("inspect-2", "inspect --remote remote.json"),
    Shown("why", "why STORE --tokens prompt.json"),
    Shown("verify", "verify STORE"),
    Shown("verify-1", "verify --remote remote.json"),
    Shown("repair", "repair STORE", copy=True),
    Shown("prune", "prune STORE --older-than 1d --yes", copy=True),
    Shown("clear", "clear STORE --yes", copy=True),
    Shown("report", "report STORE -o report.html"),
    Shown("top", "top STORE", picture=True, live=25),
    Shown("web", "web STORE", browsed=True),
    Shown("check", "check kvdisk.json --model Llama-3.1-8B"),
    Shown("check-1", "check remote.json"),
    Shown("start-args", "start-args KVDISK_STORE_DIRS=/nvme/kv KVDISK_NVME_BYTES=500GiB"),
    Shown("size", "size --model Llama-3.1-8B --nvme 1TiB --cpu 64GiB --write-rate 300GB"),
    Shown("size-1", "size --model Llama-3.1-8B --prefill 4000"),
    Shown("replay", "replay TRACE"),
    Shown("bench", "bench DRIVE --model Llama-3.1-8B --prefill 4000"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=Path("/nvme/kv"), metavar="DIR", help="where to make the store")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace, for kvdisk replay")
    parser.add_argument("names", nargs="*", help="only these")
    arguments = parser.parse_args()
    store = arguments.store.absolute()
    if store.exists():
        parser.error(f"{store} exists")
    trace = arguments.trace and arguments.trace.absolute()
    wanted = [shown for shown in SHOWN if not arguments.names or shown.name in arguments.names]
    if trace is None:
        wanted = [shown for shown in wanted if "TRACE" not in shown.typed]
    for make in (demo_store, live_store, stopped_store):
        some = [shown for shown in wanted if _made_by(shown) is make]
        if some:
            with removed(store), make(store):
                for shown in some:
                    show(shown, store, trace)
    return 0


def _made_by(shown: Shown) -> Callable[[Path], AbstractContextManager[object]]:
    return stopped_store if shown.browsed else live_store if shown.live else demo_store


def stopped_store(store: Path) -> AbstractContextManager[object]:
    """Make the store to show, of which no engine is alive."""
    return demo_store(store, owned=False)


@contextmanager
def removed(path: Path) -> Iterator[None]:
    """Remove a directory at the end."""
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def live_store(store: Path) -> Iterator[None]:
    """Have two engines without a model, and with everything else real, serve requests from one
    store for a while."""
    engines = []
    try:
        for seed in (1, 2):
            options = ["--seconds", "600", "--seed", str(seed), "--model", "Qwen/Qwen2.5-0.5B-Instruct", *LIVE]
            command = [sys.executable, "-m", "support.live_process", "--store", str(store), *options]
            quiet = subprocess.DEVNULL
            engines.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=quiet, stderr=quiet))
        while len(list(store.glob("homes/*/FIGURES"))) < len(engines) and all(one.poll() is None for one in engines):
            time.sleep(0.1)
        time.sleep(WARM_S)
        if any(engine.poll() is not None for engine in engines):
            raise SystemExit(f"kvdisk: an engine has ended, try {' '.join(command)}")
        yield
    finally:
        for engine in engines:
            engine.terminate()
        for engine in engines:
            engine.wait(60)


LIVE = (
    *("--payload-bytes", "196608", "--blocks", "6000", "--cpu-blocks", "400"),
    *("--segment-blocks", "300", "--at-once", "6"),
)
WARM_S = 12.0
SETTINGS = {"nvme_bytes": "32GiB", "cpu_bytes": "8GiB"}
MODEL = "Llama-3.1-8B"


def show(shown: Shown, store: Path, trace: Path | None) -> None:
    """Make the output and the picture of one command."""
    typed = shown.typed.replace("STORE", str(store)).replace("DRIVE", str(store.parent))
    typed = typed.replace("KEY", branching_block().key.hex()[:12]).replace("TRACE", trace.name if trace else "")
    with (
        aside(store) if shown.copy else nullcontext(),
        desk(store, trace) as folder,
        bucket(folder) if "remote.json" in typed else nullcontext(),
    ):
        arguments = [str(COMMAND), *typed.split()]
        if shown.browsed:
            texts = browsed(store, folder)
        else:
            texts = watched(store, shown) if shown.live else printed(arguments, shown, folder)
        lines = [Text.from_ansi(text) for text in texts]
        said = "\n".join([f"$ kvdisk {typed}", *(line.plain.rstrip() for line in lines)])
        (OUTPUT / f"{shown.name}.txt").write_text(f"{said.rstrip()}\n")
        target = PICTURES / f"{shown.name}.png"
        made = folder / typed.split()[-1]
        if made.suffix == ".html":
            shoot(made, target, PAGE_WIDTH, PAGE_HEIGHT)
        elif shown.picture:
            svg = terminal(f"kvdisk {typed}", lines, shown.columns)
            width, height = (float(number) for number in re.findall(r"[\d.]+", svg[svg.index("viewBox") :])[2:4])
            drawn = folder / "terminal.html"
            drawn.write_text(f"<!doctype html><body style='margin:0'>{svg}")
            shoot(drawn, target, int(width), int(height))


@contextmanager
def desk(store: Path, trace: Path | None) -> Iterator[Path]:
    """Yield a directory to work in, with a model's configuration, kvdisk's own, a prompt, and the
    trace."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if trace is not None:
            (folder / trace.name).symlink_to(trace)
        (folder / "prompt.json").write_text(json.dumps([*prompt_of(branching_block()), *range(60)]))
        (folder / MODEL).mkdir()
        (folder / MODEL / "config.json").write_text(json.dumps(LLAMA_8B))
        (folder / "kvdisk.json").write_text(json.dumps(SETTINGS | {"store_dirs": str(store)}))
        yield folder


@contextmanager
def bucket(folder: Path) -> Iterator[None]:
    """Have a real S3 server with blocks of two models, and ``remote.json``, which names it."""
    server = S3Server(folder / "s3", most_volumes=200)
    server.start()
    settings = {"cpu_bytes": "8GiB", "remote": "s3://my-bucket/kv", "remote_options": server.options}
    (folder / "remote.json").write_text(json.dumps(settings))
    objects = open_remote(Config.from_mapping(settings | {"remote_deadline_s": 60}))
    try:
        for model, blocks in ((SMALL, 200), (LARGE, 60)):
            (group,), namespace = model.geometry.groups, Namespace(model.fingerprint, FILE_EPOCH)
            for number in range(blocks):
                key, batch = make_block_key(sha256(f"{model.name} {number}".encode()).digest(), 0), []
                for rank in range(model.ranks):
                    body = bytearray(os.urandom(group.slot_bytes))
                    identity = SlotIdentity(namespace, key, 1, group.payload_bytes, rank, model.ranks)
                    seal_slot(memoryview(body), identity, None)
                    batch.append(RemoteObject(object_name(namespace, key, rank, model.ranks), memoryview(body)))
                objects.submit(ObjectOp.PUT, batch)
                objects.poll(60.0)
        yield
    finally:
        objects.close()
        server.kill()


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


def printed(arguments: Sequence[str], shown: Shown, folder: Path) -> list[str]:
    """Run a command in a directory, as on a terminal of so many columns; return its lines."""
    done = subprocess.run(
        list(arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ
        | {"COLUMNS": str(shown.columns), "LINES": str(ROWS), "TERM": "xterm-256color", "FORCE_COLOR": "1"},
    )
    print(f"kvdisk: {shown.typed} ended with {done.returncode}")
    # A progress bar, where all is well.
    return f"{done.stdout}{done.stderr if done.returncode else ''}".rstrip().splitlines()


def watched(store: Path, shown: Shown) -> list[str]:
    """Look at a store for a while as ``kvdisk top`` does; return the lines of the last frame."""
    reader, end_s = FrameReader([store]), time.monotonic() + shown.live
    while time.monotonic() < end_s:
        frame = reader.read()
        time.sleep(2)
    console = Console(
        width=shown.columns, file=io.StringIO(), color_system="truecolor", force_terminal=True, markup=False
    )
    with console.capture() as text:
        console.print(draw(frame, shown.columns, height=ROWS - 1))  # under the line that was typed
    return text.get().splitlines()


def browsed(store: Path, folder: Path) -> list[str]:
    """Serve the page of two engines that have been at work for ten minutes; keep pictures of it.
    Return what the command prints."""
    now_s = [time.time() - WORK_S]
    watcher, asker = Watcher([store], 2.0, clock=lambda: now_s[0]), Asker([store])
    with demo_engines(store, [SMALL, LARGE], now_s[0]) as engines:

        def work(until_s: float) -> None:
            now_s[0] = until_s
            for engine in engines:
                engine.work(until_s)
            watcher.look()

        while now_s[0] < time.time():
            work(now_s[0] + 2)
        guard = Guard([], any_address=False, token=None)
        server = WebServer(("127.0.0.1", 0), socket.AF_INET, watcher, asker, guard)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prompt = (folder / "prompt.json").read_text()
        try:
            with chromium() as browser:
                for name, look, width, height in BROWSED:
                    seen = {"viewport": {"width": width, "height": height}, "color_scheme": look}
                    page = browser.new_page(**seen, device_scale_factor=SCALE if width < 500 else 1)
                    page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
                    page.locator("#live", has_text="Live").wait_for()
                    page.locator("#tokens").fill(prompt)
                    page.get_by_role("button", name="Follow the prompt").click()
                    page.locator(".verdict").wait_for()
                    work(time.time())
                    number = watcher.seen().number
                    while page.evaluate("state.number") < number:
                        time.sleep(0.1)
                    page.evaluate("scrollTo(0, 0)")
                    page.screenshot(path=folder / "taken.png", full_page=height == WHOLE)
                    keep(Image.open(folder / "taken.png").convert("RGB"), PICTURES / f"{name}.png", 160)
        finally:
            server.shutdown()
            server.server_close()
    return ["http://127.0.0.1:8790/"]


WORK_S = 600
WHOLE = 901
BROWSED = (("web", "light", 1280, WHOLE), ("web-narrow", "dark", 360, 1000))
"""Of the page: the picture's name, its look, its width, and its height, WHOLE for all of it."""


def terminal(typed: str, lines: Sequence[Text], columns: int) -> str:
    """Return a picture of a terminal in which a command was typed, as SVG without anything from
    elsewhere."""
    console = Console(record=True, width=columns, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    return console.export_svg(title=typed, code_format=SVG)


def shoot(page: Path, target: Path, width: int, height: int) -> None:
    """Open a page in a browser of this size, without a network; keep what is seen, less what is
    empty below it."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"kvdisk: none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken.png"
        options = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--virtual-time-budget=5000")
        own = (f"--user-data-dir={folder}/profile", "--host-resolver-rules=MAP * ~NOTFOUND")
        seen = (f"--force-device-scale-factor={SCALE}", f"--window-size={width},{height}", f"--screenshot={taken}")
        subprocess.run(
            [browser, "--headless=new", *options, *own, *seen, page.as_uri()],
            capture_output=True,
            check=True,
            timeout=120,
        )
        image = Image.open(taken).convert("RGB")
        ground = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
        used = ImageChops.difference(image, ground).getbbox()
        keep(image.crop((0, 0, image.width, min(image.height, (used[3] if used else 0) + 40))), target)


def keep(image: Image.Image, target: Path, colours: int = 64) -> None:
    """Keep a picture, in few colours."""
    image.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(target, optimize=True)
    size = target.stat().st_size
    print(f"kvdisk: {target.name} has {size} bytes")
    assert size <= MOST_BYTES, f"{target} has {size} bytes, which is too much for a repository"


if __name__ == "__main__":
    sys.exit(main())
