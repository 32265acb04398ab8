# SPDX-License-Identifier: Apache-2.0
"""The ``kvdisk`` command, put together from a module for each of its commands."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvdisk import __version__
from kvdisk.cli.output import JSON_WANTED, print_json_error, standard_output

MODULES = {
    "inspect": "inspect",
    "why": "why",
    "top": "top",
    "web": "web.command",
    "report": "report.command",
    "verify": "verify",
    "repair": "repair",
    "prune": "delete",
    "clear": "delete",
    "check": "check",
    "start-args": "start_args",
    "size": "size",
    "replay": "replay.command",
    "bench": "bench",
}
"""The module of each command, in the order of the help. Only the command that runs is imported: to
import all of them doubles the time that most take to start."""
SHOWN: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "pretty_exceptions_show_locals": False,
}


def unwrapped(text: str) -> str:
    """Return a text with each paragraph in one line, so that a terminal of any width can wrap
    it."""
    return "\n\n".join(" ".join(map(str.strip, paragraph.splitlines())) for paragraph in text.split("\n\n"))


class Commands(TyperGroup):
    """The commands. What one prints is written before it ends, or one sentence says why not."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        """Return the commands' names."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - typer's signature
        """Return a command, or None where there is none of that name."""
        if cmd_name not in MODULES:
            return None
        command = getattr(import_module(f"kvdisk.cli.{MODULES[cmd_name]}"), cmd_name.replace("-", "_"))
        alone = typer.Typer(**SHOWN, add_completion=False)
        alone.command(cmd_name, help=unwrapped(getdoc(command) or ""))(command)
        return typer.main.get_command(alone)

    def make_context(self, info_name: str | None, args: list[str], *arguments: Any, **more: Any) -> Any:
        """Read what was typed before the command. Its help, or the version, is printed at once."""
        JSON_WANTED.set("--json" in args)
        with standard_output():
            return super().make_context(info_name, args, *arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed. Where JSON was asked for, an error that ends it is
        printed as JSON too."""
        with standard_output():
            try:
                return super().invoke(ctx)
            except (typer.Exit, typer.Abort, OSError):
                raise
            except Exception as error:
                of_usage = getattr(error, "format_message", None)
                print_json_error(of_usage() if of_usage else f"an error of kvdisk: {type(error).__name__}: {error}")
                raise


class App(typer.Typer):
    """What a process of the command runs, and ends by."""

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        """Run the command that was typed. Where it had a client of a remote store, the process ends
        without Python's own end: a thread of the client's that comes back to Python meanwhile would
        kill it (SIGABRT, SIGSEGV), whatever it has found."""
        try:
            return super().__call__(*arguments, **more)
        except SystemExit as ended:
            if "obstore" in sys.modules and isinstance(ended.code, int):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(ended.code)
            raise


app = App(name="kvdisk", cls=Commands, **SHOWN)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvdisk {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def kvdisk(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does it all
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look into, and after, the stores in which kvdisk keeps a vLLM server's KV cache."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


if __name__ == "__main__":
    app()
