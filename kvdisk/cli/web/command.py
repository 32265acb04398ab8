# SPDX-License-Identifier: Apache-2.0
"""``kvdisk web``: from arguments to a server.

With ``--json`` it prints one object when it listens: json_version (1), url, token (null: none is
asked for, or it is in the file that was named).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
import socket
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from kvdisk.cli.output import AsJson, Exit, StoreDirectories, print_json, printable, refusal

PORT = 8790
LEAST_TOKEN = 16
"""Letters that a token has at least."""


def web(
    directories: StoreDirectories,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Where to listen; 0: any that is free.")
    ] = PORT,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The token that browsers must show.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="A further name of this server.")
    ] = None,
    interval_s: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=3600.0, help="Seconds between two looks, at least.")
    ] = 2.0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a store in a browser: what top, report and why say, live, until ctrl-C.

    Only reads. It listens on this machine alone; on another address it asks for a token, which it
    makes and prints unless you name a file. It speaks no TLS: ssh -L, or a proxy, brings it safely
    to other machines. Where the store cannot be read the page says so, and goes on. Needs neither a
    GPU nor vLLM.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  ended by ctrl-C or SIGTERM

    [cyan]2[/cyan]  nothing was served: the address is taken, or wrong usage
    """
    family, address = _resolved(host, port)
    is_local = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    token = _read_token(token_file) if token_file else None if is_local else secrets.token_urlsafe(24)
    paths = [Path(os.path.realpath(directory)) for directory in directories]
    # Only here: no other command needs a server.
    from kvdisk.cli.web.guard import Guard
    from kvdisk.cli.web.questions import Asker
    from kvdisk.cli.web.server import WebServer
    from kvdisk.cli.web.watch import Watcher

    names = {host, *(allow_host or ()), *(() if is_local else (socket.gethostname(),))}
    watcher, guard = Watcher(paths, interval_s), Guard(names, any_address=not is_local, token=token)
    try:
        server = WebServer(address, family, watcher, Asker(paths), guard)
    except OSError as error:
        raise refusal(f"{host}:{port} cannot be listened on ({error.strerror}); --port takes another.") from None
    try:
        signal.signal(signal.SIGTERM, _end)
        watcher.start()
        url = _url(host, server.server_address[1])
        _tell(url, None if token_file else token, as_json=as_json)
        if show and not webbrowser.open(url):
            typer.echo("kvdisk: no browser could be opened", err=True)
        server.serve_forever(poll_interval=60.0)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.FINE) from None
    finally:
        server.server_close()


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return where to listen: the first address that the name has."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise refusal(f"{host} is no address of this machine ({getattr(error, 'strerror', error)}).") from None
    return family, (str(address[0]), int(address[1]))


def _read_token(file: Path) -> str:
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise refusal(f"{file} cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise refusal(f"{file} does not hold a token: {LEAST_TOKEN} letters and digits at least.")
    return token


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _tell(url: str, token: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"json_version": 1, "url": url, "token": token})
        return
    typer.echo(printable(url))
    if token is not None:
        typer.echo(f"Any user name, and as the password: {token}")


def _end(*_: Any) -> None:
    raise KeyboardInterrupt
