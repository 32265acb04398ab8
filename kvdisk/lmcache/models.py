# SPDX-License-Identifier: Apache-2.0
"""Which weights a model's name stands for. LMCache's keys have the name alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdisk.errors import ConfigError, KvdiskError, start_thread
from kvdisk.lmcache.parameters import Source
from kvdisk.model_identity import Model, depends_on_longest, namespace_of, state_of, vouched_namespace

logger = logging.getLogger("kvdisk")

LOOK_S = 2.0
"""How often the files of models are looked at: an engine that starts again with others needs longer
to load them."""
_LONGEST = "max_model_len"


class _Known:
    """One model. ``fingerprint``: 32 bytes; None: not known yet, or not any more. ``is_off``: it
    stays so."""

    def __init__(self, name: str, source: Source, meaning: Mapping[str, Any]) -> None:
        self.name = name
        self.meaning = {**meaning, "said": dict(source.meaning)}
        self.fingerprint: bytes | None = None
        self.is_off = False
        self.files: Model | None = None
        if source.weights_name is not None:
            self.fingerprint = vouched_namespace(source.weights_name, self.meaning).fingerprint
        else:
            assert source.path is not None
            self.files = source.path if source.revision is None else (source.path, source.revision)
            self.state = state_of(self.files)
            if _LONGEST not in source.meaning and depends_on_longest(self.files):
                raise ConfigError(
                    f"kvdisk: what {name} computes depends on the longest context that its engine is started for, which"
                    f' LMCache does not say: give it as "{_LONGEST}" in the model\'s "meaning".'
                )

    @property
    def word(self) -> str:
        """What it is doing, for people."""
        return "off" if self.is_off else "reading" if self.fingerprint is None else "on"


class Models:
    """The models of one server, by the name in LMCache's keys. Any thread asks.

    A thread reads the weights of each; until that is done there is nothing of the model. Then it
    looks at the files: a model whose files have changed goes off until the server is started again,
    since nobody says which of them an engine has loaded.
    """

    def __init__(self, sources: Mapping[str, Source], meaning: Mapping[str, Any], memory: Path | None = None) -> None:
        """``meaning``: what is the same for all. ``memory``: see ``namespace_of``. Raises
        ConfigError where there are no weights, NoThread."""
        self._memory = memory
        self._known = {name: _Known(name, source, meaning) for name, source in sources.items()}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdisk-models", daemon=True)
        start_thread(self._thread)

    def fingerprint_of(self, name: str) -> bytes | None:
        """Return what stands for a model's weights: 32 bytes; None: nothing does, now or ever."""
        known = self._known.get(name)
        return None if known is None else known.fingerprint

    def is_named(self, name: str) -> bool:
        """Return whether the user has named this model."""
        return name in self._known

    def words(self) -> dict[str, str]:
        """Return of each model what it is doing: "reading", "on" or "off"."""
        return {name: known.word for name, known in self._known.items()}

    def close(self) -> None:
        """Look at nothing any more. Does not wait."""
        self._ends.set()

    def _run(self) -> None:
        from_files = [known for known in self._known.values() if known.files is not None]
        for known in from_files:
            self._guard(known, self._read)
        while not self._ends.wait(LOOK_S):
            for known in from_files:
                if not known.is_off:
                    self._guard(known, self._look)

    def _guard(self, known: _Known, act: Any) -> None:
        """Do something for a model, and turn it off where that fails."""
        try:
            if not self._ends.is_set():
                act(known)
        except Exception as error:
            known.is_off, known.fingerprint = True, None
            told = None if isinstance(error, KvdiskError | OSError) else error
            logger.error(
                "kvdisk keeps nothing of the model %s until the server is started again: %s",
                known.name,
                error,
                exc_info=told,
            )

    def _read(self, known: _Known) -> None:
        assert known.files is not None
        fingerprint = namespace_of(known.files, known.meaning, memory=self._memory).fingerprint
        self._look(known)
        known.fingerprint = fingerprint
        logger.info("kvdisk knows the weights of %s.", known.name)

    def _look(self, known: _Known) -> None:
        assert known.files is not None
        if state_of(known.files) != known.state:
            raise KvdiskError("its files have changed, and nobody says which of them an engine has loaded.")
