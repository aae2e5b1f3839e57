"""The layerwise engine on a real GPU: bytes equal to torch-copy's in both formats, and order per layer.

Skipped where there is no CUDA device or the native library was not built.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from layered_checks import FORMATS, stored_as
from paged_forms import FORMS, Engine, Size
from test_kernel_cuda import INTEGERS, NEVER, SMALL, on_device, request

from maru_core.contracts import LoadsByLayer
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_transfer.kernel import Tuning
from maru_transfer.layerwise import LayerwiseEngine
from maru_transfer.torch_copy import TorchCopyEngine

REASON = LayerwiseEngine().import_error()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

#: (tuning, whether objects are locked)
WAYS = {
    "staged": (SMALL, True),
    "staged in batches": (evolve(SMALL, fold=0), True),
    "bounced": (SMALL, False),
    "direct": (evolve(SMALL, direct_bytes=1), True),
    "mapped": (evolve(SMALL, mapped_bytes=NEVER), True),
    "scattered": (evolve(SMALL, scattered=1, scattered_grid=2), True),
    "scattered in part": (evolve(SMALL, slots=2, scattered=3, fold=0), True),
    "as tuned": (Tuning(), True),
}
SIZES = [(3, 16, 8, 64), (2, 8, 3, 80), (1, 5, 7, 12)]


@pytest.fixture(autouse=True)
def _slices_of_one_layer(monkeypatch):
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", 1)


def copies_for(
    parts: list[tuple[int, int, int]], stored: ObjectLayout, layers: int, *, locked: bool
) -> list[ChunkCopy]:
    """Objects that follow each other, each at an aligned address, and one at another distance."""
    which = [None] if stored.num_layers == layers else list(range(layers))
    step = -(-stored.nbytes // 256) * 256
    memory = torch.full((step * (len(parts) * len(which) + 1),), 0xAB, dtype=torch.uint8, pin_memory=locked)
    raw = memoryview(memory.numpy())
    places = [step * number for number in range(len(parts) * len(which))]
    places[-1] += step
    return [
        ChunkCopy(*part, raw[place : place + stored.nbytes], layer)
        for (part, layer), place in zip(product(parts, which), places, strict=True)
    ]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_bytes_are_those_of_torch_copy(name: str, way: str, form: str):
    """Stores, loads, and loads layer by layer by either engine."""
    tuning, locked = WAYS[way]
    for number, ((layers, block_size, heads, head_size), element) in enumerate(product(SIZES, INTEGERS)):
        together = number % 2 == 0
        chunk_tokens = 4 * block_size + (3 if together else 0)
        size = Size(layers, 3 * chunk_tokens // block_size + 3, block_size, heads, head_size, element)
        source = Engine.make(name, size, 7)
        stored = stored_as(source, chunk_tokens, form)
        table, parts = request(size, chunk_tokens, together=together)
        wanted = copies_for(parts, stored, layers, locked=False)
        found = copies_for(parts, stored, layers, locked=locked)
        tensors = on_device(source)
        for engine, copies in ((TorchCopyEngine(), wanted), (LayerwiseEngine(tuning), found)):
            with closing(engine.open(tensors, source.paged, stored)) as transfer:
                transfer.store(table, copies)
        for one, other in zip(wanted, found, strict=True):
            tokens = np.r_[one.first - one.chunk * chunk_tokens : one.last - one.chunk * chunk_tokens]
            shape = (stored.num_planes * stored.num_layers, chunk_tokens, -1)
            here, there = (np.frombuffer(c.buffer, np.uint8).reshape(shape) for c in (one, other))
            assert (here[:, tokens] == there[:, tokens]).all(), (size, together)
            assert (np.delete(there, tokens, axis=1) == 0xAB).all(), (size, together)
        results = []
        for engine, copies, by_layer in (
            (TorchCopyEngine(), wanted, False),
            (TorchCopyEngine(), wanted, True),
            (LayerwiseEngine(tuning), found, False),
            (LayerwiseEngine(tuning), found, True),
        ):
            target = Engine.make(name, size, None)
            tensors = on_device(target)
            with closing(engine.open(tensors, target.paged, stored)) as transfer:
                if by_layer:
                    assert isinstance(transfer, LoadsByLayer)
                    load = transfer.begin_load(table, copies)
                    load.finish()
                    assert load.layers_done() == layers
                else:
                    transfer.load(table, copies)
                # Loaded layers are there for every stream, the others for the current one.
                results.append(tensors[0].clone())
        for result in results[1:]:
            assert torch.equal(results[0], result), (size, together)


SIZE = Size(L=8, NB=66, BS=16, NH=8, HS=128)
TABLE = list(range(64, 0, -1))
USED = torch.tensor(TABLE)


@contextmanager
def opened(way: str, form: str, chunk_tokens: int = 256) -> Iterator[tuple[Any, torch.Tensor, list[ChunkCopy], Engine]]:
    """A transfer, its pages as [layer, plane, block, element], and objects of four chunks."""
    tuning, locked = WAYS[way]
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = stored_as(engine, chunk_tokens, form)
    layers = on_device(engine)
    parts = [(chunk, chunk_tokens * chunk, chunk_tokens * (chunk + 1)) for chunk in range(4)]
    copies = copies_for(parts, stored, SIZE.L, locked=locked)
    with closing(LayerwiseEngine(tuning).open(layers, engine.paged, stored)) as transfer:
        yield transfer, layers[0].view(SIZE.L, 2, SIZE.NB, -1), copies, engine


def fill(copies: list[ChunkCopy], value: int) -> None:
    """Every layer's elements are ``value * 10 + layer``."""
    for copy in copies:
        array = np.frombuffer(copy.buffer, np.int16)
        if copy.layer is None:
            array.reshape(2, SIZE.L, -1)[:] = value * 10 + np.arange(SIZE.L)[:, None]
        else:
            array[:] = value * 10 + copy.layer


def right_reads(way: str, form: str, rounds: int, *, waits: bool = True) -> int:
    """Loads of which another thread's stream read every layer right; ``waits``: behind its wait for that layer."""
    used = USED[:16].cuda()
    right = 0
    with opened(way, form, 64) as (transfer, pages, copies, _):
        stream = torch.cuda.Stream()
        for value in range(1, rounds + 1):
            fill(copies, value)
            torch.cuda.synchronize()
            torch.cuda._sleep(5_000_000)  # what is on the loader's stream comes first
            before = pages[:, :, used].clone()
            load = transfer.begin_load(TABLE, copies)
            seen: list[torch.Tensor] = []

            def compute(load: Any = load, seen: list[torch.Tensor] = seen) -> None:
                with torch.cuda.stream(stream):
                    for layer in range(SIZE.L):
                        if waits:
                            load.wait_layer(layer)
                        seen.append(pages[layer][:, used].clone())

            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            load.finish()
            stream.synchronize()
            torch.cuda.current_stream().synchronize()
            old = (
                bool((before == 0xEE).all())
                if value == 1
                else all(bool((before[layer] == (value - 1) * 10 + layer).all()) for layer in range(SIZE.L))
            )
            right += old and all(bool((seen[layer] == value * 10 + layer).all()) for layer in range(SIZE.L))
    return right


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_waits_for_a_layer_reads_it_while_later_ones_are_under_way(way: str, form: str):
    """150 of 150, in true layer order."""
    assert right_reads(way, form, 150) == 150


@pytest.mark.parametrize("way", WAYS)
def test_without_the_wait_it_reads_what_was_there_before(way: str):
    """So that the test above would see it if a wait did nothing."""
    assert right_reads(way, "chunkwise", 30, waits=False) < 15


@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_is_read_long_before_the_last_one_has_arrived(form: str):
    """Layer 0 is done, and was read by a stream, while the bus is still busy with later ones."""
    with opened("as tuned", form) as (transfer, pages, copies, _):
        stream, used = torch.cuda.Stream(), USED.cuda()
        early = 0
        for value in range(1, 21):
            fill(copies, value)
            torch.cuda.synchronize()
            load = transfer.begin_load(TABLE, copies)
            with torch.cuda.stream(stream):
                load.wait_layer(0)
                seen = pages[0][:, used].clone()
            stream.synchronize()
            done = load.layers_done()
            early += done < SIZE.L
            assert bool((seen == value * 10).all())
            load.finish()
            assert 1 <= done <= load.layers_done() == SIZE.L
        assert early >= 5


@pytest.mark.parametrize("way", ["staged", "as tuned"])
def test_a_load_that_is_cancelled_says_so_and_the_next_one_is_right(way: str):
    used = USED.cuda()
    with opened(way, "chunkwise") as (transfer, pages, copies, _):
        fill(copies, 1)
        loads = [transfer.begin_load(TABLE, copies) for _ in range(4)]
        for load in loads[1:]:
            load.cancel()
        loads[0].finish()
        cancelled = 0
        for load in loads[1:]:
            try:
                load.finish()
            except TransferError as error:
                cancelled += "cancelled" in str(error)
        assert cancelled > 0
        fill(copies, 2)
        transfer.begin_load(TABLE, copies).finish()
        for layer in range(SIZE.L):
            assert bool((pages[layer][:, used] == 20 + layer).all())


def test_torch_copy_orders_streams_by_layer_too():
    used = USED.cuda()
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = stored_as(engine, 256, "chunkwise")
    layers = on_device(engine)
    pages = layers[0].view(SIZE.L, 2, SIZE.NB, -1)
    copies = copies_for([(chunk, 256 * chunk, 256 * chunk + 256) for chunk in range(4)], stored, SIZE.L, locked=True)
    stream = torch.cuda.Stream()
    with closing(TorchCopyEngine().open(layers, engine.paged, stored)) as transfer:
        assert isinstance(transfer, LoadsByLayer)
        for value in range(1, 31):
            fill(copies, value)
            torch.cuda.synchronize()
            load = transfer.begin_load(TABLE, copies)
            with torch.cuda.stream(stream):
                for layer in range(SIZE.L):
                    load.wait_layer(layer)
                    seen = pages[layer][:, used].clone()
                    assert bool((seen == value * 10 + layer).all())
            load.finish()
