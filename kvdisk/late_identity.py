# SPDX-License-Identifier: Apache-2.0
"""An engine whose fingerprint is found after its start: what it does then with its engine store.

The engine store was chosen by a guess. Until then no block of it is read, and none is written.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from kvdisk.engine_store import EngineStore, guests_of
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.identity import GUESS, Identity, Named
from kvdisk.mailbox import Mailbox
from kvdisk.manager.manager import TierManager
from kvdisk.manager.parts import Parts
from kvdisk.messages import GuestSpec, HomeSpec, JobKind

logger = logging.getLogger("kvdisk")

LOOK_S = 0.5


class LateIdentity:
    """See the module. One thread calls ``look``, which waits for the drive of the engine store."""

    def __init__(
        self,
        identity: Identity,
        parts: Parts,
        manager: TierManager,
        engine_store: EngineStore | None,
        mailbox: Mailbox,
    ) -> None:
        self._identity = identity
        self._parts = parts
        self._manager = manager
        self._engine_store = engine_store
        self._mailbox = mailbox
        self._began_s = time.monotonic()
        self._is_told = self._is_over = False

    def look(self) -> None:
        """Where the fingerprint is known by now, have the manager use what is of it. Raises
        KvdiskError: it is tried again."""
        if self._is_over:
            return
        try:
            named = self._identity.wait(0)
        except (KvdiskError, OSError) as error:
            self._is_over = True
            text = "kvdisk serves from memory alone until the next start, as it cannot identify the weights: %s"
            logger.warning(text, error)
            return
        if named is None and not self._is_told:
            self._is_told = True
            logger.info("kvdisk serves from memory alone while it reads the model's weights to identify them.")
        if named is not None:
            if self._is_of(named):
                store, ranks = self._engine_store, self._parts.geometry.rank_count
                guests = None if store is None else guests_of(store.home, ranks)  # which looks at the drive
                logger.info("kvdisk serves from all its tiers now, %.0f s later.", time.monotonic() - self._began_s)
                self._mailbox.post(lambda: self._identify(named, guests))
            self._is_over = True

    def _is_of(self, named: Named) -> bool:
        """Return whether the engine store is of this fingerprint, or can be, as it is empty. Raises
        DeviceError."""
        if self._engine_store is None:
            return True
        home = self._engine_store.home
        if home.fingerprint == named.fingerprint:
            with suppress(DeviceError):  # what HOME says of the weights is for people
                home.name(named.fingerprint, named.description)
            return True
        if not self._engine_store.nvme.segments.specs:
            home.name(named.fingerprint, named.description)
            return True
        home.name(home.fingerprint, {GUESS: ""})
        logger.warning(
            "kvdisk serves from memory alone until the next start: engine store %s, which looked like this model's, "
            "is of other weights, and is left as it is.",
            home.id,
        )
        return False

    def _identify(self, named: Named, guests: GuestSpec | None) -> None:
        """The scheduler's thread calls this."""
        if self._engine_store is not None:
            home = self._engine_store.home
            self._engine_store.nvme.identify(HomeSpec(home.id, home.fingerprint, guests=guests))
        else:
            self._parts.transfers.add(JobKind.OPEN_HOME, [], [], home=HomeSpec("", named.fingerprint))
        self._manager.identify(named.fingerprint)
