"""A look at a server without a session, and its administration: for tools, never for engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from maru_core.access import ClientKeys
from maru_core.client.channel import Channel, new_context, nobody_answers
from maru_core.errors import ConfigError, ProtocolError, ServerError, Unavailable
from maru_core.protocol import AdminVerb, Code, Op
from maru_core.protocol.codec import encode


@frozen
class Peek:
    """Asks the server at ``url``, waiting at most ``timeout`` seconds for each answer.

    Methods raise Unavailable, ConfigError (address), ServerError, ProtocolError.
    """

    url: str
    timeout: float
    keys: ClientKeys | None = None

    def stats(self) -> dict[str, Any]:
        """Totals of what the server counts."""
        results = self._ask(Op.STATS)
        if len(results) != 1 or not isinstance(results[0], dict):
            raise ProtocolError(f"the Maru server at {self.url} answered STATS with {len(results)} results, not a map")
        return results[0]

    def namespaces(self, token: str) -> list[dict[str, Any]]:
        """All namespaces that the server knows."""
        return list(self._pages(token, AdminVerb.NAMESPACES))

    def sessions(self, token: str) -> list[dict[str, Any]]:
        """All sessions."""
        return list(self._pages(token, AdminVerb.SESSIONS))

    def administer(self, token: str, verb: AdminVerb, *arguments: Any) -> list[Any]:
        """Carry out a verb; returns its results."""
        if self.url.startswith("tcp:") and self.keys is None:
            raise ConfigError(
                f"the credential would go to whoever listens at {self.url}; administer it with keys (--keys)"
            )
        return self._ask(Op.ADMIN, token, verb.value, *arguments)

    def _pages(self, token: str, verb: AdminVerb) -> Iterator[dict[str, Any]]:
        start = 0
        while True:
            results = self.administer(token, verb, start)
            if len(results) != 2 or not isinstance(results[0], list) or type(results[1]) is not int:
                raise ProtocolError(
                    f"the Maru server at {self.url} answered {verb.value} with something else than a list"
                )
            yield from results[0]
            if results[1] <= start:
                return
            start = results[1]

    def _ask(self, op: Op, *arguments: Any) -> list[Any]:
        with self._channel() as channel:
            channel.send(encode((int(op), 1, 0, 0, *arguments)))
            reply = channel.receive(1, self.timeout)
        if reply is None:
            hint = "" if self.keys is None else f"; {nobody_answers(self.url, self.keys)}"
            raise Unavailable(f"no answer within {self.timeout:g} s{hint}")
        if reply[2] != Code.OK:
            text = reply[3] if len(reply) == 4 else "no reason given"
            raise ServerError(reply[2], f"the Maru server at {self.url} refuses {op.name}: {text}")
        return reply[3:]

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        with new_context() as context:
            channel = Channel(context, self.url, self.keys)
            try:
                yield channel
            finally:
                channel.close()
