# SPDX-License-Identifier: Apache-2.0
"""Compiles the manager with mypyc where that can be done; everything else of the package is in ``pyproject.toml``.

Where it cannot be done (no C compiler, no headers of Python) the package is complete without. An editable installation
compiles nothing: ``make compile`` does, by ``tools/install.py``. Why: docs/decisions/0027-compiled-manager.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # where pip builds, the directory of this file is not on the path

from kvdisk.compiled import compiled_directory, compiled_sources  # noqa: E402


class WithCompiled(Distribution):
    """A distribution that belongs to a platform: its extensions are known only when they are made."""

    def has_ext_modules(self) -> bool:
        """Return True."""
        return True


class CompileManager(build_ext):
    """Makes the extensions in the directory where ``kvdisk/manager/__init__.py`` looks for them."""

    _directory = compiled_directory().relative_to(ROOT / "kvdisk" / "manager")

    def run(self) -> None:
        """Make the C of the extensions, which is to know their names, and compile it; not for an editable installation.

        That would put them beside the sources, where they would hide these.
        """
        if self.editable_mode or self.inplace:
            return
        self.distribution.ext_modules = self._make_c()
        self.swig_opts = None  # so that options, which only now have their extensions, can be finalized once more
        self.finalize_options()
        try:
            super().run()
        except Exception as failure:
            self._do_without(failure)

    def _make_c(self) -> list[Extension]:
        try:
            from mypyc.build import mypycify

            sources = [str(path.relative_to(ROOT)) for path in compiled_sources()]
            found: list[Extension] = mypycify(
                sources, opt_level="3", debug_level="0", group_name="kvdisk.manager.native"
            )
            for extension in found:  # nothing from without calls what is in them, so that calls within are direct
                extension.extra_compile_args += ["-fvisibility=hidden", "-fno-semantic-interposition"]
            return found
        except (Exception, SystemExit) as failure:  # the latter by mypy, for what it finds
            self._do_without(failure)
            return []

    def _do_without(self, failure: BaseException) -> None:
        self.extensions = []
        self.warn(f"the manager is not compiled, and runs as it is written: {failure}")

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file of an extension, below the manager's directory."""
        path = Path(super().get_ext_filename(fullname))
        return str(path.parent / self._directory / path.name)


setup(distclass=WithCompiled, cmdclass={"build_ext": CompileManager})
