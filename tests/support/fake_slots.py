# SPDX-License-Identifier: Apache-2.0
"""What a slot of a fake rank holds."""

from __future__ import annotations

from typing import NamedTuple

from kvdisk.blocks import BlockKey

EMPTY = ""
TORN = "torn"
"""What a write that failed leaves."""
ROTTEN = "rotten"
"""What a drive that lost a block leaves."""


class Content(NamedTuple):
    """A slot: its header, with the payload that the header's checksum was made from, and its
    payload."""

    epoch: int = -1
    key: BlockKey | None = None
    generation: int = -1
    summed: str = EMPTY
    payload: str = EMPTY

    def holds(self, epoch: int, key: BlockKey, generation: int, value: str) -> bool:
        """Whether this is the record asked for, as far as the drive has kept it."""
        return self[:4] == (epoch, key, generation, value) and self.payload in {value, ROTTEN}
