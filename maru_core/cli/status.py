"""``maru status``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click

from maru_core.cli.common import Target, fail, settings, table, where
from maru_core.errors import ConfigError, MaruError, ServerError, Unavailable
from maru_core.logs import visible
from maru_core.sizes import format_size

#: Exit code when no server answers.
EXIT_ABSENT = 1
EXIT_FAILED = 2

_POOL_COLUMNS = ("capacity", "used", "free", "reserved", "quarantined", "leased")


@click.command()
@where
@click.option("--json", "as_json", is_flag=True, help="Everything, as one JSON object.")
@click.option("--timeout", default=2.0, show_default=True, type=click.FloatRange(0.01, 60), help="Seconds to wait.")
def status(runtime_dir: str | None, url: str | None, keys: str | None, as_json: bool, timeout: float) -> None:
    """Show what the server holds. Exit code 1: no server answers.

    Namespaces are shown to who can read the server's admin.token, totals to everybody who reaches the server.
    """
    try:
        target = Target.find(settings({"runtime_dir": runtime_dir, "server_url": url, "keys": keys}))
        address, stats, reason = target.url, None, "nobody listens there"
        if target.may_answer:
            stats = {**target.peek(timeout).stats(), "namespaces": _namespaces(target, timeout)}
    except Unavailable as error:
        reason = str(error)
    except MaruError as error:
        fail(error, EXIT_FAILED)
    if stats is None:
        pid = target.silent()
        if as_json:
            click.echo(json.dumps({"running": False, "url": address, "reason": reason, "silent_pid": pid}))
        elif pid is not None:
            click.echo(visible(f"The Maru server at {address} (pid {pid}) does not answer: {reason}."))
            click.echo(f"It starts, is stopped (`kill -CONT {pid}`), or is very busy.")
        else:
            click.echo(visible(f"No Maru server runs at {address}: {reason}."))
            click.echo("Start one with `maru serve`; engines with maru_server_url=auto start one by themselves.")
        sys.exit(EXIT_ABSENT)
    if as_json:
        click.echo(json.dumps({"running": True, "url": address, **stats}))
    else:
        click.echo("\n".join(visible(line) for text in describe(address, stats) for line in text.split("\n")))


def _namespaces(target: Target, timeout: float) -> list[dict[str, Any]]:
    """All of them, where the credential is at hand; none otherwise."""
    if target.folder is None:
        return []
    try:
        return target.peek(timeout).namespaces(target.folder.read_credential())
    except (ConfigError, ServerError):
        # An address without keys, or a credential that was replaced: totals are all there is.
        return []


def describe(address: str, stats: Mapping[str, Any]) -> Iterable[str]:
    """Lines for people."""
    server = stats.get("server", {})
    yield f"Maru server {server.get('version')} at {address}"
    yield f"  pid {server.get('pid')}, up {_duration(server.get('uptime_s', 0))}, {stats.get('sessions')} sessions"
    pools = stats.get("pools", [])
    rows = [["pool", "backend", "objects", *_POOL_COLUMNS, "location"]]
    for pool in pools:
        sizes = [format_size(pool.get(column, 0)) for column in _POOL_COLUMNS]
        rows.append([str(pool.get(name, "")) for name in ("pool", "backend", "objects")] + sizes + [pool["location"]])
    yield ""
    yield table(rows)
    counters = stats.get("counters", {})
    asked = counters.get("hits", 0) + counters.get("misses", 0)
    yield ""
    yield f"hit rate {counters.get('hits', 0) / asked:.1%} of {asked} keys" if asked else "no key was looked up yet"
    yield ", ".join(f"{name} {value}" for name, value in counters.items())
    rows = [["namespace", "objects", "bytes", "used", "reserved", "quota", "weights epoch"]]
    for namespace in stats.get("namespaces", []):
        sizes = [format_size(namespace[column]) for column in ("bytes", "used", "reserved")]
        quota = namespace["quota"]
        sizes.append("-" if quota is None else format_size(quota))
        rows.append([namespace["digest"], str(namespace["objects"]), *sizes, str(namespace["weights_epoch"])])
    if len(rows) > 1:
        yield ""
        yield table(rows)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
