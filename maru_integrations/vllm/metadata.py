"""What the scheduler side tells the workers each step, and what they answer. Plain values: they cross processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field, frozen
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

#: Reasons for which objects of a store are not in the pool. ``LOAD_FAILED``: what they were to be copied from may hold
#: undefined KV; ``PREEMPTED``: their blocks were taken away; ``QUEUE_FULL``: copies are slower than prefill;
#: ``LATE``: they took too long, or something before them has not returned; ``NO_ROOM``: nothing could be evicted;
#: ``UNAVAILABLE``: no server; ``REFUSED``: a reset came between; ``ERROR``: anything else.
LOAD_FAILED: Final = "load_failed"
PREEMPTED: Final = "preempted"
QUEUE_FULL: Final = "queue_full"
LATE: Final = "late"
NO_ROOM: Final = "no_room"
UNAVAILABLE: Final = "unavailable"
REFUSED: Final = "refused"
ERROR: Final = "error"
#: A further reason for which a load is not complete.
CANCELLED: Final = "cancelled"


@frozen
class LoadOp:
    """Objects to copy into one request's blocks, under a lease that the scheduler side holds until this is answered.

    The request's absolute tokens ``[first, last)`` lie in chunks ``chunk, chunk+1, …``; ``blocks`` are the request's
    blocks from the first token of ``chunk`` on. Columns have one item per object: one for each chunk, or in the
    layerwise format one for each of its layers, from layer 0 on, before those of the next chunk. ``parked``: the
    request waits for its completion to be reported. ``deadline``: seconds from when the worker gets this, after which
    what has not been loaded counts as failed; 0: none. ``overlap``: the request may be reported as received before
    all of its layers are there.
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
    deadline: float = 0.0
    overlap: bool = False


@frozen
class StoreOp:
    """Chunks of one request that are complete once this step has run.

    ``blocks`` holds ``chunk_tokens / block_size`` ids for each chunk, one chunk after the other; ``keys`` and
    ``parents`` have one item per object, as the columns of :class:`LoadOp`. ``asynchronous``: the
    copy may run between steps and is answered with one :class:`StoreResult`, whatever becomes of it; until then the
    blocks stay what they are, unless the request is named in ``preempted`` before. Others are done when their step is.
    """

    request_id: str
    chunks: Sequence[int]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    blocks: Sequence[int]
    store_id: int = 0
    asynchronous: bool = False


@define
class MaruConnectorMetadata(KVConnectorMetadata):
    """One step's work. ``weights_epoch`` is the one that the scheduler's session has seen; stores run under it.

    ``held``: finished requests whose blocks vLLM keeps until the worker has reported each of them, once, as sent: when
    none of its stores will read them, or what one still reads is thrown away. ``preempted``: requests that lose their
    blocks in this step; before ``handle_preemptions`` returns, their queued stores are cancelled and those that run
    have read their last byte that counts. ``cancelled_loads``: loads that nobody waits for any more; they stop soon and
    are still answered, and those whose requests went on before they were complete write to no block any more before
    ``handle_preemptions`` returns.
    ``received``: parked requests that vLLM has noted as received since the step before, so that any request of this
    step may read their blocks.
    ``undefined``: blocks that requests of this step read although what they hold is undefined: a worker reports them as
    failed with this step. Their load failed, which vLLM overlooked or left to another request that has gone since.
    ``computing``: how many requests the step computes.
    """

    weights_epoch: int = 0
    loads: Sequence[LoadOp] = ()
    stores: Sequence[StoreOp] = ()
    held: Sequence[str] = ()
    preempted: Sequence[str] = ()
    cancelled_loads: Sequence[int] = ()
    received: Sequence[str] = ()
    undefined: Sequence[int] = ()
    computing: int = 0


@frozen
class LoadResult:
    """``good`` counts the objects from the front that arrived and were proven to be the granted ones.

    ``reason`` when that is not all: empty if the next object is at fault, which is then not promised again; else
    ``CANCELLED``, ``LATE`` (the deadline passed, or a load before it does not return) or
    ``UNAVAILABLE`` (the worker cannot load at all).
    """

    load_id: int
    good: int
    reason: str = ""


@frozen
class StoreResult:
    """``kept`` objects of an asynchronous store are in the pool now; ``reason`` says why others are not, if any are."""

    store_id: int
    kept: int
    reason: str = ""


@define
class MaruWorkerMetadata(KVConnectorWorkerMetadata):
    """What a worker has done since it was last asked.

    Loads that ended; per request the first chunk that it was told to store in a step and did not; asynchronous stores
    that ended. ``load_bytes`` were moved by loads within ``load_seconds`` of work, which measures the link. ``dropped``
    counts objects that were not stored, by reason.
    """

    loads: list[LoadResult] = field(factory=list)
    unsaved: dict[str, int] = field(factory=dict)
    stored: list[StoreResult] = field(factory=list)
    load_bytes: int = 0
    load_seconds: float = 0.0
    dropped: dict[str, int] = field(factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Answers of several ranks: loads and stores are as good as their worst rank, and as slow as the slowest."""
        assert isinstance(other, MaruWorkerMetadata)
        loads = {result.load_id: result for result in self.loads}
        for result in other.loads:
            mine = loads.get(result.load_id)
            if mine is None or result.good < mine.good:
                loads[result.load_id] = result
        stored = {result.store_id: result for result in self.stored}
        for answer in other.stored:
            ours = stored.get(answer.store_id)
            if ours is None or answer.kept < ours.kept:
                stored[answer.store_id] = answer
        return MaruWorkerMetadata(
            list(loads.values()),
            least(self.unsaved, other.unsaved),
            list(stored.values()),
            self.load_bytes + other.load_bytes,
            max(self.load_seconds, other.load_seconds),
            total(self.dropped, other.dropped),
        )


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


def total(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Per key the sum of two mappings."""
    merged = dict(first)
    for key, value in second.items():
        merged[key] = merged.get(key, 0) + value
    return merged
