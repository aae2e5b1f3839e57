"""The protocol version. Client and server must agree exactly; a mismatch is refused with both versions named."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 3
