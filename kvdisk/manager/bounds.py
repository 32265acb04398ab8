# SPDX-License-Identifier: Apache-2.0
"""How much the manager does and keeps at most: of jobs, blocks, memory and waiting.

What a step looks at of each kind of work is in `step_work`. Read a bound as ``bounds.JOBS`` when it
is needed, and never import its name: tests lower it here, so that short prompts cross it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Pauses(NamedTuple):
    """How long nothing is tried after a failure, in seconds: each time twice as long."""

    first_s: float
    longest_s: float

    def after(self, last_s: float) -> float:
        """Return how long the pause after one of ``last_s`` is; 0: it is the first."""
        return min(2 * last_s, self.longest_s) or self.first_s


# -- jobs: what else moves stays beside loads and stores, and does not hold them up ----------------
JOBS = 4
"""Demotions of a tier, or sends, or promotions of drives, or of the remote store: queued or out.
The worker reads for promotions only where loads leave half of its reads."""
FETCH_JOBS = 2
"""Fetches, queued or out: loads read from the remote store, too."""
MOVES = 64
"""Moves of such a job: it ends soon, and so frees what it pins."""
FILE_JOBS = 1024
"""Segments that are being opened or dropped at once, from which on no hint of a neighbour is used:
where files hang, each load would add two more."""

# -- a step: beside the shares of `step_work` ------------------------------------------------------
LOOKED_AT = 4096
"""Copies that one decision about a tier's room looks at: what lies before dirty copies, and what
copies of a size bring."""
EVICTED = 256
"""Copies that leave to keep slots of NVMe free, to give a segment's room to another size, or
to bring a tier back within a share."""
EVICTED_AHEAD = 16
"""Copies that leave memory together where one has to: most stores of a few blocks look for none."""
SLOTS_PER_AHEAD = 256
"""But no more than one for so many slots of the tier: they stay free until others come."""
ENDED = 1024
"""Copies of segments that are being dropped."""
CLEARED = 8192
"""Copies that one task of an operator's deletes: each waits for a step, so there are not to be too
many."""
TAILS_LOOKED_AT = 256
"""Tails that are looked at for the place of one that has become a tail. Mostly it is among the
first: it was used when what followed it was, and that has just left."""
TAILS_SKIPPED = 1024
"""Tails that may not leave, and that a search passes over."""
WAITING_SEEN = 16
"""Requests at the head of the queue that prefetching passes over or looks at."""
WAITING_LOOKED_UP = 4
"""Requests of these whose hits it looks for; of the last of them however long it is."""
ALIKE = 32
"""Keys with one beginning that are looked at: as many groups may have blocks of one hash."""
PLACES_MOVED = 64
"""Keys of the history of reuse that move to make a place for one."""

# -- memory: what comes beyond is forgotten, or the oldest is --------------------------------------
QUESTION_BLOCKS = 16384
"""Blocks of one question to another index, over all groups, where a step's share is not less: for
the rest of a longer prompt it is asked again."""
QUESTIONS = 8192
"""Requests whose question is not answered. Of those that come then nothing is asked."""
HINTS = 1 << 18
"""Blocks that others are thought to have, about 350 bytes each of neighbours, and 210 of the remote
store."""
REJECTED = 8192
"""Blocks whose copy in another's store has failed, and is not read again for a while."""
QUEUED = 16384
"""Blocks that wait to be sent to the remote store, about 100 bytes each, or to be fetched."""
UNREACHED = 1 << 16
"""Blocks that were put or fetched, and that no request was said to have reached since."""
CHAINS = 1024
"""Chains of blocks that were put which the next put may go on with."""
PREFETCHES = 16
"""Prefetches that KV hints ask for and that have not begun, or are not planned to their end."""
STANDINGS = 1 << 18
"""Blocks that KV hints name; of others nothing is kept."""
EVENTS = 1 << 16
"""Changes that wait for the events' reader."""
EVENT_KEYS = 4096
"""Keys of a change, and of one ``take``: a start or a reset may have a million."""
LEAST_PLACES: Final = 1 << 18
"""Places of the history of reuse, 8 for each slot, but no fewer than this."""
PLACES: Final = 1 << 22
"""And no more than this: 15 bytes each."""
COUNTS: Final = 128
"""Earlier counts of reuse that are kept; those long ago are further apart."""
POLICY_CLASSES: Final = 250
"""Classes of a policy: a byte holds one."""
SPARE_SLOTS: Final = 1024
"""Slots of NVMe that are kept free, so that there are long runs to choose from."""

# -- waiting ---------------------------------------------------------------------------------------
OFFER_AGAIN: Final = Pauses(0.05, 2.0)
"""A request's blocks were refused."""
WRITE_AGAIN: Final = Pauses(1.0, 60.0)
"""A drive has refused a write, or a segment."""
READ_AGAIN: Final = Pauses(60.0, 3600.0)
"""A drive cannot be read, or an object has failed its check."""
SILENT_DEADLINES: Final = 4
"""How many times ``io_deadline_s`` an idle engine waits for jobs and commits that are silent.
Transfers are answered within one; jobs of files and commits may hang with their drive."""
