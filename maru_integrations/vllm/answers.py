"""What a worker has done and not yet told: every load it was given is answered once, whoever failed to do it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from maru_integrations.vllm.metadata import LoadOp, LoadResult, MaruWorkerMetadata, StoreOp, least


@define
class Answers:
    """Collects answers until vLLM asks for them; each ``take_*`` hands out and forgets."""

    _loads: list[LoadResult] = field(factory=list, init=False)
    _unsaved: dict[str, int] = field(factory=dict, init=False)
    _received: set[str] = field(factory=set, init=False)
    _failed_blocks: set[int] = field(factory=set, init=False)

    def load_ended(self, op: LoadOp, good: int, failed_blocks: Sequence[int]) -> None:
        """``good`` objects from the front arrived; ``failed_blocks`` hold undefined KV."""
        self._loads.append(LoadResult(op.load_id, good))
        if op.parked:
            self._received.add(op.request_id)
        self._failed_blocks.update(failed_blocks)

    def unsaved(self, ops: Sequence[StoreOp]) -> None:
        """These chunks were to be stored and could be later: plan them again."""
        self._unsaved = least(self._unsaved, {op.request_id: op.chunks[0] for op in ops})

    def take_received(self) -> set[str]:
        """Parked requests whose load ended, well or not."""
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that a load was to fill and did not."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_metadata(self) -> MaruWorkerMetadata | None:
        """Answers for the scheduler side; ``None`` when there are none."""
        if not self._loads and not self._unsaved:
            return None
        message = MaruWorkerMetadata(self._loads, self._unsaved)
        self._loads, self._unsaved = [], {}
        return message
