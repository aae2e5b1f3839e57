"""Settings of a command: options win over the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

import click
from attrs import frozen

from maru_core.access import ClientKeys
from maru_core.address import Address
from maru_core.client.bootstrap import is_listening
from maru_core.client.peek import Peek
from maru_core.config import PREFIX, MaruConfig
from maru_core.errors import ConfigError, MaruError
from maru_core.logs import visible
from maru_core.runtime_dir import RuntimeDir, check_url

#: Options that are not called as their setting is.
_OPTIONS: Final = {"server_url": "--url", "chunk_size": "--granule"}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def settings(given: dict[str, object]) -> MaruConfig:
    """Build from options (``None``: not given) by setting name without prefix; raises ConfigError."""
    chosen = {PREFIX + name: value for name, value in given.items() if value is not None}
    options = {PREFIX + name: _OPTIONS.get(name, "--" + name.replace("_", "-")) for name in given}
    return MaruConfig.from_mapping(chosen, os.environ, options=options)


def where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which server."""
    options: tuple[Decorator, ...] = (
        click.option("--runtime-dir", metavar="PATH", help="The server's folder. [default: /tmp/maru-<uid>]"),
        click.option("--url", metavar="URL", help="Address: ipc:///path or tcp://host:port. [default: auto]"),
        click.option(
            "--keys",
            metavar="PATH",
            callback=lambda context, option, value: value and os.path.abspath(value),
            help="Keys for a tcp address, made by `maru keygen`.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@frozen
class Target:
    """The server that a tool is about. ``folder`` is its runtime folder, ``None`` when not known."""

    url: str
    folder: RuntimeDir | None
    keys: ClientKeys | None
    #: False when certainly nobody listens there.
    may_answer: bool = True

    @classmethod
    def find(cls, config: MaruConfig) -> Target:
        """The server of the runtime folder, or the one at the address given; raises ConfigError."""
        folder = RuntimeDir.inspect(config.runtime_path)
        info = folder.read_info() or {}
        url, may_answer = config.server_url, True
        if url == "auto":
            url = folder.url
            may_answer = is_listening(folder.server_socket)
            if not may_answer and info.get("url") not in (None, url) and folder.is_served():
                # Started with an address of its own.
                url, may_answer = check_url(str(info["url"]), secured=True), True
                if config.keys is None and not Address.parse(url).is_local:
                    raise ConfigError(f"the server of {folder.path} listens at {url}; give keys for it (--keys)")
        # A credential is only for the server of its folder: any other would learn it.
        own = folder if config.server_url == "auto" or info.get("url") == url else None
        keys = _keys(config.keys) if config.keys is not None and url.startswith("tcp:") else None
        return cls(url, own, keys, may_answer)

    def silent(self) -> int | str | None:
        """The process of a server that has the folder although it does not answer; ``None`` when there is none."""
        if self.folder is None or not self.folder.is_served():
            return None
        pid = (self.folder.read_info() or {}).get("pid")
        return pid if type(pid) is int else "unknown"

    def peek(self, timeout: float) -> Peek:
        """What asks it."""
        return Peek(self.url, timeout, self.keys)


def _keys(path: str) -> ClientKeys:
    try:
        return ClientKeys.load(path)
    except OSError as error:
        raise ConfigError(f"cannot read keys from {path}: {error.strerror}") from error


def fail(error: MaruError, code: int) -> NoReturn:
    """Say what is wrong and end."""
    lines = str(error).split("\n")
    click.echo("maru: " + "\n  ".join(map(visible, lines)), err=True)
    sys.exit(code)


def table(rows: list[list[str]]) -> str:
    """Rows of cells as aligned lines; cells are made :func:`visible`."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
