"""How long properties search: ``quick`` unless told otherwise, ``--hypothesis-profile=full`` in scripts/test.sh."""

from __future__ import annotations

from tests.budgets import register

register()
