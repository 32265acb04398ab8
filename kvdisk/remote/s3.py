# SPDX-License-Identifier: Apache-2.0
"""A bucket of S3, Google Cloud Storage or Azure, through obstore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from kvdisk.errors import ConfigError
from kvdisk.remote.base import Result

_RETRIES = 2
_FIRST_RETRY_S = 0.05


class S3Bucket:
    """See ``client.Bucket``.

    ``url``: ``s3://bucket/prefix`` or another. ``options``: obstore's settings of
    that kind of store, such as ``aws_endpoint``; what they lack is taken from the environment as
    its clients do. ``deadline_s``: after which the caller gives a request up. Nothing is asked
    yet. Raises ConfigError.
    """

    parallel = 64
    hint_life_s = 60.0

    def __init__(self, url: str, options: Mapping[str, str], *, deadline_s: float) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(f"remote {url!r} needs obstore (pip install obstore).") from error
        self.name = url
        self._obstore = obstore
        limit = f"{max(1, round(2000 * deadline_s))}ms"  # the caller gives up before
        retries = {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=deadline_s),
            "backoff": {
                "init_backoff": timedelta(seconds=_FIRST_RETRY_S),
                "max_backoff": timedelta(seconds=deadline_s),
                "base": 2.0,
            },
        }
        # Without TLS where the address that the user gave says so.
        plain = any(value.startswith("http://") for value in options.values())
        client = {"timeout": limit, "connect_timeout": limit, "allow_http": plain}
        try:
            self._store = from_url(url, config=dict(options), client_options=client, retry_config=retries)
        except Exception as error:  # of several kinds, for one cause
            said = str(error).partition("\n")[0].rstrip(". ")
            raise ConfigError(f"remote {url!r} cannot be used: {said}.") from error

    async def exists(self, name: str) -> bool:
        """See ``Bucket.exists``."""
        return await self._size(name) is not None

    async def get(self, name: str, byte_count: int, take: Callable[[Any], Result]) -> Result | None:
        """See ``Bucket.get``. What has another length is not fetched."""
        try:
            found = await self._obstore.get_async(self._store, name)
        except FileNotFoundError:
            return None
        return take(await found.bytes_async() if found.meta["size"] == byte_count else b"")

    async def put(self, name: str, byte_count: int, fill: Callable[[Any], None]) -> None:
        """See ``Bucket.put``."""
        if await self._size(name) == byte_count:
            return
        body = np.empty(byte_count, np.uint8)
        fill(body)
        await self._obstore.put_async(self._store, name, body, use_multipart=False)

    def close(self) -> None:
        """See ``Bucket.close``. It holds nothing."""

    async def _size(self, name: str) -> int | None:
        try:
            found = await self._obstore.head_async(self._store, name)
        except FileNotFoundError:
            return None
        return int(found["size"])
