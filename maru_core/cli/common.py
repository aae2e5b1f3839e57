"""Settings of a command: options win over the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from maru_core.config import PREFIX, MaruConfig
from maru_core.errors import MaruError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def settings(given: dict[str, object]) -> MaruConfig:
    """Build from options (``None``: not given) by setting name without prefix; raises ConfigError."""
    chosen = {PREFIX + name: value for name, value in given.items() if value is not None}
    return MaruConfig.from_mapping(chosen, os.environ)


def where(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which server."""
    options: tuple[Decorator, ...] = (
        click.option("--runtime-dir", metavar="PATH", help="The server's folder. [default: /tmp/maru-<uid>]"),
        click.option("--url", metavar="URL", help="Address: ipc:///path or tcp://127.0.0.1:port. [default: auto]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def fail(error: MaruError, code: int) -> NoReturn:
    """Say what is wrong and end."""
    click.echo(f"maru: {error}", err=True)
    sys.exit(code)
