"""When an engine says that the server refuses what it stores."""

from __future__ import annotations

from typing import Any

from attrs import define, field
from structlog.testing import capture_logs

from maru_core.errors import Unavailable
from maru_integrations.vllm.resets import OVERTAKES, Resets


@define
class Handler:
    weights_epoch: int = 0
    is_up: bool = True
    fails: bool = False

    def reset(self, timeout: float | None = None) -> int:
        if self.fails:
            raise Unavailable("nobody is there")
        self.weights_epoch += 1
        return self.weights_epoch


@define
class Engine:
    now: float = 100.0
    handler: Any = field(factory=Handler)
    resets: Resets = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.resets = Resets(self.handler, lambda: self.now)

    def refused(self) -> int:
        """How often it tells of one more store that was refused."""
        with capture_logs() as logs:
            self.resets.store_refused()
        return sum(entry["event"] == "maru.store_refused" for entry in logs)


def test_a_refused_store_is_told_once_per_reset() -> None:
    engine = Engine()
    assert [engine.refused() for _ in range(3)] == [1, 0, 0]
    assert engine.resets.reset()
    engine.now += OVERTAKES
    assert [engine.refused() for _ in range(3)] == [1, 0, 0]


def test_stores_that_a_reset_of_ones_own_overtook_are_not_told() -> None:
    engine = Engine()
    assert engine.resets.reset()
    engine.now += OVERTAKES - 0.1
    assert engine.refused() == 0
    engine.now += 0.1
    assert engine.refused() == 1


def test_nor_while_one_is_owed() -> None:
    """That was told already."""
    engine = Engine(handler=Handler(fails=True))
    assert not engine.resets.reset()
    assert engine.refused() == 0
    engine.handler.fails = False
    engine.now += 1
    assert engine.resets.caught_up()
    assert engine.refused() == 0
