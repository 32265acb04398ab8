# SPDX-License-Identifier: Apache-2.0
"""How much room a tier has: given in blocks, in percent of the trace's distinct blocks, or in
bytes.

Room is what a tier holds when no step is under way. The NVMe tier keeps some of its slots free for
the next step (``spare_slots``): room in blocks or percent comes without them, so that policies are
compared at the same room; of room in bytes they are taken off, as are segment headers and the
index, so that it is what ``nvme_bytes`` would hold.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from kvdisk.cli.replay.trace import Trace
from kvdisk.cli.size import fit_nvme
from kvdisk.config import parse_bytes
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry
from kvdisk.manager.nvme import spare_slots

_COUNT = re.compile(r"\s*(\d+)\s*(?:blocks?)?\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_MOST_BLOCKS = 1 << 31


@dataclass(frozen=True)
class Room:
    """One tier's room. ``blocks``: it holds between steps; 0: there is no tier. ``slots``: it
    has."""

    given: str
    blocks: int
    slots: int


def split(texts: list[str]) -> list[str]:
    """Return what options name that are given several times, or with commas, each once; not within
    parentheses."""
    return list(dict.fromkeys(part.strip() for text in texts for part in re.split(r",(?![^(]*\))", text)))


def parse_room(option: str, text: str, trace: Trace, geometry: Geometry, *, on_nvme: bool) -> Room:
    """Read a room such as ``5%``, ``20000`` (blocks) or ``500GiB``. Raises ConfigError."""
    if count := _COUNT.fullmatch(text):
        blocks = int(count[1]) if len(count[1]) < 12 else _MOST_BLOCKS
    elif percent := _PERCENT.fullmatch(text):
        share = float(percent[1])
        blocks = int(trace.distinct * share / 100)
        if share and not blocks:
            raise ConfigError(f"{option} {text}: that is not a whole block of {trace.distinct} distinct ones.")
    else:
        slots = _slots_in(option, text, geometry, on_nvme=on_nvme)
        return Room(text, slots - spare_slots(slots) if on_nvme else slots, slots)
    if blocks >= _MOST_BLOCKS:
        raise ConfigError(f"{option} {text} is more blocks than a tier can have.")
    return Room(text, blocks, _slots_for(blocks) if on_nvme else blocks)


def _slots_for(blocks: int) -> int:
    """Return how many slots an NVMe tier needs to hold so many blocks between steps."""
    slots = blocks
    while slots and slots - spare_slots(slots) < blocks:
        slots += blocks - (slots - spare_slots(slots))
    return slots


def _slots_in(option: str, text: str, geometry: Geometry, *, on_nvme: bool) -> int:
    try:
        byte_count = parse_bytes(option, text)
    except ConfigError:
        raise ConfigError(
            f"{option} must be a number of blocks, a percentage of the distinct blocks, or a size such as '500GiB', "
            f"not {text!r}."
        ) from None
    slots = 0
    if not on_nvme:
        slots = geometry.cpu_slots(byte_count)[0]
    else:
        with suppress(ConfigError):
            slots = fit_nvme(geometry, byte_count, 1).blocks
    if not slots:
        raise ConfigError(f"{option} {text} holds no block of {geometry.slot_sizes[0]} bytes; see --block-bytes.")
    return slots
