"""The native copy against NumPy's, which the tests of torch-copy hold against a naive reader; and what it refuses."""

from __future__ import annotations

import gc
import mmap
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from native_copy import compile_copy, native_library

from maru_core.config import MaruConfig
from maru_core.contracts import Finding
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer import host_copy, host_library
from maru_transfer.host_copy import HostTransfer
from maru_transfer.host_views import NumpyPages
from maru_transfer.plan import extent, plan_pieces
from maru_transfer.torch_copy import TorchCopyEngine
from maru_transfer.torch_copy_plugin import diagnose


@frozen(eq=False)
class Memory:
    """Pages and objects as bytes that begin at any address, and room around them that nobody may touch."""

    paged: PagedLayout
    stored: ObjectLayout
    raw: np.ndarray[Any, Any]
    layers: list[torch.Tensor]
    objects: list[memoryview]

    @classmethod
    def make(cls, paged: PagedLayout, stored: ObjectLayout, objects: int, skew: tuple[int, int], seed: int) -> Memory:
        size = paged.element_size
        layer = extent(paged) * size
        room = paged.num_layers * (layer + 64 + size) + objects * (stored.nbytes + 64) + 512
        # Page-aligned: the same places in every memory of this form.
        raw = np.frombuffer(mmap.mmap(-1, room), np.uint8)
        raw[:] = np.random.default_rng(seed).integers(0, 256, room, np.uint8)
        at = -raw.ctypes.data % 64 + skew[0] * size
        layers = []
        for _ in range(paged.num_layers):
            layers.append(torch.from_numpy(raw[at : at + layer].view(f"i{size}" if size > 1 else "u1")))
            at += layer + size
        at += -(raw.ctypes.data + at) % 64 + skew[1]
        views = [memoryview(raw)[at + n * (stored.nbytes + 64) :][: stored.nbytes] for n in range(objects)]
        return cls(paged, stored, raw, layers, views)


def contiguous(order: str, sizes: dict[str, int]) -> dict[str, int]:
    """Strides of axes that are named from the outermost to the innermost."""
    strides, step = {}, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return strides


@st.composite
def layouts(draw: Any) -> tuple[PagedLayout, ObjectLayout]:
    """K and V in any order of their axes, apart or together, each in an order of its own."""
    sizes = {
        "p": 2,
        "b": draw(st.integers(1, 5)),
        "t": draw(st.sampled_from([1, 2, 7, 8, 16, 24, 33, 64, 130])),
        "h": draw(st.integers(1, 3)),
        "d": draw(st.sampled_from([1, 3, 8, 16, 20, 32, 48, 64, 80, 128])),
    }
    planes: tuple[PlaneStrides, ...]
    if draw(st.booleans()):
        # Each plane within a page by an order of its own: vLLM's CPU pages are one of these.
        inside = sizes["t"] * sizes["h"] * sizes["d"]
        orders = [draw(st.permutations("thd")) for _ in range(2)]
        steps = [contiguous("".join(order), sizes) for order in orders]
        planes = tuple(
            PlaneStrides(number * inside, 2 * inside, step["t"], step["h"], step["d"])
            for number, step in enumerate(steps)
        )
    else:
        step = contiguous("".join(draw(st.permutations("pbthd"))), sizes)
        planes = tuple(
            PlaneStrides(number * step["p"], step["b"], step["t"], step["h"], step["d"])
            for number in range(draw(st.integers(1, 2)))
        )
    element = draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 2))
    paged = PagedLayout(planes, layers, sizes["b"], sizes["t"], sizes["h"], sizes["d"], element)
    tokens = draw(st.sampled_from([sizes["t"], 2 * sizes["t"], max(1, sizes["t"] // 2), 5]))
    in_object = draw(st.sampled_from([1, layers]))
    return paged, ObjectLayout(len(planes), in_object, tokens, paged.hidden, element)


@st.composite
def transfers(draw: Any) -> tuple[PagedLayout, ObjectLayout, list[int], list[tuple[int, int, int, int | None]]]:
    paged, stored = draw(layouts())
    blocks = draw(st.permutations(range(paged.num_blocks)))
    tokens = paged.num_blocks * paged.block_size
    parts: list[tuple[int, int, int, int | None]] = []
    for chunk in range(min(3, -(-tokens // stored.chunk_tokens))):
        low, high = chunk * stored.chunk_tokens, min(tokens, (chunk + 1) * stored.chunk_tokens)
        first, last = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
        whole = draw(st.booleans())
        layer = None if stored.num_layers == paged.num_layers else draw(st.integers(0, paged.num_layers - 1))
        parts.append((chunk, low if whole else first, high if whole else last, layer))
    return paged, stored, list(blocks), parts


VECTORS = pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])


def check(
    direction: str,
    portable: bool,
    past_caches: bool,
    transfer: tuple[PagedLayout, ObjectLayout, list[int], list[tuple[int, int, int, int | None]]],
    skew: tuple[int, int],
) -> None:
    """The very bytes that NumPy moves and no other: also what is around pages and objects is compared."""
    paged, stored, blocks, parts = transfer
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_library, "PAST_CACHES", 0 if past_caches else 1 << 60)
        patch.setattr(host_copy, "MIN_BYTES_PER_THREAD", 1)
        for library in (native_library(portable=portable), None):
            memory = Memory.make(paged, stored, len(parts), skew, 7)
            copies = [
                ChunkCopy(chunk, first, last, buffer, layer)
                for (chunk, first, last, layer), buffer in zip(parts, memory.objects, strict=True)
            ]
            with closing(HostTransfer(memory.layers, paged, stored, threads=2, library=library)) as opened:
                getattr(opened, direction)(blocks, copies)
            found.append(memory.raw)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.slow
@VECTORS
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("past_caches", [True, False])
@settings(max_examples=100, deadline=None)
@given(transfer=transfers(), skew=st.sampled_from([(0, 0), (0, 1), (1, 0), (3, 8)]))
def test_it_moves_the_very_bytes_that_numpy_moves(direction, past_caches, portable, transfer, skew):
    check(direction, portable, past_caches, transfer, skew)


def cpu_pages(heads: int, tokens: int, dim: int) -> tuple[PlaneStrides, ...]:
    """vLLM's: per head K as ``[dim, tokens]``, then V as ``[tokens, dim]``."""
    half = tokens * dim
    page, head = 2 * heads * half, 2 * half
    return PlaneStrides(0, page, 1, head, tokens), PlaneStrides(half, page, dim, head, 1)


def packed(order: str) -> Any:
    """K and V of a token and head beside each other."""

    def planes(heads: int, tokens: int, dim: int) -> tuple[PlaneStrides, ...]:
        step = contiguous(order, {"t": tokens, "h": heads, "d": 2 * dim})
        page = 2 * heads * tokens * dim
        return tuple(PlaneStrides(number * dim, page, step["t"], step["h"], 1) for number in range(2))

    return planes


@VECTORS
@pytest.mark.parametrize("element", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4, 8))])
@pytest.mark.parametrize("planes", [cpu_pages, packed("thd"), packed("htd")], ids=["cpu", "nhd", "hnd"])
@pytest.mark.parametrize(
    ("tokens", "dim"), [(16, 64), (33, 48), (64, 80), (70, 96), (128, 64), (130, 128), (144, 20)], ids=str
)
def test_sizes_at_the_edges_of_vectors_and_tiles(planes: Any, tokens: int, dim: int, element: int, portable: bool):
    """Whole chunks and ragged ones; where pages and objects begin with a line of the cache, and where not."""
    paged = PagedLayout(planes(3, tokens, dim), 1, 4, tokens, 3, dim, element)
    stored = ObjectLayout(2, 1, 2 * tokens, 3 * dim, element)
    for direction in ("load", "store"):
        for skew in ((0, 0), (3, 0), (0, 8)):
            for first, last in ((2 * tokens, 4 * tokens), (2 * tokens + 1, 4 * tokens - 3)):
                transfer = paged, stored, [3, 0, 2, 1], [(0, 0, 2 * tokens, None), (1, first, last, None)]
                check(direction, portable, True, transfer, skew)


GEOMETRY = PagedLayout((PlaneStrides(0, 64, 16, 8, 1), PlaneStrides(256, 64, 16, 8, 1)), 3, 4, 4, 2, 8, 2)
STORED = ObjectLayout(2, 3, 8, 16, 2)


def refused(paged: PagedLayout = GEOMETRY, job: dict[str, int] | None = None, **piece: int) -> int:
    """The status of one job that is as given; the memory must stay as it was."""
    memory = Memory.make(GEOMETRY, STORED, 1, (0, 0), 7)
    before = memory.raw.copy()
    pages = host_library.NativePages(native_library(), memory.layers, paged, STORED)
    copies = [ChunkCopy(0, 0, 8, memory.objects[0])]
    work = pages.work(True, plan_pieces(GEOMETRY, STORED, [1, 2], copies), copies)
    for name, value in piece.items():
        work._keeps[2][0][name] = value
    for name, value in (job or {}).items():
        setattr(work._job, name, value)
    with pytest.raises(TransferError, match=r"status -[0-9]+; nothing was copied") as error:
        work.run()
    np.testing.assert_array_equal(memory.raw, before)
    return int(str(error.value).split("status ")[1].split(";")[0])


@pytest.mark.parametrize(
    "piece",
    [
        {"block": 4},
        {"slot": 4},
        {"tokens": 0},
        {"tokens": 13},
        {"block": 3, "tokens": 5},
        {"block": 1 << 31, "slot": 3},
        {"token": 1},
        {"token": 8},
        {"token": (1 << 32) - 1},
        {"tokens": (1 << 32) - 1},
        {"layer": 1},
        {"layer": (1 << 32) - 1},
        {"row": 1},
    ],
    ids=str,
)
def test_a_piece_that_is_not_within_its_pages_or_object_is_refused(piece: dict[str, int]) -> None:
    """plan_pieces makes none; C does not rely on it."""
    assert refused(**piece) == -4


def test_a_piece_ends_with_its_block_where_the_next_one_does_not_follow() -> None:
    """Blocks that lie between each other's tokens: the fifth token of one would be behind the pages."""
    apart = evolve(GEOMETRY, planes=tuple(PlaneStrides(first, 16, 64, 8, 1) for first in (0, 256)))
    assert refused(apart) == -4


@pytest.mark.parametrize("job", [{"direction": 2}, {"layers": 0}, {"layers": 4}, {"object_layers": 2}], ids=str)
def test_a_job_that_makes_no_sense_is_refused(job: dict[str, int]) -> None:
    assert refused(job=job) == -4


@pytest.mark.parametrize("name", ["geometry", "layer_addresses", "pieces"])
def test_null_is_refused(name: str) -> None:
    assert refused(job={name: 0}) == -1
    assert native_library().copy_pieces(None) == -1


def test_elements_that_no_vector_has_are_refused() -> None:
    assert refused(evolve(GEOMETRY, element_size=3)) == -4


def test_a_layout_that_the_library_cannot_express_goes_by_numpy() -> None:
    three = evolve(GEOMETRY, planes=(*GEOMETRY.planes, GEOMETRY.planes[0]))
    assert "3 planes" in (host_library.unsupported(three, STORED) or "")
    assert "above 4294967295" in (host_library.unsupported(evolve(GEOMETRY, num_blocks=1 << 32), STORED) or "")
    assert host_library.unsupported(GEOMETRY, STORED) is None
    memory = Memory.make(three, evolve(STORED, num_planes=3), 1, (0, 0), 7)
    with pytest.raises(TransferError, match="3 planes"):
        host_library.NativePages(native_library(), memory.layers, three, STORED)
    stored = evolve(STORED, num_planes=3)
    with closing(HostTransfer(memory.layers, three, stored, library=native_library())) as transfer:
        transfer.store([1, 2], [ChunkCopy(0, 0, 8, memory.objects[0])])
    planes = np.frombuffer(memory.objects[0], np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(planes[0], planes[2])
    assert (planes[0] != planes[1]).any()


def test_a_closed_transfer_lets_go_of_the_tensors() -> None:
    memory = Memory.make(GEOMETRY, STORED, 1, (0, 0), 7)
    references = [weakref.ref(layer) for layer in memory.layers]
    transfer = HostTransfer(memory.layers, GEOMETRY, STORED, library=native_library())
    transfer.store([1, 2], [ChunkCopy(0, 0, 8, memory.objects[0])])
    memory.layers.clear()
    assert all(reference() is not None for reference in references), "the transfer keeps them"
    transfer.close()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


class TestLoading:
    def test_a_missing_library_says_what_the_build_said(self, tmp_path: Path) -> None:
        place = tmp_path / host_library.LIBRARY
        assert "the native code was never built" in str(host_library.load(place))
        (tmp_path / "_build_info.json").write_text('{"copy": {"built": false, "reason": "no C", "remedy": "get one"}}')
        assert str(host_library.load(place)).endswith("does not exist: no C; get one")
        (tmp_path / "_build_info.json").write_text('{"copy": {"built": true}}')
        assert "it was built, and removed since; install Maru again" in str(host_library.load(place))

    def test_a_library_of_another_version_is_refused(self, tmp_path: Path) -> None:
        source = tmp_path / "other.c"
        source.write_text('__attribute__((visibility("default"))) unsigned maru_copy_abi_version(void) { return 7; }')
        place = compile_copy(tmp_path / host_library.LIBRARY, source)
        assert "version 7 of the interface, this Maru needs 1" in str(host_library.load(place))

    @pytest.mark.parametrize("content", [b"", b"not a library"])
    def test_a_file_that_is_no_library_is_refused(self, tmp_path: Path, content: bytes) -> None:
        place = tmp_path / host_library.LIBRARY
        place.write_bytes(content)
        assert "cannot be used: " in str(host_library.load(place))

    def test_the_engine_uses_it_or_says_why_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = Memory.make(GEOMETRY, STORED, 1, (0, 0), 7)
        for answer, kind in ((native_library(), host_library.NativePages), ("it was not built", NumpyPages)):
            monkeypatch.setattr(host_library, "load", lambda answer=answer: answer)
            with (
                structlog.testing.capture_logs() as logs,
                closing(TorchCopyEngine().open(memory.layers, GEOMETRY, STORED)) as transfer,
            ):
                assert isinstance(transfer._pages, kind)
            said = [{"event": "maru.copies_with_numpy", "log_level": "info", "reason": answer}]
            assert logs == (said if isinstance(answer, str) else [])

    def test_the_doctor_shows_it(self, tmp_path: Path) -> None:
        (tmp_path / "_build_info.json").write_text('{"copy": {"built": true}}')
        assert diagnose(MaruConfig(), tmp_path)[0] == Finding("ok", "host copies", "native")
        (tmp_path / "_build_info.json").write_text('{"copy": {"built": false, "reason": "no C", "remedy": "get one"}}')
        found = diagnose(MaruConfig(), tmp_path)[0]
        assert (found.level, found.remedy) == ("note", "get one")
        assert "NumPy" in found.text
        assert "no C" in found.text
