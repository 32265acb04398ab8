# SPDX-License-Identifier: Apache-2.0
"""One run's policies and tiers: how much room they have, and their ``TierManager``, made as the
assembly makes one.

Room is what a tier holds when no step is under way. The NVMe tier keeps some of its slots free for
the next step (``spare_slots``). Room in blocks or percent does not count these, so that policies
are compared at the same room. From room in bytes they are subtracted, as are segment headers and
the index, so that it is what ``nvme_bytes`` would hold.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvdisk.cli.replay.engine import STEP_TOKENS, Engine, GpuPool
from kvdisk.cli.replay.trace import Trace
from kvdisk.cli.size import fit_nvme
from kvdisk.config import Config, parse_bytes
from kvdisk.engine_store import make_nvme
from kvdisk.errors import ConfigError
from kvdisk.geometry import FINGERPRINT_BYTES, HEADER_BYTES, Geometry, GroupGeometry, segment_charge_bytes
from kvdisk.index.base import Progress
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.admission import make_admission
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import spare_slots
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout
from kvdisk.manager.store_policy import make_store_policy
from kvdisk.manager.tiers import MemorySpace, Tiers

_COUNT = re.compile(r"\s*(\d+)\s*(?:blocks?)?\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_MOST_BLOCKS = 1 << 31
_HOME_ID = "0" * 32


@dataclass(frozen=True)
class Capacity:
    """One tier's room. ``blocks``: what it holds between steps; 0: there is no tier. ``slots``:
    what it has."""

    given: str
    blocks: int
    slots: int


def split(texts: list[str]) -> list[str]:
    """Return the names in options that are given several times or with commas, each once. Commas
    within parentheses do not separate."""
    return list(dict.fromkeys(part.strip() for text in texts for part in re.split(r",(?![^(]*\))", text)))


def parse_capacity(option: str, text: str, trace: Trace, geometry: Geometry, *, on_nvme: bool) -> Capacity:
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
        return Capacity(text, slots - spare_slots(slots) if on_nvme else slots, slots)
    if blocks >= _MOST_BLOCKS:
        raise ConfigError(f"{option} {text} is more blocks than a tier can have.")
    return Capacity(text, blocks, slots_for(blocks) if on_nvme else blocks)


def slots_for(blocks: int) -> int:
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
        slots = geometry.memory_slots(byte_count)[0]
    else:
        with suppress(ConfigError):
            slots = fit_nvme(geometry, byte_count, 1).blocks
    if not slots:
        raise ConfigError(f"{option} {text} holds no block of {geometry.slot_sizes[0]} bytes; see --block-bytes.")
    return slots


def bytes_for(slots: int, slot_bytes: int) -> int:
    """Return the least ``nvme_bytes`` for one drive, rounded up to a MiB, that has so many
    slots."""
    geometry = Geometry((GroupGeometry(0, 1, max(1, slot_bytes - HEADER_BYTES)),), 1, 1)

    def holds(mib: int) -> bool:
        with suppress(ConfigError):
            return fit_nvme(geometry, mib << 20, 1).blocks >= slots
        return False

    few, enough = 0, 1
    while not holds(enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if holds(middle) else (middle, enough)
    return enough << 20


@dataclass(frozen=True)
class Setting:
    """One run's policies, by their names in the configuration, and its tiers.

    ``gpu_blocks``: blocks of a prefix cache in front of the tiers; 0: there is none.
    """

    eviction: str
    cpu_admission: str
    nvme_admission: str
    store_policy: str
    cpu: Capacity
    nvme: Capacity
    gpu_blocks: int

    @property
    def room(self) -> Capacity:
        """The room that the table names: that of the NVMe tier, or without one of the CPU tier."""
        return self.nvme if self.nvme.slots else self.cpu

    @property
    def name(self) -> str:
        """The policies that the tiers use, as the table shows them."""
        parts = [self.eviction]
        if self.nvme.slots:
            parts.append(self.nvme_admission)
        if self.cpu.slots:
            parts.append(f"cpu {self.cpu.given}")
            if self.cpu_admission != "all":
                parts.append(f"cpu {self.cpu_admission}")
        if self.store_policy != "on_compute":
            parts.append(self.store_policy)
        return ", ".join(parts)


_NO_BYTES = 1
"""Bytes of a block where none is moved. Small, because the manager writes large blocks to a drive
in several parts."""


def make_geometry(trace: Trace, block_bytes: int = _NO_BYTES) -> Geometry:
    """Return the geometry of one rank and one group with full attention."""
    return Geometry((GroupGeometry(0, trace.block_tokens, block_bytes),), 1, trace.block_tokens)


class InstantIndex(MemoryIndex):
    """An ``Index`` that has committed everything when it is asked."""

    def poll(self) -> Progress:
        self.commit()
        return super().poll()


def make_manager(setting: Setting, geometry: Geometry, pool: GpuPool) -> TierManager:
    """Return a manager of empty tiers. Raises ConfigError where a policy does not exist."""
    # Every hit is loaded: what a load costs is not known here.
    config = Config(
        store_dirs=(Path("/nowhere"),) if setting.nvme.slots else (),
        nvme_bytes=1 if setting.nvme.slots else None,
        cpu_bytes=1 if setting.cpu.slots else 0,
        eviction=setting.eviction,
        store_policy=setting.store_policy,
        cpu_admission=setting.cpu_admission,
        nvme_admission=setting.nvme_admission,
        min_load_tokens=0,
    )
    parts = Parts.make(config, geometry, pool)
    cpu = nvme = None
    if setting.cpu.slots:
        admission = make_admission(config.cpu_admission, parts.history, "cpu_admission")
        cpu = MemorySpace(parts, (setting.cpu.slots,), admission)
    if setting.nvme.slots:
        # One segment of exactly so many slots.
        charge_bytes = segment_charge_bytes(geometry.slot_sizes[0], setting.nvme.slots)
        nvme = make_nvme(parts, NvmeLayout(0, (setting.nvme.slots,), charge_bytes), InstantIndex())
        nvme.restore(_HOME_ID, bytes(FINGERPRINT_BYTES))
    return TierManager(parts, Tiers(cpu, nvme), make_store_policy(setting.store_policy), first_generation=1)


def make_engine(trace: Trace, setting: Setting) -> Engine:
    """Return an engine over empty tiers whose files are open."""
    step_blocks = max(1, STEP_TOKENS // trace.block_tokens)
    # The longest prompt, twice: stores hold blocks that a request has left.
    count = max(setting.gpu_blocks, 2 * trace.longest + step_blocks) + 1
    pool = GpuPool(count, step_blocks, caches=setting.gpu_blocks > 0)
    engine = Engine(trace, make_manager(setting, make_geometry(trace), pool), pool)
    engine.settle()
    return engine
