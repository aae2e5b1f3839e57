"""The granules that pools are asked for."""

from __future__ import annotations

import pytest

from maru_core.pools import granule_for


@pytest.mark.parametrize("object_bytes", [1, 4096, 100_000, 5_898_240, 32 << 20, 33_554_433])
def test_granules_waste_little(object_bytes: int) -> None:
    """The derived granule wastes at most a hundredth of an object, unless objects are tiny."""
    granule = granule_for(object_bytes)
    assert granule & (granule - 1) == 0
    assert 4096 <= granule <= 2 << 20
    waste = -(-object_bytes // granule) * granule - object_bytes
    assert waste <= object_bytes // 100 or granule == 4096
