# SPDX-License-Identifier: Apache-2.0
"""Tells who counts them of the blocks that requests want. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import BlockKey
from kvdisk.manager.admission import AdmissionPolicy, AdmitAll
from kvdisk.manager.store_policy import StorePolicy


class Wants:
    """Tells the tiers' admissions, and the store policy which refused blocks may be offered again.

    ``store_admission``: of the tier that stores go to.
    """

    def __init__(
        self, store_policy: StorePolicy, store_admission: AdmissionPolicy, nvme_admission: AdmissionPolicy
    ) -> None:
        self._store_policy = store_policy
        self._store_admission = store_admission if type(store_admission) is not AdmitAll else None
        others = nvme_admission is not store_admission and type(nvme_admission) is not AdmitAll
        self._nvme_admission = nvme_admission if others else None

    def note(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """A request wants these blocks: it has come to them, or is served from them."""
        if self._nvme_admission is not None:
            self._nvme_admission.want(keys, request_id)
        if self._store_admission is not None:
            risen = self._store_admission.want(keys, request_id)
            if risen:
                self._store_policy.wanted_again(risen)
