# SPDX-License-Identifier: Apache-2.0
"""When the client of a remote store leaves it alone."""

from __future__ import annotations

import pytest
from support.waits import WAIT_S

from kvdisk.remote.base import ObjectOp, RemoteObject
from kvdisk.remote.client import BucketObjects


class Partial:
    """A bucket that fails where a name says so."""

    name = "partial"
    parallel = 64
    hint_life_s = 60.0

    def close(self):
        pass

    async def exists(self, name):
        return await self.size(name) is not None

    async def size(self, name):
        if name.startswith("bad"):
            raise OSError("gone")


@pytest.mark.parametrize(("good", "bad", "answers"), [(4, 0, True), (2, 2, True), (1, 3, False), (0, 4, False)])
def test_a_store_that_fails_most_of_a_batch_is_left_alone(good, bad, answers):
    objects = BucketObjects(Partial(), deadline_s=60.0)
    objects.submit(ObjectOp.EXISTS, [RemoteObject("good")] * good + [RemoteObject("bad")] * bad)
    assert objects.poll(WAIT_S)
    assert objects.answers is answers
    objects.close()
