"""The one exception tree of Maru.

Every error shows the culprit, the actual value and the remedy in its text. Catch :class:`MaruError` at the
edge of an engine: whatever goes wrong inside Maru is a miss or a skipped store there, never a dead engine.
"""

from __future__ import annotations


class MaruError(Exception):
    """Base of every error that Maru raises on purpose."""


class ConfigError(MaruError):
    """A setting is unknown, of the wrong type, or out of range. Raised at start, never later."""


class PluginError(MaruError):
    """A plugin could not be used and ``MARU_PLUGINS_STRICT=1`` makes that fatal."""


class BackendError(MaruError):
    """A storage backend could not create or map a pool (size, path, permission)."""


class LayoutError(MaruError):
    """A paged KV layout is not known, or not one whose packing a test has verified."""


class TransferError(MaruError):
    """Bytes could not be moved between paged memory and a pool."""


class ProtocolError(MaruError):
    """A message is malformed: wrong type, wrong length, unknown operation, over a limit."""


class ServerError(MaruError):
    """The server answered a request with an error; ``code`` is one of :class:`maru_core.protocol.Code`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class VersionMismatch(MaruError):
    """Client and server speak different protocol versions; the text names both."""


class Unavailable(MaruError):
    """The server did not answer within the deadline, or is known to be away. The caller goes on without."""


class StaleEpoch(Unavailable):
    """The server restarted: what was held under the old epoch is void. Nothing of the request was executed."""
