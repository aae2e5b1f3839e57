"""``maru doctor``: looks at everything that a server or engine needs here, and says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, NoReturn, get_args

import click
from attrs import Factory, asdict, field, frozen

from maru_core.cli.common import Target, fail, settings, where
from maru_core.config import MaruConfig, PluginSettings
from maru_core.contracts import Finding, Level
from maru_core.errors import ConfigError, MaruError, Unavailable
from maru_core.foreign import BoundedCall, show
from maru_core.host import PluginHost, PluginInfo
from maru_core.logs import visible
from maru_core.runtime_dir import RuntimeDir
from maru_core.sizes import format_size

EXIT_BROKEN: Final = 1
_TIMEOUT: Final = 2.0
#: Seconds that the checks of one backend or engine may take, and how many findings they may have.
_PATIENCE: Final = 3.0
_MOST_FINDINGS: Final = 1000
#: Seconds until an engine must say whether it can be used: it imports torch for that.
_START: Final = 30.0
#: How threads are called that run such checks.
_THREAD: Final = "maru-doctor"
#: Level by what became of a plugin.
_STATUS: Final = {"active": "ok", "not selected": "note", "duplicate": "warning", "failed": "error"}


@frozen
class Patient:
    """What the checks look at."""

    config: MaruConfig
    host: PluginHost
    #: Asked for once: a factory that hangs holds the host's lock.
    plugins: Sequence[PluginInfo] = field(
        init=False, default=Factory(lambda self: self.host.report(), takes_self=True), repr=False
    )


Check = Callable[[Patient], Iterable[Finding]]


@click.command()
@where
@click.option("--json", "as_json", is_flag=True, help="A JSON array with one object per finding.")
def doctor(runtime_dir: str | None, url: str | None, keys: str | None, as_json: bool) -> None:
    """Check plugins, memory, devices, limits and server; exit code 1: something is broken."""
    before = set(threading.enumerate())
    try:
        config = settings({"runtime_dir": runtime_dir, "server_url": url, "keys": keys})
        patient = Patient(config, PluginHost.discover(PluginSettings.from_environ(os.environ)))
    except MaruError as error:
        fail(error, EXIT_BROKEN)
    found = [(area, finding) for area, check in CHECKS for finding in check(patient)]
    if as_json:
        click.echo(json.dumps([{"area": area, **asdict(finding)} for area, finding in found]))
    else:
        click.echo("\n".join(_lines(found)))
    code = EXIT_BROKEN if any(finding.level == "error" for _, finding in found) else 0
    if any(thread.name == _THREAD or not thread.daemon for thread in set(threading.enumerate()) - before):
        _leave(code)
    sys.exit(code)


def plugins(patient: Patient) -> Iterable[Finding]:
    """What became of every plugin that is installed."""
    for info in patient.plugins:
        origin = "built in" if info.built_in else f"{info.distribution} {info.version}".strip()
        provides = ", ".join(info.provides) or "hints only"
        text = f"{info.status}: {info.reason}" if info.reason else f"{provides} ({origin})"
        remedy = "" if info.status != "failed" else "`pip check`, or leave it out with MARU_PLUGINS"
        yield Finding(_STATUS[info.status], info.name, text, remedy)  # type: ignore[arg-type]


def backends(patient: Patient) -> Iterable[Finding]:
    """What the storage backends say themselves."""
    for name, provision in patient.host.backends().items():
        if provision.diagnose is not None:
            yield from _ask(patient, f"backend {name}", partial(provision.diagnose, patient.config))


def engines(patient: Patient) -> Iterable[Finding]:
    """Which transfer engines can be used here and why not the others, and what they say themselves."""
    config, offered = patient.config, patient.host.engines()
    for name, provision in offered.items():
        yield from _ask(patient, f"engine {name}", partial(_usable, patient, name), _START)
        if provision.diagnose is not None:
            yield from _ask(patient, f"engine {name}", partial(provision.diagnose, config))
    known = f"no plugin offers it; there are: {', '.join(offered) or 'none'}"
    if config.transfer_engine not in ("auto", *offered):
        yield Finding("error", f"maru_transfer_engine={config.transfer_engine}", known)
    for name in config.transfer_exclude:
        if name not in offered:
            yield Finding("warning", f"maru_transfer_exclude={name}", known)


def limits(patient: Patient) -> Iterable[Finding]:
    """Limits of this process, which engines that are started from the same shell or unit have, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("ok", "RLIMIT_MEMLOCK", "no limit on locked memory")
    else:
        most = "no limit" if hard == resource.RLIM_INFINITY else format_size(hard)
        yield Finding(
            "note",
            "RLIMIT_MEMLOCK",
            f"{format_size(soft)} of memory may be locked (hard limit: {most}); devices that lock pools may need more",
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for a container",
        )


def server(patient: Patient) -> Iterable[Finding]:
    """The runtime folder, and the server that is reached by these settings."""
    config = patient.config
    try:
        folder = RuntimeDir.inspect(config.runtime_path)
        target = Target.find(config)
    except ConfigError as error:
        yield Finding("error", str(config.runtime_path), str(error))
        return
    if folder.path.exists():
        yield Finding("ok", str(folder.path), "runtime folder, private to its user")
    else:
        yield Finding("note", str(folder.path), "no runtime folder yet; the first server makes it")
    if not target.may_answer:
        yield Finding("note", target.url, "no server runs", "`maru serve`, or engines with maru_server_url=auto")
        return
    try:
        stats = target.peek(_TIMEOUT).stats()
    except Unavailable as error:
        pid = target.silent()
        if pid is None:
            yield Finding("note", target.url, f"no server answers: {error}", "`maru serve`")
        else:
            text = f"the server, pid {pid}, does not answer: {error}"
            yield Finding("error", target.url, text, f"is it stopped (`kill -CONT {pid}`)? Its log says what it does")
        return
    except MaruError as error:
        yield Finding("error", target.url, str(error))
        return
    about = stats.get("server", {})
    text = f"a server of version {about.get('version')} runs, pid {about.get('pid')}, {stats.get('sessions')} sessions"
    yield Finding("ok", target.url, text)
    for pool in stats.get("pools", []):
        size = format_size(pool.get("capacity", 0))
        yield Finding("ok", str(pool.get("location")), f"pool {pool.get('pool')} of {pool.get('backend')}: {size}")


#: What is checked, by heading. A check yields what it finds and raises nothing.
CHECKS: Final[Sequence[tuple[str, Check]]] = (
    ("plugins", plugins),
    ("backends", backends),
    ("engines", engines),
    ("limits", limits),
    ("server", server),
)


def _usable(patient: Patient, name: str) -> Sequence[Finding]:
    """Whether an engine can be used."""
    config = patient.config
    subject = f"engine {name}"
    if name in config.transfer_exclude:
        return [Finding("note", subject, "excluded by maru_transfer_exclude")]
    try:
        engine = patient.host.engine(name)
        if engine.is_available():
            return [Finding("ok", subject, "can be used here")]
        reason = str(engine.import_error())
    except BaseException as error:  # noqa: BLE001 - a plugin's code, on a thread that no interrupt of the user reaches
        reason = show(error)
    level: Level = "error" if name == config.transfer_engine else "note"
    return [Finding(level, subject, f"cannot be used here: {reason}")]


def _ask(
    patient: Patient, who: str, look: Callable[[], Iterable[Finding]], patience: float = _PATIENCE
) -> Iterable[Finding]:
    """Findings of foreign code, whatever it does and however long it takes."""
    call = BoundedCall(_THREAD, partial(_findings, look))
    if not call.wait(patience):
        fault = f"did not end within {patience:g} s"
    elif isinstance(call.answer, str):
        fault = f"failed: {call.answer}"
    else:
        yield from call.answer
        return
    info = next((info for info in patient.plugins if who in info.provides), None)
    if info is None or info.built_in:
        yield Finding("error", who, f"its checks {fault}", "look at what its settings name: a disk or device may hang")
    else:
        text = f"its checks, of plugin {info.name} ({info.distribution} {info.version}), {fault}"
        yield Finding("error", who, text, "leave the plugin out of MARU_PLUGINS until it is mended")


def _findings(look: Callable[[], Iterable[Finding]]) -> list[Finding] | str:
    """What it finds, or what is wrong with it. Everything that runs foreign code is in here."""
    try:
        return [_checked(one) for one in islice(look(), _MOST_FINDINGS)]
    except BaseException as error:  # noqa: BLE001 - a plugin's code, on a thread that no interrupt of the user reaches
        return "KeyboardInterrupt" if type(error) is KeyboardInterrupt else show(error)


def _checked(finding: object) -> Finding:
    """The same in plain texts; raises TypeError or ValueError."""
    if not isinstance(finding, Finding):
        raise TypeError(f"{finding!r} is no Finding of texts")
    parts = (finding.level, finding.subject, finding.text, finding.remedy)
    if not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{finding!r} is no Finding of texts")
    level, *texts = map(str.__str__, parts)
    if level not in get_args(Level):
        raise ValueError(f"{finding!r} has no such level")
    return Finding(level, *texts)  # type: ignore[arg-type]


def _leave(code: int) -> NoReturn:
    """End although a check still runs: what it started, or the memory that it takes, would hold the exit up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _lines(found: Iterable[tuple[str, Finding]]) -> Iterable[str]:
    heading = None
    for area, finding in found:
        if area != heading:
            yield area if heading is None else f"\n{area}"
            heading = area
        first, *rest = finding.text.split("\n")
        yield visible(f"  {finding.level:<8}{finding.subject}: {first}")
        yield from (visible(f"          {line}") for line in rest)
        if finding.remedy:
            yield visible(f"          -> {finding.remedy}")
