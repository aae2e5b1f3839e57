"""Paged memory as engines lay it out, and a naive reader of it that shares nothing with the product.

A form says how an array of all layers is shaped and where element (layer, plane, block, token, head, dim) stands in
it, by plain n-dimensional indices. Strides for the product are derived from the same shapes, by hand, per form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen

from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides


@frozen
class Size:
    """Sizes of a small engine: layers, blocks, block size, heads, head size, bytes per element."""

    L: int
    NB: int
    BS: int
    NH: int
    HS: int
    element: int = 2


@frozen
class Form:
    """``shape``: of all layers; ``at``: index of an element; ``planes``: strides of each plane; ``layer``: elements
    from one layer to the next."""

    shape: Callable[[Size], tuple[int, ...]]
    at: Callable[..., tuple[int, ...]]
    planes: Callable[[Size], tuple[PlaneStrides, ...]]
    layer: Callable[[Size], int]


def _each(strides: Callable[[Size, int], PlaneStrides]) -> Callable[[Size], tuple[PlaneStrides, ...]]:
    return lambda s: (strides(s, 0), strides(s, 1))


FORMS: dict[str, Form] = {
    "planes-first NHD": Form(
        lambda s: (s.L, 2, s.NB, s.BS, s.NH, s.HS),
        lambda s, layer, p, b, t, h, d: (layer, p, b, t, h, d),
        _each(lambda s, p: PlaneStrides(p * s.NB * s.BS * s.NH * s.HS, s.BS * s.NH * s.HS, s.NH * s.HS, s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "planes-first HND": Form(
        lambda s: (s.L, 2, s.NB, s.NH, s.BS, s.HS),
        lambda s, layer, p, b, t, h, d: (layer, p, b, h, t, d),
        _each(lambda s, p: PlaneStrides(p * s.NB * s.BS * s.NH * s.HS, s.BS * s.NH * s.HS, s.HS, s.BS * s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "blocks-first NHD": Form(
        lambda s: (s.L, s.NB, 2, s.BS, s.NH, s.HS),
        lambda s, layer, p, b, t, h, d: (layer, b, p, t, h, d),
        _each(lambda s, p: PlaneStrides(p * s.BS * s.NH * s.HS, 2 * s.BS * s.NH * s.HS, s.NH * s.HS, s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "blocks-first HND": Form(
        lambda s: (s.L, s.NB, 2, s.NH, s.BS, s.HS),
        lambda s, layer, p, b, t, h, d: (layer, b, p, h, t, d),
        _each(lambda s, p: PlaneStrides(p * s.BS * s.NH * s.HS, 2 * s.BS * s.NH * s.HS, s.HS, s.BS * s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "packed per head": Form(
        lambda s: (s.L, s.NB, s.NH, s.BS, 2 * s.HS),
        lambda s, layer, p, b, t, h, d: (layer, b, h, t, p * s.HS + d),
        _each(lambda s, p: PlaneStrides(p * s.HS, s.NH * s.BS * 2 * s.HS, 2 * s.HS, s.BS * 2 * s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "packed per token": Form(
        lambda s: (s.L, s.NB, s.BS, s.NH, 2 * s.HS),
        lambda s, layer, p, b, t, h, d: (layer, b, t, h, p * s.HS + d),
        _each(lambda s, p: PlaneStrides(p * s.HS, s.NH * s.BS * 2 * s.HS, s.NH * 2 * s.HS, 2 * s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "packed, blocks outermost": Form(
        lambda s: (s.NB, s.L, s.NH, s.BS, 2 * s.HS),
        lambda s, layer, p, b, t, h, d: (b, layer, h, t, p * s.HS + d),
        _each(lambda s, p: PlaneStrides(p * s.HS, s.L * s.NH * s.BS * 2 * s.HS, 2 * s.HS, s.BS * 2 * s.HS, 1)),
        lambda s: s.NH * s.BS * 2 * s.HS,
    ),
    "packed, heads outside of blocks": Form(
        lambda s: (s.L, s.NH, s.NB, s.BS, 2 * s.HS),
        lambda s, layer, p, b, t, h, d: (layer, h, b, t, p * s.HS + d),
        _each(lambda s, p: PlaneStrides(p * s.HS, s.BS * 2 * s.HS, 2 * s.HS, s.NB * s.BS * 2 * s.HS, 1)),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "CPU pages": Form(
        lambda s: (s.L, s.NB, s.NH, 2 * s.BS * s.HS),
        lambda s, layer, p, b, t, h, d: (layer, b, h, s.BS * s.HS + t * s.HS + d if p else d * s.BS + t),
        lambda s: (
            PlaneStrides(0, s.NH * 2 * s.BS * s.HS, 1, 2 * s.BS * s.HS, s.BS),
            PlaneStrides(s.BS * s.HS, s.NH * 2 * s.BS * s.HS, s.HS, 2 * s.BS * s.HS, 1),
        ),
        lambda s: 2 * s.NB * s.BS * s.NH * s.HS,
    ),
    "MLA": Form(
        lambda s: (s.L, s.NB, s.BS, s.NH * s.HS),
        lambda s, layer, p, b, t, h, d: (layer, b, t, h * s.HS + d),
        lambda s: (PlaneStrides(0, s.BS * s.NH * s.HS, s.NH * s.HS, s.HS, 1),),
        lambda s: s.NB * s.BS * s.NH * s.HS,
    ),
}


def dtype_of(element: int) -> np.dtype[Any]:
    return np.dtype(f"u{element}")


@frozen(eq=False)
class Engine:
    """An engine's paged memory, all layers in one array of unsigned integers."""

    form: Form
    size: Size
    memory: np.ndarray[Any, Any]

    @classmethod
    def make(cls, name: str, size: Size, seed: int | None) -> Engine:
        """Random pages, or with no seed pages of one recognisable value."""
        form = FORMS[name]
        shape = form.shape(size)
        if seed is None:
            return cls(form, size, np.full(shape, 0xEE, dtype_of(size.element)))
        bits = np.random.default_rng(seed).bytes(int(np.prod(shape)) * size.element)
        return cls(form, size, np.frombuffer(bytearray(bits), dtype_of(size.element)).reshape(shape))

    @property
    def paged(self) -> PagedLayout:
        s = self.size
        return PagedLayout(self.form.planes(s), s.L, s.NB, s.BS, s.NH, s.HS, s.element)

    def stored(self, chunk_tokens: int, *, layerwise: bool = False) -> ObjectLayout:
        s = self.size
        return ObjectLayout(len(self.form.planes(s)), 1 if layerwise else s.L, chunk_tokens, s.NH * s.HS, s.element)

    def layer_bytes(self, layer: int) -> int:
        """Where a layer's first element lies, in bytes."""
        return layer * self.form.layer(self.size) * self.size.element

    def element(self, layer: int, plane: int, block: int, token: int, head: int, dim: int) -> tuple[int, ...]:
        return self.form.at(self.size, layer, plane, block, token, head, dim)

    def naive_object(
        self, block_ids: list[int], chunk: int, first: int, last: int, chunk_tokens: int, layer: int | None = None
    ) -> Any:
        """What the object of a chunk, or of one layer of it, must hold; tokens outside of [first, last) keep 0xAB."""
        s = self.size
        planes = len(self.form.planes(s))
        layers = range(s.L) if layer is None else [layer]
        out = np.full((planes, len(layers), chunk_tokens, s.NH, s.HS), 0xAB, dtype_of(s.element))
        for token in range(first, last):
            block, slot = block_ids[token // s.BS], token % s.BS
            for plane in range(planes):
                for row, number in enumerate(layers):
                    for head in range(s.NH):
                        for dim in range(s.HS):
                            value = self.memory[self.element(number, plane, block, slot, head, dim)]
                            out[plane, row, token - chunk * chunk_tokens, head, dim] = value
        return out

    def naive_write(
        self, block_ids: list[int], chunk: int, first: int, last: int, stored: Any, layer: int | None = None
    ) -> None:
        """The inverse: put tokens [first, last) of an object's array into the pages."""
        s = self.size
        layers = range(s.L) if layer is None else [layer]
        chunk_tokens = stored.shape[2]
        for token in range(first, last):
            block, slot = block_ids[token // s.BS], token % s.BS
            for plane in range(stored.shape[0]):
                for row, number in enumerate(layers):
                    for head in range(s.NH):
                        for dim in range(s.HS):
                            value = stored[plane, row, token - chunk * chunk_tokens, head, dim]
                            self.memory[self.element(number, plane, block, slot, head, dim)] = value
