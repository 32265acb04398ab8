# SPDX-License-Identifier: Apache-2.0
"""When the client of a remote store leaves it alone."""

from __future__ import annotations

import asyncio

import pytest
from support.waits import WAIT_S

from kvdisk.remote import mooncake, mooncake_process
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


@pytest.mark.parametrize("op", [ObjectOp.PUT, ObjectOp.REPLACE])
def test_what_left_mooncake_while_it_was_written_was_not_written(op):
    async def ending(code: int, asked_op: ObjectOp) -> asyncio.Future:
        asked = mooncake._Asked(asked_op, "name", 1, len, asyncio.get_running_loop().create_future())
        mooncake._end(asked, code, memoryview(b"x"))
        return asked.future

    lost = asyncio.run(ending(mooncake_process.MISSING, op))
    assert isinstance(lost.exception(), mooncake.MooncakeError)
    assert asyncio.run(ending(0, op)).result() is None
    assert asyncio.run(ending(mooncake_process.MISSING, ObjectOp.GET)).result() is None
