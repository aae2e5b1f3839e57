"""Which pools a server of this runtime folder served last: only exactly these may be served again as they are.

A pool that was left out for a while may hold objects that were deleted meanwhile, and pages that a client still writes
although the server in between could not know of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from maru_core import logs


class ServedPools:
    """Identities of pools, in order, in a file of the runtime folder that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def any(self) -> bool:
        """Whether any were left: by a server that was killed, or kept them."""
        return self._path.exists()

    def are(self, identities: Sequence[bytes]) -> bool:
        """Whether these were served last. False when that is not known."""
        try:
            return bool(json.loads(self._path.read_text()) == _told(identities))
        except (OSError, ValueError, RecursionError):
            return False

    def note(self, identities: Sequence[bytes]) -> None:
        """These are served from here on. When it cannot be noted, the next start is a cold one."""
        if self.are(identities):
            return
        temporary = self._path.with_suffix(".new")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
                json.dump(_told(identities), file)
            os.replace(temporary, self._path)
        except OSError as error:
            logs.get_logger(__name__).warning(
                "not noted which pools are served: after a crash the next start will be cold",
                path=str(self._path),
                reason=error.strerror,
            )

    def forget(self) -> None:
        """They are gone."""
        self._path.unlink(missing_ok=True)


def _told(identities: Sequence[bytes]) -> list[str]:
    return [identity.hex() for identity in identities]
