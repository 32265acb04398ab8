# SPDX-License-Identifier: Apache-2.0
"""The page: one document of ``page.html``, ``look.css`` and ``page.js``, and the policy by which a
browser runs these and nothing else.

Nothing of a store is in it: what is shown comes as JSON, and the script puts it into the page as
text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

from kvdisk.cli.frames import DEPARTURES, READS, WAITING, WRITES
from kvdisk.cli.report.look import SCRIPT
from kvdisk.cli.web.guard import policy
from kvdisk.cli.web.watch import SPANS
from kvdisk.stats import FAILURES, HARMLESS, ROUTES, TIER_WORDS, TIERS, Miss


class Document(NamedTuple):
    """An answer that a browser shows, and its headers."""

    body: bytes
    headers: Mapping[str, str]


def words() -> dict[str, object]:
    """Return what things are called, for the script: the same words as in the text commands."""
    return {
        "tiers": TIER_WORDS,
        "kept": TIERS,
        "routes": {route: " → ".join(TIER_WORDS[tier] for tier in route.split("_to_")) for route in ROUTES},
        "reads": READS,
        "writes": WRITES,
        "waiting": WAITING,
        "misses": {miss.value: miss.words for miss in Miss},
        "departures": DEPARTURES,
        "failures": FAILURES,
        "harmless": HARMLESS,
        "spans": {span: whole_s for span, (_, whole_s) in SPANS.items()},
    }


def document() -> Document:
    """Return the page. It names nothing outside itself."""
    here = files(__package__)
    text, look, script = ((here / name).read_text("utf-8") for name in ("page.html", "look.css", "page.js"))
    said = json.dumps(words(), ensure_ascii=False).replace("<", "\\u003c")
    for name, part in (("look", look), ("words", said), ("script", script)):
        text = text.replace(f"<!-- {name} -->", part)
    headers = policy(style_src=_hash_of(look), script_src=_hash_of(script), connect_src="'self'", img_src="data:")
    return Document(text.encode(), headers)


def report_headers() -> Mapping[str, str]:
    """Return the headers of a report, whose script is known, and whose elements have styles of
    their own."""
    return policy(style_src="'unsafe-inline'", script_src=_hash_of(SCRIPT))


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
