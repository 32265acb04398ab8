# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvdisk.blocks import make_block_key
from kvdisk.errors import ConfigError
from kvdisk.manager.admission import (
    AdmitAdaptive,
    AdmitAll,
    AdmitReused,
    ReuseTable,
    make_admission,
)

KEY, OTHER = (make_block_key(name * 32, 0) for name in (b"a", b"b"))


def admits(policy, key):
    (answer,) = policy.admits((key,))
    return answer


def counts(table, keys):
    return [count for count, _ in table.known(keys)]


def key_number(number):
    return make_block_key(number.to_bytes(32, "big"), 0)


@pytest.mark.parametrize("needed", [1, 2, 3, 16])
def test_distinct_requests_count_once_each(needed):
    policy = AdmitReused(needed, 64)
    for seen in range(needed):
        assert (counts(policy.table, (KEY,)), admits(policy, KEY)) == ([seen], False)
        for request in [*range(seen + 1), *range(seen + 1)]:  # all so far, in turns, and once more
            policy.want((KEY,), str(request))
    assert counts(policy.table, (KEY,)) == [needed] and admits(policy, KEY)
    policy.want((KEY,), "one more")
    assert counts(policy.table, (KEY,)) == [needed]
    assert policy.admits((KEY, OTHER, KEY)) == [True, False, True]


@pytest.mark.parametrize("name", ["reuse(2)", "adaptive"])
def test_counts_do_not_survive_a_reset(name):
    policy = make_admission(name, 10)
    policy.note_room(0, 1)
    policy.want((KEY,), "1")
    policy.want((KEY,), "2")
    policy.distance = 1e9
    assert admits(policy, KEY)
    policy.reset()
    assert not admits(policy, KEY)


def test_the_table_is_bounded_and_forgets_what_was_wanted_longest_ago():
    table = ReuseTable(2, 256)
    for number in range(2000):
        table.want((key_number(0),), str(number))  # one that is always asked for
        table.want((key_number(number),), "once")
    held = counts(table, [key_number(number) for number in range(2000)])
    assert held[0] == 2
    assert sum(map(bool, held)) <= 256
    assert sum(map(bool, held[1900:])) > 70 > sum(map(bool, held[:1000]))


class TestAdaptive:
    @staticmethod
    def admitted(policy):
        """Of a thousand requests with two new blocks each, those whose blocks are admitted, which
        are both or none."""
        found = set()
        for number in range(1000):
            pair = [make_block_key(f"{number} {part}".encode(), 0) for part in (0, 1)]
            for key in pair:
                policy.want((key,), f"request-{number}")
            answers = {admits(policy, key) for key in (*pair, pair[0])}
            assert len(answers) == 1, "one request's blocks are all in or all out, and asking again changes nothing"
            if answers == {True}:
                found.add(number)
        return found

    def test_everything_enters_while_there_is_room(self):
        policy = AdmitAdaptive(1 << 16)
        policy.distance = 1e9
        policy.note_room(100, 100)
        assert len(self.admitted(policy)) == 1000
        for free, enters in ((13, True), (12, False), (50, False), (51, True)):  # evictions leave some room
            policy.note_room(free, 100)
            assert admits(policy, KEY) == enters

    @pytest.mark.parametrize(("distance", "share"), [(100.0, 1.0), (200.0, 1 / 64), (120.0, (100 / 120) ** 6)])
    def test_the_share_of_new_blocks_goes_down_as_copies_leave_sooner(self, distance, share):
        policy = AdmitAdaptive(1 << 16)
        policy.note_room(0, 100)
        policy._MEMORY = 10**9
        policy._seconds, policy.distance = 10**9, distance
        assert policy.share == pytest.approx(share)
        assert len(self.admitted(policy)) == pytest.approx(1000 * share, abs=40)
        assert admits(policy, KEY) == (share == 1), "one that is not known any more"

    def test_the_distance_is_learned(self):
        policy = AdmitAdaptive(1 << 16)
        for number in range(5000):
            policy.want((key_number(number),), f"{number}")
            if number >= 300:
                policy.want((key_number(number - 300),), f"{number}")
        assert policy.distance == pytest.approx(300, abs=5)


class Own(AdmitReused):
    """Lets in what was wanted three times."""

    def __init__(self):
        super().__init__(3, 64)


class Half:
    def want(self, keys, request_id):
        pass


class Failing(Own):
    def __init__(self):
        raise ValueError("no luck")


def test_names():
    names = {"all": AdmitAll, "adaptive": AdmitAdaptive, "reuse(3)": AdmitReused, f"{__name__}:Own": Own}
    assert {name: type(make_admission(name, 10)) for name in names} == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("some", "'adaptive'"),
        ("no_such_module:Own", "cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:Nobody", "no class of that name"),
        (f"{__name__}:KEY", "no class of that name"),
        (f"{__name__}:Failing", "cannot be built without arguments: ValueError: no luck"),
        (f"{__name__}:Half", "'is_open', 'admits', 'note_room', 'reset'"),
    ],
)
def test_a_wrong_name_is_one_sentence_that_names_the_setting(text, said):
    with pytest.raises(ConfigError, match=said) as error:
        make_admission(text, 10, "nvme_admission")
    assert str(error.value).startswith("nvme_admission ") and str(error.value).count(".\n") == 0
