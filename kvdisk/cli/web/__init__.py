# SPDX-License-Identifier: Apache-2.0
"""``kvdisk web``: what ``top``, ``report`` and ``why`` show, in a browser. Reads only."""
