# SPDX-License-Identifier: Apache-2.0
"""The keys of a request are those of its full blocks, however they are asked for."""

from __future__ import annotations

import pytest

from kvdisk.blocks import make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.requests import RequestState

GEOMETRY = Geometry((GroupGeometry(0, 16, 4096), GroupGeometry(1, 48, 4096)), 1, 16)


def hashes_of(count: int, name: str = "") -> list[bytes]:
    return [f"{name} {at}".encode() for at in range(count)]


@pytest.mark.parametrize(("group", "scale"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 11])
def test_each_full_block_has_the_key_of_its_last_hash(group, scale, count):
    request = RequestState("r", hashes_of(count), 16 * count, GEOMETRY)
    assert not request.keys[group]
    request.update_keys()
    keys = request.keys[group]
    expected = [make_block_key(f" {at}".encode(), group) for at in range(scale - 1, count, scale)]
    assert len(keys) == len(expected) and list(keys) == keys[:] == expected
    assert [keys[at] for at in range(-len(keys), len(keys))] == expected * 2
    assert list(reversed(keys)) == expected[::-1]
    for start in range(count + 1):
        for stop in range(count + 1):
            assert keys[start:stop] == expected[start:stop]
            assert keys[start:stop:2] == expected[start:stop:2]
    places = list(range(0, len(keys), 2))
    assert keys.of(places) == [expected[at] for at in places]
    assert keys.before(places) == [expected[at - 1] if at else None for at in places]
    assert keys.before(places[1:]) == [expected[at - 1] for at in places[1:]]
    with pytest.raises(IndexError):
        keys[len(keys)]


def test_keys_stay_until_it_is_noticed_that_the_engine_has_hashed_anew():
    hashes = hashes_of(6)
    request = RequestState("r", hashes, 96, GEOMETRY)
    request.update_keys()
    before = [keys[:] for keys in request.keys]
    hashes[:] = hashes_of(5, "anew")
    request.update_keys()
    assert [keys[:] for keys in request.keys] == before
    assert request.forget_changed_keys() and not any(map(len, request.keys))
    request.update_keys()
    assert request.keys[0][:] == [make_block_key(name, 0) for name in hashes]
    assert not request.forget_changed_keys()
