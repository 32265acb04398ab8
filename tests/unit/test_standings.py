# SPDX-License-Identifier: Apache-2.0
from kvdisk.blocks import BlockKey
from kvdisk.manager.standings import DEMOTED, RETAINED, Standings

KEY = BlockKey(b"key")


def ended(standings: Standings, now: float) -> list[BlockKey]:
    """Return what has ended by then."""
    return standings.take_ended(now, 10_000)


def kept(standings: Standings) -> int:
    """Return how many seconds are remembered, in whatever way."""
    return max(len(standings._ends), len(standings._seconds))


def test_of_a_block_that_is_kept_again_and_again_only_the_last_end_is_remembered() -> None:
    standings = Standings()
    for second in range(10_000):
        ended(standings, float(second))
        standings.set(KEY, RETAINED, second + 80_000.0)
    assert kept(standings) < 200
    assert ended(standings, 89_998.0) == []
    assert ended(standings, 89_999.0) == [KEY]
    assert not standings.held and not kept(standings)


def test_nothing_is_left_of_blocks_that_are_forgotten() -> None:
    standings = Standings()
    for second in range(1000):
        standings.set(BlockKey(b"%d" % second), RETAINED, float(second))
    for key in list(standings.held):
        standings.forget(key)
    assert kept(standings) < 200


def test_blocks_leave_in_the_order_of_their_ends_after_others_were_forgotten() -> None:
    standings = Standings()
    keys = [BlockKey(b"%d" % number) for number in range(1000)]
    for number, key in enumerate(keys):
        standings.set(key, RETAINED, 10.0 + number * 7 % 1000)
    for key in keys[::3]:
        standings.forget(key)
    for key in keys[1::3]:
        standings.set(key, DEMOTED, 5.0)
    assert sorted(ended(standings, 9.0)) == sorted(keys[1::3])
    assert ended(standings, 2000.0) == sorted(keys[2::3], key=lambda key: int(key) * 7 % 1000)
