# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: what one engine computes, another loads at its first request.

Two engines of real vLLM with drives of their own, one after the other, share a bucket of a real S3
server (SeaweedFS), and then a real Mooncake Store; both are packages that ``make install-dev``
installs. The prompts are those of ``make demo``. The exit code is 1 where a token differs from what
vLLM alone answers, or where the second engine loads nothing from the store.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo import (
    WORK,
    Demo,
    DemoError,
    Pass,
    Rows,
    build_model,
    cut_prompts,
    draw,
    rows_of,
    wrong_tokens,
)
from engine_child import EngineError
from rich.console import Console
from rich.table import Table
from support.mooncake_store import MooncakeStore
from support.needs import why_no_mooncake
from support.s3_server import S3Server

PLACE = WORK / "hosts"
"""Emptied by each demo."""
TABLE_WIDTH = 80


def s3_settings(directory: Path) -> tuple[S3Server, dict[str, Any]]:
    """Start an S3 server; return it, and what an engine's configuration says of it."""
    server = S3Server(directory, most_volumes=1000)
    server.start()
    return server, {"remote": "s3://kvdisk-demo/kv", "remote_options": server.options}


def mooncake_settings(directory: Path) -> tuple[MooncakeStore, dict[str, Any]]:
    """Start a Mooncake Store, likewise."""
    directory.mkdir()
    store = MooncakeStore(directory, node_bytes=1 << 30)
    store.start()
    return store, {"remote": store.url}


STORES: dict[str, Callable[[Path], tuple[S3Server | MooncakeStore, dict[str, Any]]]] = {
    "S3": s3_settings,
    "Mooncake": mooncake_settings,
}


@contextmanager
def running(name: str) -> Iterator[dict[str, Any]]:
    """Have a store for a while; yield its part of a configuration."""
    server, settings = STORES[name](PLACE / name)
    try:
        yield settings
    finally:
        server.kill()


class RemoteDemo(Demo):
    """The engines and their passes, for each of ``options.stores``."""

    def run(self) -> list[Pass]:
        """Run vLLM alone, then two hosts with each store. Raises EngineError."""
        with self.start("vLLM alone", "alone", None) as engine:
            passes = [self.ask("vLLM alone", engine)]
        for name in self.options.stores:
            with running(name) as shared:
                for host in ("host A", "host B"):
                    drive = PLACE / name.lower() / host.replace(" ", "-")
                    drive.parent.mkdir(exist_ok=True)
                    own = self.config | {"store_dirs": str(drive), "remote_admission": "all", "remote_deadline_s": 60.0}
                    own["prefetch"] = False  # what is read ahead counts as a hit of memory
                    with self.start(f"{host} with {name}", f"{name} {host}", own | shared) as engine:
                        passes.append(self.ask(f"{name} {host}", engine))
        return passes


def verdict(passes: Sequence[Pass]) -> list[str]:
    """Return what is wrong with the passes, in sentences; nothing where the demo showed what it is
    for."""
    seconds = passes[2::2]
    return wrong_tokens(passes) + [
        f"In the pass '{one.name}' nothing was loaded from the remote store." for one in seconds if not one.from_remote
    ]


def table_of(passes: Sequence[Pass]) -> Table:
    """Return the table that the demo ends with."""
    loaded: Rows = [
        ("  from the remote store", lambda one: f"{one.from_remote:,}"),
        ("  from own memory, drive", lambda one: f"{one.from_cpu + one.from_nvme:,}"),
    ]
    return draw(passes, rows_of(passes, loaded))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    options = parser.parse_args()
    return argparse.Namespace(**vars(options), store=PLACE, nvme_bytes="4GiB", cpu_bytes="1GiB", kv_gib=1)


def main() -> int:
    """Run the demo and print its table; 0 when every token is right and every store was read."""
    options = parse_options()
    console = Console(highlight=False, width=TABLE_WIDTH)
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)

    def say(what: str) -> None:
        console.print(f"kvdisk: {what}")

    try:
        if "Mooncake" in options.stores and (why := why_no_mooncake()):
            options.stores.remove("Mooncake")
            say(f"without Mooncake: {why}")
            if not options.stores:
                return 1
        say("building the model")
        model = build_model()
        passes = RemoteDemo(options, model, cut_prompts(model, options.prompt_tokens), say).run()
    except (DemoError, EngineError) as failure:
        console.print(f"kvdisk: {failure}", markup=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(PLACE, ignore_errors=True)
    console.print(table_of(passes))
    console.print(
        "Host B has nothing of its own: what it loads, host A has computed and sent. TTFT is the time to the first"
        " token for those who ask a document first. The 2nd user finds it on the GPU.",
    )
    wrong = verdict(passes)
    for sentence in wrong:
        console.print(f"kvdisk: {sentence}", style="bold red", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
