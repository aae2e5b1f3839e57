"""Layers of chunks on a real server: one chain, of which eviction takes the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_core.client import MaruHandler
from maru_core.keys import KeyChain
from maru_core.protocol import Presence
from tests.client.real import NAMESPACE, Folder

CHUNKS, LAYERS = 12, 5


@pytest.fixture
def handler(maru_runtime_dir: Path) -> Iterator[MaruHandler]:
    folder = Folder(maru_runtime_dir)
    yield folder.connect(pool_size="1M", eviction_policy="lru")
    folder.end()


def store(handler: MaruHandler, chain: KeyChain, chunks: range) -> None:
    keys, parents = chain.objects(chunks)
    grants = handler.reserve(keys, 4096, parents)
    handler.commit(grants)


@pytest.mark.slow
def test_eviction_takes_the_last_layers_of_the_last_chunks_first(handler: MaruHandler) -> None:
    """What is left of a prompt is its front without a hole, so that as many whole chunks as can be are hits."""
    chain = KeyChain(NAMESPACE.root, 4, (), LAYERS)
    chain.extend(list(range(4 * CHUNKS)), 4 * CHUNKS)
    for chunk in range(CHUNKS):
        store(handler, chain, range(chunk, chunk + 1))
    keys = chain.object_keys(0, CHUNKS)
    seen = set()
    for number in range(1000):
        left = handler.probe(keys)
        there = len(left) - len(left.lstrip(bytes([Presence.READY])))
        assert left.count(Presence.READY) == there, f"a hole in {list(left)}"
        seen.add(there)
        if not there:
            break
        other = KeyChain(NAMESPACE.root, 4, (("other", number.to_bytes(2, "little")),))
        other.extend(list(range(4)), 4)
        store(handler, other, range(1))
    assert any(count % LAYERS for count in seen), "some chunk was seen with a part of its layers"
