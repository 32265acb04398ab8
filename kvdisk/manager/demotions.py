# SPDX-License-Identifier: Apache-2.0
"""Which copies of the CPU tier the NVMe tier is asked to take. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from kvdisk.blocks import CPU, NVME
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import ABSENT, READY, Catalog
from kvdisk.manager.neighbours import ForeignCopies
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.tiers import CpuSpace
from kvdisk.stats import Stats


class NvmeOffers:
    """See the module. Takes nothing where there is only one tier."""

    def __init__(
        self,
        catalog: Catalog,
        stats: Stats,
        cpu: CpuSpace | None,
        nvme: NvmeSpace | None,
        admission: AdmissionPolicy,
        foreign: ForeignCopies,
    ) -> None:
        self._catalog = catalog
        self._stats = stats
        self._tiers = (cpu, nvme) if cpu is not None and nvme is not None else None
        self._admission = admission
        self._foreign = foreign

    def offer(self, rows: Sequence[int]) -> int:
        """Ask the NVMe tier's admission for those READY CPU copies that are not on NVMe, nor on another home's.

        Asked when a copy becomes READY, each time its key's count may have risen, and before it leaves the CPU tier.
        Returns how many the backlog took.
        """
        if self._tiers is None:
            return 0
        cpu, nvme = self._tiers
        if not nvme.home_open:
            return 0
        keys, (on_cpu, on_nvme) = self._catalog.keys, (self._catalog.columns(tier).states for tier in (CPU, NVME))
        wanted = [row for row in rows if on_cpu[row] == READY and on_nvme[row] == ABSENT]
        if self._foreign.known:
            wanted = [row for row in wanted if not self._foreign.holds(keys[row])]
        if wanted and not self._admission.is_open:
            wanted = list(compress(wanted, self._admission.admits([keys[row] for row in wanted])))
        return cpu.enqueue(wanted) if wanted else 0

    def ask_before_leaving(self, row: int) -> bool:
        """Ask once more before a copy leaves the CPU tier for room: True: it waits for its demotion instead.

        Counts why a copy that will be nowhere then was not wanted.
        """
        assert self._tiers is not None
        if self.offer((row,)):
            return True
        nvme, key = self._tiers[1], self._catalog.keys[row]
        is_absent = self._catalog.state(row, NVME) == ABSENT
        if nvme.home_open and is_absent and not self._foreign.holds(key):
            if not self._admission.admits((key,))[0]:
                self._stats.add("left_blocks.reuse")
            else:
                self._stats.add("left_blocks.budget" if nvme.is_spent else "left_blocks.room")
        return False
