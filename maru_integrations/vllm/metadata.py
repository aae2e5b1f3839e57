"""What the scheduler side tells the workers each step, and what they answer. Plain values: they cross processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@frozen
class LoadOp:
    """Objects to copy into one request's blocks, under a lease that the scheduler side holds until this is answered.

    The request's absolute tokens ``[first, last)`` lie in chunks ``chunk, chunk+1, …``, one object each; ``blocks``
    are the request's blocks from the first token of ``chunk`` on. Columns have one item per object. ``parked``: the
    request waits for its completion to be reported.
    """

    load_id: int
    request_id: str
    parked: bool
    epoch: int
    chunk: int
    first: int
    last: int
    blocks: Sequence[int]
    entries: Sequence[int]
    generations: Sequence[int]
    lengths: Sequence[int]
    keys: Sequence[bytes]


@frozen
class StoreOp:
    """Chunks of one request that are complete once this step has run.

    ``blocks`` holds ``chunk_tokens / block_size`` ids for each chunk, one chunk after the other.
    """

    request_id: str
    chunks: Sequence[int]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    blocks: Sequence[int]


@define
class MaruConnectorMetadata(KVConnectorMetadata):
    """One step's work. ``weights_epoch`` is the one that the scheduler's session has seen."""

    weights_epoch: int = 0
    loads: Sequence[LoadOp] = ()
    stores: Sequence[StoreOp] = ()


@frozen
class LoadResult:
    """``good`` counts the objects from the front that arrived and were proven to be the granted ones."""

    load_id: int
    good: int


@define
class MaruWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's answers: loads that ended, and per request the first chunk that it was told to store and did not."""

    loads: list[LoadResult] = field(factory=list)
    unsaved: dict[str, int] = field(factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Answers of several ranks: a load is as good as its worst rank, a chunk is unsaved if any rank says so."""
        assert isinstance(other, MaruWorkerMetadata)
        loads = {result.load_id: result for result in self.loads}
        for result in other.loads:
            mine = loads.get(result.load_id)
            if mine is None or result.good < mine.good:
                loads[result.load_id] = result
        return MaruWorkerMetadata(list(loads.values()), least(self.unsaved, other.unsaved))


@frozen
class MaruHandshake(KVConnectorHandshakeMetadata):
    """What a worker found out at start: why it cannot serve this engine's KV layout, or ``None``."""

    refused: str | None


def least(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Per key the smaller value of two mappings."""
    merged = dict(first)
    for key, value in second.items():
        merged[key] = min(value, merged.get(key, value))
    return merged
