"""``maru keygen``."""

from __future__ import annotations

from pathlib import Path

import click

from maru_core.access import DEFAULT_CLIENT, make_keys
from maru_core.cli.common import fail
from maru_core.errors import ConfigError, MaruError
from maru_core.runtime_dir import make_private


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--client", "clients", metavar="NAME", multiple=True, help="Make a pair for this client. [default: client]"
)
@click.option(
    "--namespace",
    "namespaces",
    metavar="VALUE",
    multiple=True,
    help="Bind the client's key to this maru_cache_namespace; may be given several times. [default: any]",
)
@click.option("--force", is_flag=True, help="Replace the client's pair; who uses the old one is shut out.")
def keygen(folder: Path, clients: tuple[str, ...], namespaces: tuple[str, ...], force: bool) -> None:
    """Make keys for a server at a tcp address, and for its clients.

    DIR gets server.key and server.pub, unless they are there, and NAME.key and NAME.pub. A client needs its NAME.key
    and server.pub, and nothing else.
    """
    if not all(value.strip() for value in namespaces):
        raise click.UsageError("--namespace needs a value; without the option a key may use any namespace")
    try:
        try:
            make_private(folder.absolute())
        except OSError as error:
            raise ConfigError(f"cannot make the key folder {folder}: {error.strerror}") from error
        written = make_keys(folder.absolute(), clients or (DEFAULT_CLIENT,), namespaces, force=force)
    except MaruError as error:
        fail(error, 1)
    for path in written:
        click.echo(path)
