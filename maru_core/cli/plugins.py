"""``maru plugins``."""

from __future__ import annotations

import json
import os

import click
from attrs import asdict

from maru_core.cli.common import fail
from maru_core.config import PluginSettings
from maru_core.errors import MaruError
from maru_core.host import PluginHost


@click.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON array with one object per plugin.")
def plugins(as_json: bool) -> None:
    """List every plugin that was found, and what became of it."""
    try:
        report = PluginHost.discover(PluginSettings.from_environ(os.environ)).report()
    except MaruError as error:
        fail(error, 1)
    if as_json:
        click.echo(json.dumps([asdict(info) for info in report]))
        return
    for info in report:
        hints = [f"hints {', '.join(hook.removeprefix('maru_') for hook in info.hints)}"] if info.hints else []
        gives = "; ".join([*filter(None, [", ".join(info.provides)]), *hints])
        built_in = "built in" if info.built_in else f"{info.distribution} {info.version}"
        reason = f": {info.reason}" if info.reason else f" ({gives})"
        note = f"; {info.note}" if info.note else ""
        click.echo(f"{info.name}  {info.status}  {built_in}{reason}{note}")
