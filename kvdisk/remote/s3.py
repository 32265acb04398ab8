# SPDX-License-Identifier: Apache-2.0
"""A bucket of S3, Google Cloud Storage or Azure, through obstore."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from kvdisk.errors import ConfigError

_RETRIES = 2
_FIRST_RETRY_S = 0.05


class S3Bucket:
    """See ``client.Bucket``.

    ``url``: ``s3://bucket/prefix`` or another. ``options``: obstore's settings of
    that kind of store, such as ``aws_endpoint``; what they lack is taken from the environment as
    its clients do. ``deadline_s``: after which the caller gives a request up. Nothing is asked
    yet. Raises ConfigError.
    """

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

    async def size(self, name: str) -> int | None:
        """See ``Bucket.size``."""
        try:
            found = await self._obstore.head_async(self._store, name)
        except FileNotFoundError:
            return None
        return int(found["size"])

    async def get(self, name: str, byte_count: int) -> Any:
        """See ``Bucket.get``. What has another length is not fetched."""
        try:
            found = await self._obstore.get_async(self._store, name)
        except FileNotFoundError:
            return None
        return await found.bytes_async() if found.meta["size"] == byte_count else b""

    async def put(self, name: str, body: Any) -> None:
        """See ``Bucket.put``."""
        await self._obstore.put_async(self._store, name, body, use_multipart=False)
