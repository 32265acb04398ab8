# SPDX-License-Identifier: Apache-2.0
"""Plants bugs through seams, for tests of the tests: a method of the real class is replaced, never
its source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

Fake = Callable[..., Any]
"""Is called with the real function, and what that is called with."""


class Planter:
    """Replaces functions until ``patch`` is undone. ``reached``: how often one of them was
    called: a bug that no test comes to says nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.reached = 0

    def replace(self, owner: Any, name: str, fake: Fake) -> None:
        """Have a method or property of a class, or a function of a module, be ``fake``."""
        found = inspect.getattr_static(owner, name)
        real: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reached += 1
            return fake(real, *args, **kwargs)

        planted = type(found)(call) if isinstance(found, property | staticmethod | classmethod) else call
        self.patch.setattr(owner, name, planted)

    def replace_in(self, outer: Any, outer_name: str, owner: Any, name: str, fake: Fake) -> None:
        """As ``replace``, only while ``outer``'s method runs."""
        depth = 0

        def run(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return real(*args, **kwargs)
            finally:
                depth -= 1

        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return fake(real, *args, **kwargs) if depth else real(*args, **kwargs)

        self.replace(owner, name, call)
        self.replace(outer, outer_name, run)

    def skip(self, owner: Any, name: str, result: object = None) -> None:
        """Have a method or function do nothing but return ``result``."""
        self.replace(owner, name, lambda _real, *_args, **_kwargs: result)

    def set(self, owner: Any, name: str, value: object) -> None:
        """Give a constant of a class or module another value. Every test comes to it."""
        self.patch.setattr(owner, name, value)
        self.reached += 1


Plant = Callable[[Planter], None]
