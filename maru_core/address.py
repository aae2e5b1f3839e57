"""Addresses of a server: what they may look like, and whether one can be reached from other hosts."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Final

from attrs import frozen

#: Longest unix socket path in bytes, without the closing zero (``sun_path`` of Linux).
MAX_SOCKET_PATH: Final = 107

#: ASCII only: ZeroMQ gives further characters a meaning of their own, and other digits are no digits to it.
_TCP: Final = re.compile(r"tcp://(?P<host>[A-Za-z0-9._-]+|\*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5}|\*)")


@frozen
class Address:
    """One address. ``path`` of an ``ipc`` one; ``host`` (IPv6 without brackets) and ``port`` of a ``tcp`` one.

    ``port`` is ``None`` for "any free one", which only a server can use.
    """

    scheme: str
    path: str = ""
    host: str = ""
    port: int | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError that says what is wrong with ``url``."""
        if url.startswith("ipc://"):
            path = url.removeprefix("ipc://")
            length = len(os.fsencode(path))
            if not path.startswith("/") or not path.strip("/") or path.endswith("/"):
                raise ValueError("an ipc address needs the absolute path of a socket")
            if "\0" in path:
                raise ValueError("a socket path cannot hold a zero byte")
            if length > MAX_SOCKET_PATH:
                raise ValueError(f"the socket path has {length} bytes, the limit is {MAX_SOCKET_PATH}")
            return cls("ipc", path=path)
        match = _TCP.fullmatch(url)
        if match is None:
            raise ValueError("expected ipc:///path/of/socket or tcp://host:port")
        port = None if match["port"] == "*" else int(match["port"])
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"a tcp port is 1 to 65535, got {port}")
        return cls("tcp", host=match["host"].strip("[]"), port=port)

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it. A name other than ``localhost`` is taken for another host."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
