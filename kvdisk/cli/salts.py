# SPDX-License-Identifier: Apache-2.0
"""``kvdisk inspect DIR --salts``: what each tenant has in a store, by the digest of its
``cache_salt``. ``--json`` prints a ``SaltSurvey``.

Only blocks on the drive are counted. The memory of an engine and a remote store do not say whose a
block is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from kvdisk.blocks import Tier
from kvdisk.cli.indexes import HomeColumns, index_problems, join, read_homes
from kvdisk.cli.output import ago, left, make_lines, make_table, number, plural, print_list, printable, size
from kvdisk.device import paths
from kvdisk.device.control import SALT_KEY_FILE, read_salt_key
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError
from kvdisk.salts import SaltDigests, digest_text

FROM_INPUT = "-"
"""The argument that stands for a salt on standard input, so that no list of processes shows it."""


@dataclass(frozen=True)
class SaltBlocks:
    """The blocks of one tenant, in all engine stores together. ``digest``: 16 hex digits; null for
    the blocks that have none. ``tiers``: bytes by tier, as far as a store says. Times are whole
    seconds since the Unix epoch; null where there is no block, or where it was not used since it
    was stored."""

    digest: str | None
    blocks: int
    bytes: int
    tiers: dict[str, int]
    engine_stores: int
    oldest_stored_s: int | None
    newest_stored_s: int | None
    last_use_s: int | None


@dataclass(frozen=True)
class SaltSurvey:
    """What ``inspect --salts`` prints. ``salts``: most bytes first. ``without``: the blocks without
    a digest. ``asked``: the blocks of the salt that was given with ``--salt``."""

    path: Path
    surveyed_s: int
    salts: tuple[SaltBlocks, ...]
    without: SaltBlocks
    asked: SaltBlocks | None
    problems: tuple[str, ...]


def digest_of(store_path: Path, salt: str) -> int:
    """Return a salt's digest in a store; ``FROM_INPUT`` stands for the salt on standard input.
    Raises ConfigError, CorruptRecord, DeviceError."""
    if salt == FROM_INPUT:
        salt = sys.stdin.readline().rstrip("\r\n")
    if not salt:
        raise ConfigError("an empty salt is no salt, and no block has its digest.")
    with paths.device_errors(f"reading {store_path / SALT_KEY_FILE}"):
        key = read_salt_key(store_path)
    if key is None:
        raise ConfigError(
            f"{store_path} has no {SALT_KEY_FILE}, so no block in it has the digest of a salt: no engine has used it "
            "since kvdisk keeps them, or it is a copy without that file."
        )
    return SaltDigests(key).of(salt)


def survey_salts(directories: Sequence[Path], salt: str | None = None) -> SaltSurvey:
    """Count the blocks of each tenant. Raises ConfigError, CorruptRecord, DeviceError."""
    store = Store.open(directories, create=False)
    asked = None if salt is None else digest_of(store.path, salt)
    homes = read_homes(directories)
    readable = [home.blocks for home in homes if home.blocks is not None]
    blocks = join(readable)
    owners = np.repeat(np.arange(len(readable)), [len(one.columns.keys) for one in readable])
    digests, at = np.unique(blocks.columns.tenants, return_inverse=True)
    order = np.argsort(at, kind="stable")
    rows_of = np.split(order, np.cumsum(np.bincount(at, minlength=len(digests)))[:-1]) if len(digests) else []
    found = {
        digest: _count(blocks, rows, owners, digest) for digest, rows in zip(digests.tolist(), rows_of, strict=True)
    }
    nothing = np.zeros(0, np.int64)
    without = found.pop(0, None) or _count(blocks, nothing, owners, 0)
    return SaltSurvey(
        store.path,
        int(time.time()),
        tuple(sorted(found.values(), key=lambda one: (-one.bytes, one.digest))),
        without,
        None if asked is None else found.get(asked) or _count(blocks, nothing, owners, asked),
        index_problems(homes),
    )


def _count(blocks: HomeColumns, rows: NDArray[np.int64], owners: NDArray[np.int64], digest: int) -> SaltBlocks:
    stored_s, last_use_s = blocks.columns.stored_s[rows], blocks.last_use_s[rows]
    count_bytes = int(blocks.slot_bytes[rows].sum())
    return SaltBlocks(
        digest_text(digest) if digest else None,
        len(rows),
        count_bytes,
        {Tier.NVME.label: count_bytes},
        len(np.unique(owners[rows])),
        int(stored_s.min()) if len(rows) else None,
        int(stored_s.max()) if len(rows) else None,
        int(last_use_s.max(initial=0)) or None,
    )


def print_salts(survey: SaltSurvey, console: Console, most: int | None) -> None:
    """Print a survey, at most ``most`` tenants. ``console`` must not read markup."""
    lines, without = make_lines(), survey.without
    lines.add_row("Store", Text(printable(survey.path), "bold cyan"))
    held = sum(one.bytes for one in survey.salts)
    lines.add_row("Salts", f"{plural(len(survey.salts), 'salt')} with {size(held)}")
    lines.add_row(
        "Without", f"{plural(without.blocks, 'block')}, {size(without.bytes)}: of no salt, or not known whose"
    )
    if (asked := survey.asked) is not None:
        said = f"{plural(asked.blocks, 'block')}, {size(asked.bytes)}"
        lines.add_row("Asked", Text.assemble((asked.digest or "", "magenta"), f": {said}"))
    console.print(lines)
    print_list("Problems", survey.problems, console, None, "")
    if survey.salts:
        table = make_table("", console.width, left("Digest", "magenta"), "Blocks", "Bytes", "Engine stores", "Last use")
        for one in survey.salts[:most]:
            used = "never" if one.last_use_s is None else ago(one.last_use_s, survey.surveyed_s)
            table.add_row(one.digest, number(one.blocks), size(one.bytes), number(one.engine_stores), used)
        if most is not None and len(survey.salts) > most:
            table.add_row("", Text(f"{len(survey.salts) - most} more (see --all)", "dim"))
        console.print("", table, sep="\n")
