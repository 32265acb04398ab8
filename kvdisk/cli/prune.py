# SPDX-License-Identifier: Apache-2.0
"""What a store has that could go, and the deletion of what shall: homes whole, or segments and blocks of them.

Nothing is deleted of a home that has an owner: that is looked at when the plan is made, and again, under the home's
lock, when it is carried out.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.cli.block_reader import IndexBlocks, read_blocks, unpack
from kvdisk.cli.prune_plan import HomePlan, Stocked
from kvdisk.cli.wording import plural
from kvdisk.device import paths
from kvdisk.device.control import DriveName, HomeSummary
from kvdisk.device.drives import list_folders
from kvdisk.device.home import index_is_sound
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, KvdiskError, StoreLocked
from kvdisk.recovery import cut_home


@dataclass
class Stocktaking:
    """A store as it is. ``loose_bytes``: of folders on further drives that no home names, as a crash leaves them."""

    store: Store
    homes: list[Stocked] = field(default_factory=list)
    loose_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """What the file systems hold for all of it."""
        return sum(home.allocated_bytes for home in self.homes) + self.loose_bytes


class Outcome(NamedTuple):
    """How the deletion of a home, or of a part of it, ended.

    ``result``: "deleted", "in use" (an engine has come), "gone" (an engine has taken it over, or it was deleted) or
    "failed"; ``why`` says more then.
    """

    plan: HomePlan
    result: str
    why: str = ""


def take_stock(directories: Sequence[Path], *, with_blocks: bool) -> Stocktaking:
    """Look at all homes; ``with_blocks``: and into their indexes. Writes nothing. Raises as ``list_homes``."""
    stock = Stocktaking(Store.open(directories, create=False))
    summaries = list_homes(directories)
    indexes = (
        read_blocks([summary.index_path for summary in summaries])
        if with_blocks
        else [IndexBlocks(problem="not looked at")] * len(summaries)
    )
    for summary, index in zip(summaries, indexes, strict=True):
        with paths.device_errors(f"reading home {summary.id}"):
            stock.homes.append(_stocked(stock.store, summary, index))
    named = {name for summary in summaries if summary.record for name in summary.record.drives}
    if all(summary.record for summary in summaries if summary.alive):  # else they may be that one's own
        stock.loose_bytes = sum(_allocated(path) for name, path in _folders(stock.store).items() if name not in named)
    return stock


def _folders(store: Store) -> dict[DriveName, Path]:
    return list_folders(store.drives)


def _allocated(path: Path) -> int:
    with paths.device_errors(f"measuring {path}"):
        return paths.allocated_bytes(path)


def _stocked(store: Store, summary: HomeSummary, index: IndexBlocks) -> Stocked:
    segment_bytes: dict[int, int] = {}
    for file in summary.segments:
        segment_bytes[file.segment] = segment_bytes.get(file.segment, 0) + file.allocated_bytes
    readable = index.problem is None and (index.exists or not summary.segments)
    return Stocked(
        id=summary.id,
        record=summary.record,
        alive=summary.alive,
        allocated_bytes=summary.allocated_bytes,
        blocks=[unpack(packed) for packed in index.blocks] if readable else None,
        segment_bytes=segment_bytes,
        slot_bytes={segment.segment: segment.slot_bytes for segment in index.segments},
        why_whole=_why_whole(store, summary, index),
    )


def _why_whole(store: Store, summary: HomeSummary, index: IndexBlocks) -> str:
    """Say why a home without an owner cannot be cut; "" where it can."""
    why = ""
    if summary.record is None:
        why = "its HOME file cannot be read"
    elif index.problem is not None or not index.exists:
        why = f"its index cannot be read ({index.problem or 'it is missing'})"
    elif not summary.alive:
        try:
            lost = summary.segments and not index.segments
            if lost or not index_is_sound(summary.index_path, summary.record, store.boot_id):
                why = "its index is not to be trusted before kvdisk repair has made it anew"
            HomeShape.of(summary.record.fingerprint, summary.record.description)
        except CorruptRecord as error:
            why = str(error)
        except OSError as error:
            why = f"its index cannot be read ({error.strerror})"
    return why


def check_drives(store: Store, homes: Sequence[Stocked]) -> None:
    """Raise ConfigError where one of these homes has a part on a drive whose directory was not named."""
    for home in homes:
        if home.record is not None and None in store.folders(home.id, home.record):
            raise ConfigError(
                f"home {home.id} has a part on a drive that was not named; name all directories of the store."
            )


def find_namespace(homes: Sequence[Stocked], wanted: str) -> bytes:
    """Return the fingerprint that begins with ``wanted`` in hex, or whose model has that name, or that last part of it.

    Raises ConfigError where there is none, or more than one.
    """
    described: dict[bytes, dict[str, Any]] = {}
    for home in sorted(homes, key=lambda home: home.last_use_s):
        if home.record is not None:
            described[home.record.fingerprint] = home.record.description
    names = {fingerprint: str(description.get("model", "")) for fingerprint, description in described.items()}
    found = [fingerprint for fingerprint in names if wanted and fingerprint.hex().startswith(wanted.lower())]
    found = found or [fingerprint for fingerprint, name in names.items() if wanted and name == wanted]
    found = found or [one for one, name in names.items() if wanted and name.rstrip("/").rpartition("/")[2] == wanted]
    if not found:
        raise ConfigError(f"no namespace of this store begins with, or is of a model named, {wanted}.")
    if len(found) > 1:
        listed = ", ".join(f"{one.hex()[:12]} ({names[one]})" for one in sorted(found))
        raise ConfigError(f"{wanted} stands for more than one namespace: {listed}.")
    return found[0]


def carry_out(store: Store, homes: Sequence[HomePlan]) -> list[Outcome]:
    """Delete the folders that no home names, and then what is planned, home by home. Raises StoreLocked, DeviceError.

    That raises before anything is deleted; what is wrong with one home is its outcome.
    """
    store.tidy()
    return [_delete(store, plan) for plan in homes]


def _delete(store: Store, plan: HomePlan) -> Outcome:
    home_id = plan.home.id
    try:
        if plan.whole:
            gone = store.remove_home(home_id)
            return Outcome(plan, "deleted") if gone else Outcome(plan, "failed", "not all of it could be removed")
        held = store.hold_home(home_id)
        done = False
        try:
            cut_home(held, plan.keys, plan.segments)
            done = True
        finally:
            held.close(clean=done, used=False)
    except StoreLocked:
        return Outcome(plan, "in use", "an engine owns it by now")
    except DeviceError as error:
        if error.errno == errno.ENOENT:
            return Outcome(plan, "gone", "an engine has taken it over, or it was deleted, meanwhile")
        return Outcome(plan, "failed", str(error))
    except KvdiskError as error:
        return Outcome(plan, "failed", str(error))
    return Outcome(plan, "deleted")


def parts_of_plan(plan: HomePlan) -> str:
    """Say what goes of a home."""
    if plan.whole:
        return "all"
    said = []
    if plan.segments:
        said.append(f"{len(plan.segments)} of {plural(len(plan.home.segment_bytes), 'segment')}")
    if plan.keys:
        said.append(plural(len(plan.keys), "other block" if said else "block"))
    return ", ".join(said)
