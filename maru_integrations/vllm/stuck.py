"""A load that was told to stop and goes on: when that is too long, and what people are told then."""

from __future__ import annotations

from attrs import define

from maru_core import logs
from maru_integrations.vllm.loadqueue import LoadJob

#: A copy that was asked to stop may take that long before it is told of, in seconds: nothing takes longer than a piece.
_GRACE = 2.0


@define
class StuckWatch:
    """Looked at once per step, under the loader's lock."""

    #: A load that goes on although nobody wants more of it, and since when that is known.
    _late: tuple[LoadJob, float] | None = None
    #: The same one once that is for too long; it was told of then.
    stuck: LoadJob | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no load was late when it was looked at last."""
        return self._late is None

    def look(self, late: LoadJob | None, now: float, engine: str) -> bool:
        """Whether ``late``, what was asked to stop and goes on, is stuck by now; true once.

        Not what is only now seen to be late. ``engine``: who moves its bytes, for people.
        """
        if late is None:
            self._late = self.stuck = None
        elif self._late is None or self._late[0] is not late:
            self._late, self.stuck = (late, now), None
        elif now - self._late[1] >= _GRACE and self.stuck is None:
            self.stuck = late
            _tell(late, now, engine)
            return True
        return False


def _tell(late: LoadJob, now: float, engine: str) -> None:
    logs.get_logger(__name__).error(
        "maru.load_stuck",
        engine=engine,
        request=late.op.request_id,
        key=late.op.keys[late.good].hex(),
        objects_done=late.good,
        of=len(late.op.keys),
        seconds=round(now - late.arrived, 2),
        effect="a call should have ended and has not returned; blocks that it may write to stay reserved, and hits "
        "are computed, until it does",
        remedy="look at the device and at the memory of the pool; if it does not return, restart this engine, with "
        "another maru_transfer_engine or, where it is slow and not stuck, a longer maru_load_timeout",
    )
