"""Compares, inside a worker of vLLM, every object that Maru stores or loads with the pages it belongs to.

``worker_extension_cls="benchmarks.pages.Pages"`` adds two methods to vLLM's worker, for ``collective_rpc``. Pages are
read by plain indexing, which has nothing in common with the transfer engines. It costs time, so not while that is
measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def tokens_of(layer: torch.Tensor, block: int) -> torch.Tensor:
    """K and V of the tokens of one block, ``[2, tokens, heads * head_size]``.

    FlashAttention's pages are ``[2, blocks, tokens, heads, head_size]``. Those of the CPU, ``[blocks, heads, tokens,
    2 * head_size]``, hold per head first K as ``[head_size, tokens]``, then V as ``[tokens, head_size]``.
    """
    if layer.ndim == 5 and layer.shape[0] == 2:
        return layer[:, block].flatten(2)
    if layer.ndim == 4:
        heads, count, width = layer.shape[1:]
        keys, values = layer[block].reshape(heads, 2, count * width // 2).unbind(1)
        return torch.stack(
            [
                keys.reshape(heads, width // 2, count).permute(2, 0, 1).flatten(1),
                values.reshape(heads, count, width // 2).permute(1, 0, 2).flatten(1),
            ]
        )
    raise ValueError(f"pages of shape {tuple(layer.shape)} are not known here")


def wrong(layers: Sequence[torch.Tensor], blocks: Sequence[int], copy: Any, block_size: int) -> bool:
    """Whether the object of ``copy`` differs from the pages in any byte of the tokens that it moves."""
    only = getattr(copy, "layer", None)
    chosen = layers if only is None else [layers[only]]
    first, last = copy.first // block_size, -(-copy.last // block_size)
    pages = torch.stack(
        [torch.cat([tokens_of(layer, blocks[index]) for index in range(first, last)], 1) for layer in chosen], 1
    ).cpu()
    begin = copy.first - first * block_size
    count = copy.last - copy.first
    stored = torch.frombuffer(bytearray(copy.buffer), dtype=pages.dtype).view(2, len(chosen), -1, pages.shape[-1])
    # Objects are whole chunks; a copy may move a part of the tokens of one.
    offset = copy.first - copy.chunk * stored.shape[2]
    one, other = pages[:, :, begin : begin + count], stored[:, :, offset : offset + count]
    return not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Pages:
    """Mixed into vLLM's worker, hence the names."""

    model_runner: Any

    def maru_watch_pages(self) -> None:
        """From now on compare what every transfer moves."""
        from maru_transfer import device_copy, host_copy, kernel

        self._maru_seen = {"stored": 0, "stored_wrong": 0, "loaded": 0, "loaded_wrong": 0}
        lock = threading.Lock()
        layers = list(self.model_runner.kv_caches)
        size = self.model_runner.cache_config.block_size

        def compare(kind: str, blocks: Sequence[int], copies: Sequence[Any]) -> None:
            found = sum(wrong(layers, blocks, copy, size) for copy in copies)
            with lock:
                self._maru_seen[kind] += len(copies)
                self._maru_seen[f"{kind}_wrong"] += found

        for transfer in (kernel.KernelTransfer, device_copy.DeviceTransfer, host_copy.HostTransfer):
            for kind in _with_subclasses(transfer):
                _watch(kind, compare)

    def maru_seen_pages(self) -> dict[str, int]:
        """How many objects were compared, and how many of them were wrong."""
        return dict(self._maru_seen)


def _with_subclasses(kind: Any) -> Iterator[Any]:
    yield kind
    for other in kind.__subclasses__():
        yield from _with_subclasses(other)


def _watch(transfer: Any, compare: Callable[[str, Sequence[int], Sequence[Any]], None]) -> None:
    """Replaces the methods that the class itself defines."""

    def watched(call: Any, kind: str) -> Any:
        def run(self: Any, block_ids: Sequence[int], copies: Sequence[Any]) -> None:
            call(self, block_ids, copies)
            compare(kind, block_ids, copies)

        return run

    def watched_begin(call: Any) -> Any:
        def run(self: Any, block_ids: Sequence[int], copies: Sequence[Any]) -> Any:
            return _Watched(call(self, block_ids, copies), lambda: compare("loaded", block_ids, copies))

        return run

    def watched_prepare(call: Any, kind: str) -> Any:
        def run(self: Any, block_ids: Sequence[int], copies: Sequence[Any]) -> Any:
            return _WatchedRun(call(self, block_ids, copies), lambda done: compare(kind, block_ids, copies[:done]))

        return run

    def watched_plan(call: Any) -> Any:
        def run(self: Any, block_ids: Sequence[int], copies: Sequence[Any]) -> Any:
            return _WatchedPlan(call(self, block_ids, copies), lambda: compare("loaded", block_ids, copies))

        return run

    own = vars(transfer)
    if "prepare_load" in own:
        transfer.prepare_load = watched_prepare(own["prepare_load"], "loaded")
    if "prepare_store" in own:
        transfer.prepare_store = watched_prepare(own["prepare_store"], "stored")
    if "store" in own:
        transfer.store = watched(own["store"], "stored")
    if "load" in own:
        transfer.load = watched(own["load"], "loaded")
    if "begin_load" in own:
        transfer.begin_load = watched_begin(own["begin_load"])
    if "prepare_layers" in own:
        transfer.prepare_layers = watched_plan(own["prepare_layers"])


class _WatchedPlan:
    """A load by layer that was planned, whose load is compared when it has finished."""

    def __init__(self, prepared: Any, compare: Callable[[], None]) -> None:
        self._prepared = prepared
        self._compare = compare
        self.close = prepared.close

    def begin(self) -> Any:
        return _Watched(self._prepared.begin(), self._compare)


class _WatchedRun:
    """A prepared load or store that is compared when it has run."""

    def __init__(self, prepared: Any, compare: Callable[[int], None]) -> None:
        self._prepared = prepared
        self._compare = compare
        self.close = prepared.close

    def run(self, brake: Any, least: int) -> int:
        done: int = self._prepared.run(brake, least)
        self._compare(done)
        return done


class _Watched:
    """A load by layers that is compared once it is complete."""

    def __init__(self, load: Any, compare: Callable[[], None]) -> None:
        self._load = load
        self._compare: Callable[[], None] | None = compare

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load, name)

    def finish(self) -> None:
        self._load.finish()
        compare, self._compare = self._compare, None
        if compare is not None:
            compare()
