"""Types of settings: what each accepts, in words for people, and a parser for what was set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final, Literal, cast, get_args

from attrs import frozen

from maru_core.address import MAX_SOCKET_PATH, Address
from maru_core.checksum import Verify
from maru_core.sizes import parse_size

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LISTEN: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
#: Who sees the bytes of a pool: only this host, or hosts that are not coherent with each other. ``auto`` looks at where
#: the server listens.
Visibility = Literal["auto", "host", "hosts"]
#: Sizes are below this, in bytes: what a file can have.
_END_OF_SIZES: Final = 1 << 63
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@frozen
class Kind:
    """A type of setting: what is expected, in words, and a parser that raises ValueError on anything else."""

    expected: str
    parse: Callable[[object], Any]


def parse_boolean(value: object) -> bool:
    """Of a boolean, 0, 1 or a word for one; ValueError of anything else."""
    text = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value.strip()


def _label(value: object) -> str:
    text = _text(value)
    if len(text.encode()) > 256 or not text.isprintable():
        raise ValueError
    return text


def _name(value: object) -> str:
    text = _text(value)
    if not _NAME.fullmatch(text):
        raise ValueError
    return text


def _names(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    names = tuple(_name(part) for part in parts if part != "")
    if len(set(names)) != len(names):
        raise ValueError
    return names


def _path(value: object) -> str:
    text = _text(value)
    if not text.startswith("/") or "\0" in text:
        raise ValueError
    return os.path.normpath(text)


def _paths(value: object) -> str:
    paths = [_path(part) for part in _text(value).split(",")]
    if len(set(paths)) != len(paths):
        raise ValueError
    return ",".join(paths)


def _visibility(value: object) -> Visibility:
    mode = _text(value).lower()
    if mode not in get_args(Visibility):
        raise ValueError
    return cast(Visibility, mode)


def _verify(value: object) -> Verify:
    mode = _text(value).lower()
    if mode not in get_args(Verify):
        raise ValueError
    return cast(Verify, mode)


def _off_or_auto(value: object) -> str:
    mode = _text(value).lower()
    if mode not in ("off", "auto"):
        raise ValueError
    return mode


def _url(value: object) -> str:
    text = _text(value)
    if text == "auto":
        return text
    address = Address.parse(text)
    if address.host == "*" or (address.scheme == "tcp" and address.port is None):
        raise ValueError
    return text


def _listen(value: object) -> str:
    host, _, port = _text(value).rpartition(":")
    if not _LISTEN.fullmatch(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 <= int(port) < 65536:
        raise ValueError
    return f"{host}:{port}"


def _integer(low: int, high: int) -> Kind:
    def parse(value: object) -> int:
        number = int(value) if isinstance(value, str) else value
        if type(number) is not int or not low <= number <= high:
            raise ValueError
        return number

    return Kind(f"a whole number from {low} to {high}", parse)


def _number(low: float, high: float, *, zero: bool = False) -> Kind:
    def parse(value: object) -> float:
        number = float(value) if isinstance(value, str) else value
        if type(number) not in (int, float) or not isinstance(number, int | float):
            raise ValueError
        if not (low <= number <= high or (zero and number == 0)):
            raise ValueError
        return float(number)

    return Kind(f"a number from {low:g} to {high:g}" + (", or 0" if zero else ""), parse)


def _size(low: int, multiple: int) -> Kind:
    def parse(value: object) -> int:
        size = parse_size(value)
        if not low <= size < _END_OF_SIZES or size % multiple:
            raise ValueError
        return size

    step = f", a multiple of {multiple}" if multiple > 1 else ""
    return Kind(f"a size such as 4G, 500M, 4GiB or a number of bytes, at least {low}{step}", parse)


BOOLEAN: Final = Kind("true or false", parse_boolean)
LABEL: Final = Kind("printable text of at most 256 bytes", _label)
NAME: Final = Kind("a plugin's name: letters, digits, '.', '_' and '-'", _name)
NAMES: Final = Kind("names of storage backends, each once: a list, or text with commas", _names)
ENGINES: Final = Kind("names of transfer engines, each once: a list, or text with commas", _names)
PATH: Final = Kind("an absolute path", _path)
PATHS: Final = Kind("absolute paths with commas between them, each once", _paths)
VISIBILITY: Final = Kind("auto, host or hosts", _visibility)
VERIFY: Final = Kind("off, sample or full", _verify)
OFF_OR_AUTO: Final = Kind("off or auto", _off_or_auto)
URL: Final = Kind(
    f"auto, ipc:///absolute/path (at most {MAX_SOCKET_PATH} bytes) or tcp://host:port; "
    "one that is not loopback needs `maru_keys`",
    _url,
)
LISTEN: Final = Kind("host:port, such as 127.0.0.1:9090; port 0: any free one", _listen)
POOL_SIZE: Final = _size(1 << 20, 1)
GRANULE: Final = _size(4096, 4096)
COUNT: Final = _integer(0, 1_000_000)
POSITIVE: Final = _integer(1, 1_000_000)
SECONDS: Final = _number(0.001, 86_400)
SECONDS_OR_NEVER: Final = _number(0.1, 31_536_000, zero=True)
SHARE: Final = _number(0.01, 1)
