"""A look at a server without a session: for tools, never for engines."""

from __future__ import annotations

from typing import Any

import zmq

from maru_core.client.channel import Channel
from maru_core.errors import ProtocolError, ServerError
from maru_core.protocol import Op
from maru_core.protocol.codec import encode


def server_stats(url: str, timeout: float) -> dict[str, Any] | None:
    """What the server at ``url`` counts, ``None`` when none answers within ``timeout`` seconds.

    Raises ConfigError (address), ServerError, ProtocolError.
    """
    with zmq.Context() as context:
        channel = Channel(context, url)
        try:
            channel.send(encode((int(Op.STATS), 1, 0, 0)))
            reply = channel.receive(1, timeout)
        finally:
            channel.close()
    if reply is None:
        return None
    if reply[2] != 0:
        raise ServerError(reply[2], f"the Maru server at {url} refuses STATS: {reply[3:]}")
    if len(reply) != 4 or not isinstance(reply[3], dict):
        raise ProtocolError(f"the Maru server at {url} answered STATS with {len(reply) - 3} results, expected one map")
    return reply[3]
