"""``maru admin``: what an operator may do to a server, with the credential in its runtime folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from attrs import define

from maru_core.cli.common import Target, fail, settings, table, where
from maru_core.client.peek import Peek
from maru_core.errors import ConfigError, MaruError
from maru_core.logs import visible
from maru_core.pool_format import DIGEST_SIZE
from maru_core.protocol import AdminVerb
from maru_core.protocol.messages import EVERYTHING
from maru_core.runtime_dir import read_token
from maru_core.sizes import format_size, parse_size

#: Exit code of any failure.
EXIT_FAILED = 1


@define
class Administrator:
    """Finds the server and the credential for it when a verb needs them, not for the help on one."""

    _settings: dict[str, object]
    _token_file: Path | None
    _timeout: float
    _found: tuple[Peek, str] | None = None

    def ask(self, verb: AdminVerb, *arguments: Any) -> list[Any]:
        """Carry out a verb; ends the command when that fails."""
        with _failing():
            peek, token = self._find()
            return peek.administer(token, verb, *arguments)

    def listed(self, what: Callable[[Peek, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Everything that a method of :class:`Peek` lists; ends the command when that fails."""
        with _failing():
            return what(*self._find())

    def _find(self) -> tuple[Peek, str]:
        if self._found is None:
            target = Target.find(settings(self._settings))
            if self._token_file is None and target.folder is None:
                raise ConfigError(
                    f"no credential is known for {target.url}; give --token-file, or the server's --runtime-dir"
                )
            if not target.may_answer:
                raise ConfigError(f"no Maru server listens at {target.url}")
            if self._token_file is not None:
                token = read_token(self._token_file)
            else:
                assert target.folder is not None
                token = target.folder.read_credential()
            self._found = target.peek(self._timeout), token
        return self._found


@click.group()
@where
@click.option(
    "--token-file", metavar="PATH", type=click.Path(path_type=Path), help="[default: the folder's admin.token]"
)
@click.option("--timeout", default=10.0, show_default=True, type=click.FloatRange(0.01, 600), help="Seconds to wait.")
@click.pass_context
def admin(
    context: click.Context,
    runtime_dir: str | None,
    url: str | None,
    keys: str | None,
    token_file: Path | None,
    timeout: float,
) -> None:
    """Administer a server. Needs its admin.token, which only the server's user can read."""
    given: dict[str, object] = {"runtime_dir": runtime_dir, "server_url": url, "keys": keys}
    context.obj = Administrator(given, token_file, timeout)


@admin.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON array.")
@click.pass_obj
def namespaces(administrator: Administrator, as_json: bool) -> None:
    """List every namespace, with what it holds and what it stands for."""
    found = administrator.listed(Peek.namespaces)
    rows = [["namespace", "objects", "used", "quota", "sessions", "weights epoch", "facts"]]
    for one in found:
        quota = "-" if one["quota"] is None else format_size(one["quota"])
        sizes = [format_size(one["used"]), quota]
        rows.append(
            [one["digest"], str(one["objects"]), *sizes, str(one["sessions"]), str(one["weights_epoch"]), one["facts"]]
        )
    _show(found, rows, as_json)


@admin.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON array.")
@click.pass_obj
def sessions(administrator: Administrator, as_json: bool) -> None:
    """List every session, with what it holds."""
    found = administrator.listed(Peek.sessions)
    rows = [["session", "namespace", "role", "name", "attached", "reserved", "leased", "silent"]]
    for one in found:
        sizes = [format_size(one["reserved"]), format_size(one["leased"])]
        attached = "no" if not one["attached"] else "yes" if one["proof"] else "without proof"
        if one["awaited"]:
            attached = "awaited" if one["proof"] else "awaited, without proof"
        rows.append(
            [
                f"{one['session']:016x}",
                one["namespace"],
                one["role"],
                one["name"],
                attached,
                *sizes,
                f"{one['silent_s']:.1f} s",
            ]
        )
    _show(found, rows, as_json)


@admin.command()
@click.argument("namespace", required=False)
@click.option("--all", "everything", is_flag=True, help="Reset every namespace.")
@click.pass_obj
def reset(administrator: Administrator, namespace: str | None, everything: bool) -> None:
    """Drop all of a namespace (digest) and begin a new weights epoch: running engines no longer hit or store."""
    if (namespace is None) is not everything:
        raise click.UsageError("give the digest of a namespace, or --all")
    (count,) = administrator.ask(AdminVerb.RESET, EVERYTHING if namespace is None else _digest(namespace))
    click.echo(f"{count} namespaces reset")


@admin.command()
@click.argument("namespace")
@click.argument("size")
@click.pass_obj
def quota(administrator: Administrator, namespace: str, size: str) -> None:
    """Limit what a namespace (digest) may hold; SIZE 0 takes that back."""
    try:
        limit = parse_size(size)
        if limit >= 1 << 64:
            raise ValueError
    except ValueError:
        raise click.UsageError(f"{size!r} is no size; give one such as 4G, or 0") from None
    administrator.ask(AdminVerb.QUOTA, _digest(namespace), limit)
    click.echo(f"{visible(namespace)} may hold {format_size(limit) if limit else 'what any other may'}")


@admin.command()
@click.argument("namespace")
@click.pass_obj
def evict(administrator: Administrator, namespace: str) -> None:
    """Drop the objects of a namespace (digest) that nobody reads right now."""
    (count,) = administrator.ask(AdminVerb.EVICT, _digest(namespace))
    click.echo(f"{count} objects evicted")


@admin.command()
@click.argument("session")
@click.pass_obj
def forget(administrator: Administrator, session: str) -> None:
    """End a SESSION whose process is certainly gone, and free what it holds.

    Only for sessions that `maru admin sessions` calls awaited or without proof: the server ends all others by itself. A
    process that lives on writes into memory that others have by then.
    """
    try:
        number = int(session, 16)
        if not 0 < number < 1 << 64:
            raise ValueError
    except ValueError:
        raise click.UsageError(f"{session!r} is no session; see `maru admin sessions`") from None
    administrator.ask(AdminVerb.FORGET, number)
    click.echo(f"{number:016x} is forgotten")


@admin.command()
@click.pass_obj
def stop(administrator: Administrator) -> None:
    """End the server."""
    administrator.ask(AdminVerb.STOP)
    click.echo("the server is stopping")


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except MaruError as error:
        fail(error, EXIT_FAILED)


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
        if len(digest) == DIGEST_SIZE:
            return digest
    except ValueError:
        pass
    raise click.UsageError(
        f"{text!r} is no digest of a namespace, which has {2 * DIGEST_SIZE} hexadecimal digits; "
        "see `maru admin namespaces`"
    )


def _show(found: list[Mapping[str, Any]] | list[dict[str, Any]], rows: list[list[str]], as_json: bool) -> None:
    click.echo(json.dumps(found) if as_json else table(rows))
