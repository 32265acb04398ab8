# SPDX-License-Identifier: Apache-2.0
"""The wing that decides; it runs in the scheduler process. From its compiled form, where there is one."""

from kvdisk.compiled import compiled_path

_compiled = compiled_path()
__path__[:0] = _compiled

IS_COMPILED = bool(_compiled)
"""Whether this process runs the compiled form. Classes of that cannot be derived from, nor can they be changed."""
