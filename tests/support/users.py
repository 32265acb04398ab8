# SPDX-License-Identifier: Apache-2.0
"""Being another Unix user for a while, which needs root."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def user(uid: int, *groups: int, gid: int | None = None) -> Iterator[None]:
    """Be another user, also in ``groups``. ``gid``: the first group; None: as ``uid``."""
    codecs.lookup("ascii")  # one that could not be read is never looked for again, and this user may not read it
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
