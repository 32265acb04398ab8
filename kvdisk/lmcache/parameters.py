# SPDX-License-Identifier: Apache-2.0
"""What a user writes in ``adapter_params``, read and checked: each fault is one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvdisk.config import Config
from kvdisk.errors import ConfigError

LOOKUP_WAIT_S = 1.0
"""For ``lookup_wait_s`` where the user says nothing: a request waits for its lookup."""

_MODEL_FIELDS = frozenset(("path", "revision", "weights_name", "meaning"))


class Source(NamedTuple):
    """Where the weights of a model are that LMCache knows by name.

    ``path``: a directory, or a repository in the hub's cache; None: ``weights_name`` names the
    weights, and nothing is read. ``meaning``: what the user knows that LMCache does not say, as
    JSON values.
    """

    path: str | None
    revision: str | None
    weights_name: str | None
    meaning: Mapping[str, Any]


class Parameters(NamedTuple):
    """``sources``: by the name in LMCache's keys. ``config``: of the store."""

    sources: Mapping[str, Source]
    config: Config


def parse_parameters(values: Any) -> Parameters:
    """Return what ``adapter_params`` says. Raises ConfigError."""
    _need(isinstance(values, Mapping), "adapter_params is an object")
    _need(
        not (more := set(values) - {"models", "kvdisk"}), f"adapter_params has no {', '.join(map(repr, sorted(more)))}"
    )
    settings, models = values.get("kvdisk"), values.get("models")
    _need(
        isinstance(settings, Mapping) and bool(settings.get("store_dirs")),
        'adapter_params needs {"kvdisk": {"store_dirs": ..., "nvme_bytes": ...}}',
    )
    _need(
        isinstance(models, Mapping) and bool(models),
        'adapter_params needs {"models": {"NAME": "PATH"}}: for each model as the engine names it, where its weights'
        " are",
    )
    sources = {str(name): _parse_source(str(name), value) for name, value in models.items()}
    return Parameters(sources, Config.from_mapping({"lookup_wait_s": LOOKUP_WAIT_S} | dict(settings)))


def _parse_source(name: str, value: Any) -> Source:
    fields = {"path": value} if isinstance(value, str) else value
    _need(isinstance(fields, Mapping), f"the model {name!r} is a path, or an object with one")
    more = set(fields) - _MODEL_FIELDS
    _need(not more, f"the model {name!r} has no {', '.join(map(repr, sorted(more)))}")
    path, revision, vouched = (fields.get(field) for field in ("path", "revision", "weights_name"))
    texts = [text for text in (path, revision, vouched) if text is not None]
    _need(all(isinstance(text, str) and text for text in texts), f"the model {name!r} is named by text")
    _need((path is None) != (vouched is None), f'the model {name!r} needs a "path", or a "weights_name" instead')
    _need(revision is None or path is not None, f"the model {name!r} has a revision of no path")
    meaning = fields.get("meaning", {})
    _need(isinstance(meaning, Mapping), f"the meaning of the model {name!r} is an object")
    return Source(path, revision, vouched, json.loads(json.dumps(meaning)))


def _need(is_so: bool, sentence: str) -> None:
    if not is_so:
        raise ConfigError(f"kvdisk: {sentence}.")
