# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that gives kvdisk a second tier in memory, slower than the CPU tier: what a
change of the product would do, in the places where it would do it.

The cases are ``tests/unit/second_memory_cases.py``. It replaces ``kvdisk.blocks`` before anything
else is imported, so it has a process of its own: see ``tests/unit/test_seams.py``.
"""

from __future__ import annotations

from enum import IntEnum

from kvdisk import blocks
from kvdisk.blocks import Medium


class Tier(IntEnum):
    """``kvdisk.blocks.Tier`` with one more member, and later numbers behind it."""

    word: str
    label: str
    medium: Medium

    GPU = 0, "GPU", Medium.GPU
    CPU = 1, "CPU", Medium.MEMORY
    FAR = 2, "far", Medium.MEMORY
    NVME = 3, "NVMe", Medium.FILES
    REMOTE = 4, "remote", Medium.OBJECTS

    def __new__(cls, number: int, word: str, medium: Medium) -> Tier:
        tier = int.__new__(cls, number)
        tier._value_, tier.word, tier.label, tier.medium = number, word, word.lower(), medium
        return tier


# kvdisk/blocks.py: the member.
blocks.Tier = Tier  # type: ignore[misc, assignment]
blocks.KEPT_TIERS = (Tier.CPU, Tier.FAR, Tier.NVME)  # type: ignore[assignment]
blocks.HIT_TIERS = (*blocks.KEPT_TIERS, blocks.Tier.REMOTE)

from kvdisk import assembly  # noqa: E402 - after the member is there
from kvdisk.config import Config  # noqa: E402


class FarMemory(assembly.MemoryTier):
    """Three times as large as the CPU tier: ``kvdisk/config.py`` would have a key for that."""

    def bytes_in(self, config: Config) -> int:
        return 3 * super().bytes_in(config)


# kvdisk/assembly.py: the row.
assembly.MEMORY_TIERS = (  # type: ignore[assignment]
    *assembly.MEMORY_TIERS,
    FarMemory(Tier.FAR, "cpu_bytes", "cpu_admission"),  # type: ignore[arg-type]
)
