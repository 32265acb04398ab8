# SPDX-License-Identifier: Apache-2.0
"""What an engine does for its store beside its steps: it notes that the store is in use, trims what
others left, and checks that all it has open is still there.

See docs/decisions/0046-stores-that-go-away.md.
"""

from __future__ import annotations

import logging
from functools import partial

from kvdisk.device.home import Home, Place
from kvdisk.device.store import Store
from kvdisk.device.watch import HomeWatch
from kvdisk.mailbox import Mailbox
from kvdisk.manager.nvme import NvmeSpace

logger = logging.getLogger("kvdisk")


class Upkeep:
    """See the module. ``parts``: files of each segment, one for each rank. One thread calls
    ``look``, which waits for all the drives."""

    def __init__(self, store: Store, home: Home, nvme: NvmeSpace, mailbox: Mailbox, parts: int) -> None:
        self._store = store
        self._home = home
        self._nvme = nvme
        self._mailbox = mailbox
        self._watch = HomeWatch(home, parts)
        self._takes_more = True
        self._told: set[int] = set()
        """The lost segments that were logged already."""

    def look(self) -> None:
        """Do all of the module's work once. Raises KvdiskError, OSError."""
        place, said = self._home.place(), []
        if place is Place.THERE:
            said += self._mend()
            if self._takes_more and not self._watch.index_is_there():
                said.append("its index is gone, so it takes no more blocks until the next start, which rebuilds it")
                self._takes_more = False
        elif self._takes_more:
            how = "was moved away" if place is Place.MOVED else "is gone"
            said.append(f"{self._home.path} {how}, so it takes no more blocks until the next start")
            self._takes_more = False
        lost = self._watch.lost_segments(self._nvme.segments.in_place.copy())
        if fresh := lost - self._told:
            self._told |= fresh
            what = "a file of 1 segment is" if len(fresh) == 1 else f"files of {len(fresh)} segments are"
            said.append(f"{what} gone: what was in there is computed again")
        if said:
            text = "kvdisk: something else changed engine store %s while it was in use: %s."
            logger.warning(text, self._home.id, "; ".join(said))
        if lost or not self._takes_more:  # once more does no harm
            self._mailbox.post(partial(self._give_up, lost, self._takes_more))
        if place is Place.THERE:
            self._store.keep(self._home)

    def _mend(self) -> list[str]:
        names = self._store.mend(self._home)
        return [f"{', '.join(names)} was gone, and was made again"] if names else []

    def _give_up(self, lost: frozenset[int], takes_more: bool) -> None:
        """Act on what was found. The scheduler's thread calls this."""
        if not takes_more:
            self._nvme.stop_writes()
        self._nvme.lose(lost)
