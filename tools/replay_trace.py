# SPDX-License-Identifier: Apache-2.0
"""``kvdisk replay`` as a script: the same options, the same output."""

from __future__ import annotations

import typer

from kvdisk.cli.replay.command import replay

if __name__ == "__main__":
    typer.run(replay)
