# SPDX-License-Identifier: Apache-2.0
"""A bucket of S3, Google Cloud Storage or Azure, through obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from kvdisk.config import BUCKETS
from kvdisk.errors import ConfigError
from kvdisk.remote.base import Result

PAGE_OBJECTS = 1000
"""The objects that a store lists in one answer."""
_RETRIES = 2
_FIRST_RETRY_S = 0.05
_MEANINGS = (
    ({"NoSuchBucket", "ContainerNotFound"}, "there is no such bucket"),
    (
        {"SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken", "AuthenticationFailed"},
        "the credentials are wrong",
    ),
    ({"RequestTimeTooSkewed", "RequestExpired"}, "the clock of this host is not that of the store"),
    (
        {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"},
        "the bucket is at another address, or of another region",
    ),
)
"""Error codes of the stores, and what they mean."""
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""obstore's settings of its HTTP client, which all kinds of store share: obstore panics if they are
given as settings of a store. Each may have the prefix of its kind of store."""
_NOT_HERE = {"default_headers": "is no text", "bucket": "is in the address", "container_name": "is in the address"}
_CREDENTIALS_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
DENIED = "the credentials lack the right"


class Listed(NamedTuple):
    """An object that a listing names. ``stored_s``: seconds since the Unix epoch."""

    name: str
    size_bytes: int
    stored_s: int


class ObstoreBucket:
    """See ``base.Bucket``.

    ``url``: ``s3://bucket/prefix``, or with another scheme of BUCKETS. ``options``: obstore's
    settings for that kind of store, such as ``aws_endpoint``, and for its HTTP client. obstore
    takes what they lack from the environment. ``deadline_s``: seconds after which the caller gives
    a request up. The constructor asks the store nothing. Raises ConfigError.
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
        # Without TLS where the address that the user gave begins with http.
        given = [*options.values(), *(os.environ.get(name, "") for name in _ENDPOINTS)]
        plain = any(value.startswith("http://") for value in given)
        client = {"timeout": limit, "connect_timeout": limit, "allow_http": plain}

        def make(some: Mapping[str, str]) -> Any:
            store, more = divide_options(url, some)
            return from_url(url, config=store, client_options=client | more, retry_config=retries)

        self._store, wrong = _try_to(make, options)
        if wrong is not None:
            without = {each: {name: options[name] for name in options if name != each} for each in options}
            culprit = next((name for name, some in without.items() if _try_to(make, some)[1] is None), "")
            named = f"remote_options {culprit!r}: " if culprit and culprit not in wrong else ""
            raise ConfigError(f"remote {url!r} cannot be used: {named}{wrong}.")

    async def exists(self, name: str) -> bool:
        return await self._size(name) is not None

    async def get(self, name: str, most_bytes: int, take: Callable[[Any], Result]) -> Result | None:
        """See ``Bucket.get``. What is far behind ``most_bytes`` is not fetched, whatever length the
        store said."""
        try:
            found = await self._obstore.get_async(self._store, name)
        except FileNotFoundError:
            return None
        if found.meta["size"] > most_bytes:
            return take(b"")
        pieces = found.stream(min_chunk_size=most_bytes)  # bytes_async would read what has no end
        return take(await anext(aiter(pieces), b""))

    async def put(self, name: str, byte_count: int, fill: Callable[[Any], None], *, over: bool = False) -> None:
        if not over and await self._size(name) == byte_count:
            return
        body = np.empty(byte_count, np.uint8)
        fill(body)
        await self._obstore.put_async(self._store, name, body, use_multipart=False)

    def close(self) -> None:
        """See ``Bucket.close``. There is nothing to release."""

    async def _size(self, name: str) -> int | None:
        try:
            found = await self._obstore.head_async(self._store, name)
        except FileNotFoundError:
            return None
        return int(found["size"])

    # -- for tools, which may wait; they raise what the client raises -------------------------

    def folders(self, prefix: str) -> list[str]:
        """Return the names between ``prefix``, which ends with a slash, and the next slash."""
        found = self._obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def pages(self, prefix: str, after: str | None = None) -> Iterator[list[Listed]]:
        """Yield the objects below ``prefix`` in the order of their names, starting behind
        ``after``. Each page is one request."""
        for page in self._obstore.list(self._store, prefix, offset=after, chunk_size=PAGE_OBJECTS):
            yield [_listed(each["path"], each["size"], each["last_modified"]) for each in page]

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._obstore.delete(self._store, name)


def divide_options(url: str, options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the ``remote_options`` of the store, and those of its HTTP client. Raises
    ConfigError."""
    store: dict[str, str] = {}
    client: dict[str, Any] = {}
    for name, value in options.items():
        bare = name.lower().removeprefix(BUCKETS[url.partition("://")[0]])
        if bare in _NOT_HERE:
            raise ConfigError(f"remote_options cannot have {name!r}, which {_NOT_HERE[bare]}.")
        if bare in CLIENT_OPTIONS:
            client[bare] = value
        else:
            store[name] = value
    return store, client


def _try_to(make: Callable[[Mapping[str, str]], Any], options: Mapping[str, str]) -> tuple[Any, str | None]:
    """Return what ``make`` returns, or why it failed. Raises ConfigError."""
    try:
        return make(options), None
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of several kinds, for one cause; a panic of its code is no Exception
        return None, str(error).partition("\n")[0].rstrip(". ")


def _listed(name: str, size_bytes: int, stored: datetime) -> Listed:
    return Listed(name, size_bytes, int(stored.timestamp()))


def why_failed(text: str) -> str:
    """Say in a few words why a request failed. ``text``: its exception's text."""
    found = re.search(r"<Code>(\w+)</Code>", text)
    code = found[1] if found else ""
    for codes, meaning in _MEANINGS:
        if code in codes:
            return f"{meaning} ({code})"
    if any(server in text for server in _CREDENTIALS_SERVERS):
        return "there are no credentials, neither in remote_options nor in the environment"
    if "403 Forbidden" in text or "401 Unauthorized" in text:
        return DENIED
    if "error sending request" in text or "ConnectionRefusedError" in text:
        return "nothing answers at its address"
    return text.partition("\n")[0].rstrip(". ")
