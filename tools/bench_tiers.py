# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``, with vLLM's own files as a peer: the same options, the same measurements.

``--figures`` measures what docs/BENCHMARKS.md has.
"""

from __future__ import annotations

import typer
from bench_peer import VllmFiles

from kvdisk.cli.bench.command import make_command

if __name__ == "__main__":
    typer.run(make_command(VllmFiles))
