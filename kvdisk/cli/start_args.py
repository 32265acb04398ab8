# SPDX-License-Identifier: Apache-2.0
"""``kvdisk start-args``: what ``KVDISK_`` variables mean, as vLLM's command line would have it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvdisk.cli.output import AsJson, print_json, refusal
from kvdisk.environment import transfer_of, variables
from kvdisk.errors import ConfigError


def start_args(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE...", help="More KVDISK_ variables, as if they were set.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what --kv-transfer-config would be given for the KVDISK_ variables.

    For whoever would rather type JSON than set variables. It has every value that
    is set, also the secrets of remote_options. Looks at no directory: kvdisk check
    does.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  it is printed

    [cyan]2[/cyan]  no variable is set, or one is wrong, and one sentence says which; or
       wrong usage
    """
    try:
        transfer = transfer_of(os.environ | dict(_split(pair) for pair in pairs or ()))
        if transfer is None:
            raise ConfigError("No variable is set: KVDISK_STORE_DIRS and KVDISK_NVME_BYTES are those of a drive.")
    except ConfigError as error:
        raise refusal(str(error)) from None
    if as_json:
        print_json({"kv_transfer_config": transfer}, 1)
    else:
        print_json(transfer)


def _split(pair: str) -> tuple[str, str]:
    name, is_pair, value = pair.partition("=")
    if not is_pair or not variables({name: "any"}):
        raise ConfigError(f"{pair!r} is no variable of kvdisk's with a value, such as KVDISK_STORE_DIRS=/nvme/kv.")
    return name, value
