"""Weights epochs on disk: a reset holds whatever happens to the server that did it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from maru_core import logs
from maru_core.errors import ConfigError
from maru_core.pool_format import DIGEST_SIZE

#: Epochs are below this: headers have 64 bits for them, and no server counts that far.
_END: Final = 1 << 63


class WeightsFile:
    """Weights epochs by namespace digest, in a file of the runtime folder that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: What could not be saved yet, and the reason that was logged last.
        self._unsaved: dict[bytes, int] | None = None
        self._told = ""

    def load(self) -> dict[bytes, int]:
        """What was saved last; nothing when there is no file. Raises ConfigError when it cannot be understood.

        Starting without it could let engines with old weights share with those that have new ones.
        """
        try:
            saved = json.loads(self._path.read_text())
            epochs = {bytes.fromhex(digest): epoch for digest, epoch in saved.items()}
            if any(len(digest) != DIGEST_SIZE for digest in epochs):
                raise ValueError(f"a digest does not have {DIGEST_SIZE} bytes")
            if any(type(epoch) is not int or not 0 <= epoch < _END for epoch in epochs.values()):
                raise ValueError("an epoch is no number of 63 bits")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"the weights epochs in {self._path} cannot be read: {error}; stop all engines and remove the file"
            ) from error
        return epochs

    def save(self, epochs: Mapping[bytes, int]) -> None:
        """Replace the file. A failure is logged, because a reset must not depend on a disk, and made good later."""
        self._unsaved = dict(epochs)
        self.retry()

    def retry(self) -> None:
        """Save what could not be saved before. Takes no time when there is nothing; never raises. Call now and then."""
        if self._unsaved is None:
            return
        log = logs.get_logger(__name__)
        try:
            self._replace(self._unsaved)
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}"
            if reason != self._told:
                self._told = reason
                log.error(
                    "weights epochs not saved: a reset is lost if this server ends before they are",
                    path=str(self._path),
                    reason=reason,
                )
            return
        self._unsaved = None
        if self._told:
            self._told = ""
            log.info("weights epochs saved at last", path=str(self._path))

    def _replace(self, epochs: Mapping[bytes, int]) -> None:
        temporary = self._path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({digest.hex(): epoch for digest, epoch in epochs.items()}, file)
        os.replace(temporary, self._path)
