# SPDX-License-Identifier: Apache-2.0
"""Whom the server answers: requests by one of its own names, from its own page, and with the token
where there is one. Pure."""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit


class Refusal(NamedTuple):
    """Why a request is not answered. ``status``: of HTTP. ``why``: a sentence."""

    status: int
    why: str


class Headers(NamedTuple):
    """What a request says of itself; "" where it does not say. ``host``: each ``Host`` that it
    has."""

    host: Sequence[str]
    authorization: str = ""
    origin: str = ""
    site: str = ""
    mode: str = ""


class Guard:
    """Decides which requests are answered.

    ``names``: by which the server may be called, beside ``localhost`` and addresses.
    ``any_address``: whether each address may be; else those of loopback. ``token``: what must be
    shown; None: nothing.
    """

    def __init__(self, names: Collection[str], *, any_address: bool, token: str | None) -> None:
        self._names = {"localhost", *(name.lower() for name in names)}
        self._any_address = any_address
        self._token = token

    def refuses(self, headers: Headers, *, navigates: bool) -> Refusal | None:
        """Return why a request is not answered, None where it is. ``navigates``: it is for the
        page, to which another site's link may lead: that site never sees the answer."""
        if len(headers.host) != 1 or not self._is_name(headers.host[0]):
            # A name that others can make lead here would make their page ours (DNS rebinding).
            return Refusal(421, "kvdisk web does not answer to this name; --allow-host NAME lets it.")
        is_foreign = headers.site not in {"", "same-origin", "none"} and not (navigates and headers.mode == "navigate")
        if is_foreign or (headers.origin and split(headers.origin).netloc != headers.host[0]):
            return Refusal(403, "kvdisk web answers its own page only.")
        if self._token is not None and not self._is_shown(headers.authorization, self._token):
            return Refusal(401, "The token is missing or wrong: it is the password of any user name.")
        return None

    def _is_name(self, host: str) -> bool:
        try:
            said = urlsplit(f"//{host}")
            name, _ = said.hostname or "", said.port
        except ValueError:
            return False
        if said.netloc != host or "@" in host:
            return False
        with suppress(ValueError):
            return ipaddress.ip_address(name).is_loopback or self._any_address
        return name in self._names

    @staticmethod
    def _is_shown(authorization: str, token: str) -> bool:
        """Return whether the token is shown, as the password (Basic) or alone (Bearer). The time
        that it takes says nothing of the token but its length."""
        scheme, _, said = authorization.partition(" ")
        shown = said.strip().encode() if scheme.lower() == "bearer" else b""
        if scheme.lower() == "basic":
            with suppress(ValueError):
                shown = base64.b64decode(said.strip(), validate=True).partition(b":")[2]
        return hmac.compare_digest(shown, token.encode())


def split(url: str) -> SplitResult:
    """Return the parts of an address; nothing of one that is none."""
    with suppress(ValueError):
        return urlsplit(url)
    return SplitResult("", "", "", "", "")


def policy(**sources: str) -> Mapping[str, str]:
    """Return the headers of every answer. ``sources``: what the answer may use beside nothing, such
    as ``script_src``, in the words of a Content-Security-Policy."""
    allowed = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    allowed |= {name.replace("_", "-"): value for name, value in sources.items()}
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in allowed.items()),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
