# SPDX-License-Identifier: Apache-2.0
"""What neighbours and the remote store are thought to have, together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tier_bench import keys_of

from kvdisk.blocks import Tier
from kvdisk.manager.parts import StepState
from kvdisk.manager.peer_hints import PeerHints

(KEY,) = keys_of("aa")


@pytest.mark.parametrize(
    ("near", "usable", "far", "source"),
    [(1, 1, 1, "near"), (1, 0, 1, "far"), (0, 0, 1, "far"), (1, 0, 0, "near"), (0, 0, 0, "near")],
)
def test_what_is_promised_by_one_is_read_from_it(near, usable, far, source):
    """A neighbour's hints are not usable while too many of its files are being opened. What nobody
    has any more counts as near, as without a remote store."""
    neighbours = SimpleNamespace(
        hints={KEY} if near else set(),
        usable_hints={KEY} if usable else set(),
        tier=Tier.NVME,
        take=lambda _: "near",
        exists=True,
    )
    remote = SimpleNamespace(hints={KEY} if far else {}, take=lambda: "far", tier=Tier.REMOTE, exists=True)
    hints = PeerHints(neighbours, remote, StepState())
    assert hints.take(KEY) == source
    assert hints.tier_of(KEY) is (Tier.REMOTE if source == "far" else Tier.NVME)


@pytest.mark.parametrize(
    ("tiers", "source"), [(None, "near"), ({Tier.NVME}, "near"), ({Tier.REMOTE}, "far"), ({Tier.CPU}, None)]
)
def test_of_two_that_have_a_block_one_is_read_that_may_be(tiers, source):
    neighbours = SimpleNamespace(hints={KEY}, usable_hints={KEY}, tier=Tier.NVME, take=lambda _: "near", exists=True)
    remote = SimpleNamespace(hints={KEY}, usable_hints={KEY}, take=lambda: "far", tier=Tier.REMOTE, exists=True)
    hints = PeerHints(neighbours, remote, StepState())
    assert hints.take(KEY, tiers) == source
    assert bool(hints.usable_in(tiers)) == (source is not None)
