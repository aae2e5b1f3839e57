"""Weights epochs on disk: a reset holds whatever happens to the server that did it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

from maru_core.errors import ConfigError


class WeightsFile:
    """Weights epochs by namespace digest, in a file of the runtime folder that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[bytes, int]:
        """What was saved last; nothing when there is no file. Raises ConfigError when it cannot be understood.

        Starting without it could let engines with old weights share with those that have new ones.
        """
        try:
            saved = json.loads(self._path.read_text())
            epochs = {bytes.fromhex(digest): epoch for digest, epoch in saved.items()}
            if any(type(epoch) is not int or epoch < 0 for epoch in epochs.values()):
                raise ValueError("an epoch is not a number")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the weights epochs in {self._path} cannot be read: {error}; stop all engines and remove the file"
            ) from error
        return epochs

    def save(self, epochs: Mapping[bytes, int]) -> None:
        """Replace the file; a failure is logged, because a reset must not depend on a disk."""
        temporary = self._path.with_suffix(".new")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump({digest.hex(): epoch for digest, epoch in epochs.items()}, file)
            os.replace(temporary, self._path)
        except OSError as error:
            structlog.get_logger(__name__).error("weights epochs not saved", path=str(self._path), reason=str(error))
