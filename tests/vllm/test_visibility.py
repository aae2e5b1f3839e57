"""A worker's copies between the barriers: those of any transfer engine, which the worker only sees begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_core.protocol import Op
from tests.client.test_visibility import Fabric, Machine, fabric, lines_of, traced

pytest.importorskip("vllm")

from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.metadata import LoadOp, StoreOp
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.worker import MaruWorker

pytestmark = pytest.mark.slow

__all__ = ["fabric", "traced"]

STORED = ObjectLayout(num_planes=2, num_layers=2, chunk_tokens=16, hidden=64, element_size=2)


class Engine:
    """A transfer engine that notes when it copies, and moves whole objects."""

    def __init__(self, events: list[tuple[Any, ...]], pages: bytes = b"") -> None:
        self.events = events
        self.pages = pages
        self.loaded = b""

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            self.events.append(("copy", None))
            copy.buffer[:] = self.pages[copy.chunk * STORED.nbytes :][: STORED.nbytes]

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            self.events.append(("copy", None))
            self.loaded += bytes(copy.buffer)

    def close(self) -> None:
        pass


def worker(machine: Machine, engine: Engine) -> MaruWorker:
    link = Link(machine.handler, engine, STORED)
    return MaruWorker(lambda: link, Answers(), ChunkShape(16, 16, STORED.nbytes))


def test_a_store_is_published_after_the_copy_and_a_load_acquired_before_it(
    fabric: Fabric, traced: Callable[[Machine], list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    one, two = fabric.host(), fabric.host()
    pages = bytes(range(256)) * (5 * STORED.nbytes // 256)
    keys = [bytes([number]) * 32 for number in range(5)]
    for round_ in range(2):  # the second time over pages of which both caches have old lines
        engine = Engine(traced(one), pages)
        parents = [bytes(32), *keys[:-1]]
        worker(one, engine)._store([StoreOp("r", range(5), keys, parents, range(5))], 0)
        names = [event[:2] for event in engine.events]
        left = names.index(("send", Op.COMMIT))
        published = [at for at, event in enumerate(engine.events) if event[0] == "publish"]
        copied = [at for at, event in enumerate(engine.events) if event[0] == "copy"]
        assert len(copied) == 5
        assert max(copied) < min(published) <= max(published) < left

        engine = Engine(traced(two))
        lease = two.handler.acquire(keys, leading=True)
        granted = len(engine.events)
        op = LoadOp(
            1, "r", False, lease.epoch, 0, 0, 80, range(5), lease.entries, lease.generations, lease.lengths, keys
        )
        assert worker(two, engine)._load(op) == 5
        assert engine.loaded == pages
        first = next(at for at, event in enumerate(engine.events) if event[0] == "copy")
        last = max(at for at, event in enumerate(engine.events) if event[0] == "copy")
        extents = two.extents(lease.entries, lease.lengths)
        assert lines_of(engine.events[granted:first], "acquire") >= extents
        # What proves the copy is looked at afresh once it is over.
        header = two.backend.hosts[0].descriptor.header_at(lease.entries[4])
        assert (0, header // 64) in lines_of(engine.events[last:], "acquire")
        two.handler.release(lease)
        pages = pages[::-1]
        assert all(deleted for deleted in one.handler.delete_keys(keys)), round_
        while any(two.handler.probe(keys)):
            pass
