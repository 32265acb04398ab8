# SPDX-License-Identifier: Apache-2.0
"""What a request's sender asks of kvdisk: limits, and KV hints.

What is wrong in them is ignored, and logged at most once a minute.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvdisk.blocks import HIT_TIERS, Medium, Tier
from kvdisk.errors import QuietLog
from kvdisk.manager.kv_hints import ACTIONS, DEMOTE, PREFETCH
from kvdisk.manager.requests import KVHint, RequestLimits

logger = logging.getLogger("kvdisk.connector")

MOST_LOAD = "max_load_tokens"
STORE_LIMIT = "max_offload_tokens"
LOAD_TIERS = "kv_load_tiers"
TIER_PLACES: Mapping[Tier, dict[str, str]] = {
    tier: {
        "medium": "cpu" if tier.medium is Medium.MEMORY else "storage",
        "locality": "remote" if tier.medium is Medium.OBJECTS else "local",
    }
    for tier in HIT_TIERS
}
"""The place of each tier, in vLLM's words."""
_MATCHED: Mapping[str, tuple[str, ...]] = {"medium": ("cpu", "storage"), "locality": ("local", "remote")}
KV_HINTS = "kv_hints"
MOST_ACTIONS: Final = 16
MOST_SECONDS: Final = 86_400
_MOST_BITS: Final = 128
"""Bits of an integer that is shown at most: Python refuses to write one of 4,301 digits."""


class Controls:
    """Reads ``kv_transfer_params`` and ``kv_hints`` of requests.

    Other keys of ``kv_transfer_params`` belong to other connectors. The names of limits are those
    of vLLM's own offloading connector. Hints have the form of vLLM's ``KvHintsEnvelope`` in both.
    """

    def __init__(self) -> None:
        self._log = QuietLog(time.monotonic, logger)

    def limits(self, params: Any) -> RequestLimits:
        """Return the limits of a request. ``params``: what came with it, of any form."""
        if params is None:
            return RequestLimits()
        if not isinstance(params, Mapping):
            self._log.warn("params", f"kv_transfer_params must be a mapping, not {type(params).__name__}; ignored.")
            return RequestLimits()
        return RequestLimits(
            self._tokens(params, MOST_LOAD), self._tokens(params, STORE_LIMIT), self._tiers(params.get(LOAD_TIERS))
        )

    def _tiers(self, matchers: Any) -> frozenset[Tier] | None:
        """Return the tiers that a request may load from; None for all. Memory is always one of
        them, as in vLLM's own connector. A wrong entry of the list is ignored, and the whole list
        where no entry is right."""
        if matchers is None:
            return None
        if not isinstance(matchers, list):
            self._log.warn(LOAD_TIERS, f"{LOAD_TIERS} must be a list, not {_short(matchers)}; ignored.")
            return None
        wanted = [known for known in map(self._matcher, matchers) if known is not None]
        if matchers and not wanted:
            return None
        found = frozenset(
            tier
            for tier, place in TIER_PLACES.items()
            if tier.medium is Medium.MEMORY or any(known.items() <= place.items() for known in wanted)
        )
        return None if len(found) == len(HIT_TIERS) else found

    def _matcher(self, matcher: Any) -> dict[str, str] | None:
        """Return what one entry asks for, in lower case; None where it is wrong."""
        found: dict[str, str] = {}
        for name, values in _MATCHED.items():
            value = matcher.get(name) if isinstance(matcher, Mapping) else ""
            if value is None:
                continue
            found[name] = value.lower() if isinstance(value, str) else ""
            if found[name] not in values:
                text = f"an entry of {LOAD_TIERS} must have a {name} of {' or '.join(values)}, or none; it is ignored."
                self._log.warn(name, text)
                return None
        return found

    def _tokens(self, params: Mapping[Any, Any], name: str) -> int | None:
        value = params.get(name)
        if value is None or (type(value) is int and value >= 0):
            return value
        self._log.warn(name, f"{name} must be a number of tokens, 0 or more, not {_short(value)}; ignored.")
        return None

    def hints(self, envelope: Any, params: Any) -> tuple[KVHint, ...]:
        """Return the KV hints of a request. ``envelope``, ``params``: what came with it, of any
        form."""
        also = params.get(KV_HINTS) if isinstance(params, Mapping) else None
        if envelope is None and also is None:
            return ()
        return (*self._hints(envelope), *self._hints(also))

    def _hints(self, envelope: Any) -> Iterator[KVHint]:
        actions = _part(envelope, "actions")
        if envelope is not None and not isinstance(actions, list):
            self._log.warn("form", f"kv_hints must have a list of actions, and is {_short(envelope)}; ignored.")
            return
        for at, action in enumerate(actions or ()):
            if at == MOST_ACTIONS:
                self._log.warn("actions", f"kv_hints has {len(actions)} actions; all behind {at} are ignored.")
                return
            name, version = _part(action, "action_type"), _part(action, "action_version")
            if name not in [f"kv.{known}" for known in ACTIONS] or version not in (None, "1.0"):
                text = f"{_short(name)}, version {_short(version)}"
                self._log.warn("action", f"there is no KV hint {text}, but kv.{', kv.'.join(ACTIONS)}, version 1.0.")
            else:
                yield from self._hint(name, _part(action, "payload") or {})

    def _hint(self, name: str, payload: Any) -> Iterator[KVHint]:
        action = name.removeprefix("kv.")
        is_timed, takes_tokens = action not in {PREFETCH, DEMOTE}, action != DEMOTE
        found = dict(payload) if isinstance(payload, Mapping) else {"": payload}
        tokens, seconds = found.pop("tokens", None), found.pop("seconds", None)
        if (
            found
            or not (tokens is None or (takes_tokens and type(tokens) is int and tokens >= 0))
            or not (type(seconds) in {int, float} and 0 < seconds < math.inf if is_timed else seconds is None)
        ):
            wants = ["seconds, more than 0"] * is_timed + ["tokens or none, 0 or more"] * takes_tokens
            self._log.warn(name, f"the payload of {name} must have {' and '.join(wants) or 'nothing'}; it is ignored.")
            return
        if is_timed and seconds > MOST_SECONDS:
            self._log.warn("seconds", f"{name} is for more than {MOST_SECONDS} seconds; it holds for so long.")
        yield KVHint(action, tokens, min(seconds or 0, MOST_SECONDS))


def _part(said: Any, name: str) -> Any:
    """Return a field of vLLM's struct, or of the same as JSON; None where it is not there."""
    return said.get(name) if isinstance(said, Mapping) else getattr(said, name, None)


def _short(value: Any) -> str:
    """Return a value that came from outside in a form that a log can take."""
    is_short = value.bit_length() <= _MOST_BITS if isinstance(value, int) else isinstance(value, str | float)
    text = repr(value) if is_short else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}..."
