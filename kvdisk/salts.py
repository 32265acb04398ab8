# SPDX-License-Identifier: Apache-2.0
"""The digest of a request's ``cache_salt``: it tells tenants apart without saying who they are."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

SALT_KEY_BYTES: Final = 32
DIGEST_BYTES: Final = 8


def make_salt_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(SALT_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class SaltDigests:
    """Digests of salts by one key. ``is_kept``: the store has the key, so that digests mean the
    same after a restart, and to other engines of the store."""

    key: bytes
    is_kept: bool = True

    def of(self, salt: str | None) -> int:
        """Return the digest of a salt, from 1 to 2^64 - 1; 0 for none. vLLM treats an empty salt as
        none, too."""
        if not salt:
            return 0
        found = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, key=self.key).digest()
        return int.from_bytes(found, "big") or 1


def digest_text(digest: int) -> str:
    """Return a digest as 16 hex digits."""
    return f"{digest:0{2 * DIGEST_BYTES}x}"
