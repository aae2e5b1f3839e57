"""Fixtures of the client's tests that the command's tests use too."""

from tests.client.conftest import folder

__all__ = ["folder"]
