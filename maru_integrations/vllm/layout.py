"""What vLLM's KV tensors look like, in Maru's terms. Recognises known page layouts and refuses everything else.

The inside of a page belongs to the attention backend, so a shape alone never decides: a layout is accepted only for
backends (on the CPU also instruction sets) whose packing a test has verified.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from maru_core.errors import LayoutError
from maru_core.geometry import PagedLayout, PlaneStrides

#: Backends whose 5-D tensors are ``(2, blocks, tokens, heads, head_size)`` in vLLM 0.22, and as the next ones' in later
#: versions.
PLANES_ONCE_FIRST = frozenset({"FLASH_ATTN", "FLEX_ATTENTION"})

#: Backends whose 5-D tensors are ``(blocks, 2, tokens, heads, head_size)``.
BLOCKS_FIRST = frozenset({"FLASHINFER", "TRITON_ATTN"})

#: Backends whose 4-D tensors are ``[blocks, heads, tokens, K‖V]``.
PACKED = PLANES_ONCE_FIRST | BLOCKS_FIRST

#: MLA backends that keep one plain latent vector per token.
LATENT = frozenset({"TRITON_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA"})

#: Instruction sets for which the CPU backend's pages hold, per head, K as ``[head_size, tokens]``, then V as
#: ``[tokens, head_size]``.
TRANSPOSED_K_ISAS = frozenset({"vec", "vec16"})


@frozen
class _Axes:
    """One plane of a tensor: element offset, then (count, stride) of each axis. ``None``: an axis of length one."""

    offset: int
    blocks: tuple[int, int]
    tokens: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int]


def layer_index(name: str) -> int:
    """The true index of a layer in its model: the one integer among the dotted parts of its name.

    Raises LayoutError when there is none or more than one, rather than guess.
    """
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise LayoutError(f"layer name {name!r} holds {len(numbers)} integers; its index in the model is unknown")
    return numbers[0]


def true_layer_order(names: Sequence[str]) -> tuple[str, ...]:
    """Layer names sorted by their true index; raises LayoutError when two share one or one has none."""
    ordered = sorted(names, key=layer_index)
    for before, after in itertools.pairwise(ordered):
        if layer_index(before) == layer_index(after):
            raise LayoutError(f"layers {before!r} and {after!r} have the same index; their order is unknown")
    return tuple(ordered)


def describe_layout(
    kv_caches: Mapping[str, Any],
    *,
    layer_order: Sequence[str],
    block_size: int,
    num_blocks: int,
    num_kv_heads: int,
    head_size: int,
    element_size: int,
    backend: str,
    isa: str | None = None,
) -> tuple[PagedLayout, list[torch.Tensor]]:
    """Describe the tensors that vLLM registers; also returns them in true layer order.

    ``layer_order`` names the layers of the KV cache group, in any order; they are put in the order of their true index.
    Other entries of ``kv_caches`` must be aliases of these (layers that share KV) and are dropped. ``block_size`` and
    ``num_blocks`` are the manager's, ``num_kv_heads`` and ``head_size`` this rank's (MLA: one head of the latent's
    width), ``element_size`` in bytes. ``backend`` is the attention backend's name as it gives it itself and ``isa``
    the CPU backend's instruction set.

    Raises LayoutError, naming shape and strides, when the layers differ from each other or the layout is not a known
    one.
    """
    names = true_layer_order(layer_order)
    if not names:
        raise LayoutError("the KV cache group has no layers")
    layers = [_tensor(name, kv_caches) for name in names]
    _check_aliases(kv_caches, dict(zip(names, layers, strict=True)))
    first = layers[0]
    for name, layer in zip(names, layers, strict=True):
        if _form(layer) != _form(first):
            raise LayoutError(
                f"layers differ: {names[0]} has {_describe(first)}, {name} has {_describe(layer)};"
                " stored objects hold layers of one layout only"
            )
    if first.element_size() != element_size:
        raise LayoutError(f"{names[0]} has {_describe(first)}; elements of {element_size} bytes were expected")
    if torch.version.hip:
        raise LayoutError("pages of vLLM on ROCm have not been verified; no KV is stored or loaded")
    planes = _planes(first, num_kv_heads, head_size, backend, isa)
    if planes is None:
        raise LayoutError(
            f"unknown KV layout: {names[0]} has {_describe(first)} on backend {backend}"
            f"{f' ({isa})' if isa else ''} with {num_blocks} blocks of {block_size} tokens, {num_kv_heads} KV heads"
            f" of {head_size}; no KV is stored or loaded"
        )
    strides = tuple(_strides(plane, first, block_size, num_blocks) for plane in planes)
    paged = PagedLayout(strides, len(layers), num_blocks, block_size, num_kv_heads, head_size, element_size)
    return paged, layers


def _planes(
    tensor: torch.Tensor, heads: int, head_size: int, backend: str, isa: str | None
) -> tuple[_Axes, ...] | None:
    """The planes of a layer, if backend and shape are known to go together."""
    axes = list(zip(tensor.shape, tensor.stride(), strict=True))
    if not _is_injective(axes):
        return None
    if len(axes) == 5 and backend in PACKED:
        blocks, planes, tokens, kv_heads, dims = axes
        if backend in PLANES_ONCE_FIRST and blocks[0] == 2:
            if planes[0] == 2:  # two blocks: nothing tells which axis is which
                return None
            blocks, planes = planes, blocks
        if (planes[0], kv_heads[0], dims[0]) != (2, heads, head_size):
            return None
        return tuple(_Axes(plane * planes[1], blocks, tokens, kv_heads, dims) for plane in range(2))
    if len(axes) == 4 and backend in PACKED and (axes[1][0], axes[3][0]) == (heads, 2 * head_size):
        blocks, kv_heads, tokens, (_, step) = axes
        return tuple(_Axes(plane * head_size * step, blocks, tokens, kv_heads, (head_size, step)) for plane in range(2))
    if len(axes) in (4, 5) and backend == "CPU_ATTN" and isa in TRANSPOSED_K_ISAS:
        # 5-D, up to 0.22: (2, blocks, heads, tokens, head_size).
        blocks, kv_heads, (count, row), (width, step) = axes[-4:]
        per_row = head_size if len(axes) == 5 else 2 * head_size
        if (kv_heads[0], row, width, step) != (heads, per_row, per_row, 1) or (len(axes) == 5 and axes[0][0] != 2):
            return None
        keys = _Axes(0, blocks, (count, 1), kv_heads, (head_size, count))
        offset = axes[0][1] if len(axes) == 5 else count * head_size
        values = _Axes(offset, blocks, (count, head_size), kv_heads, (head_size, 1))
        return keys, values
    if backend in LATENT and heads == 1:
        if len(axes) == 4 and axes[1][0] == 1:
            del axes[1]
        if len(axes) == 3 and axes[2][0] == head_size:
            # The step between heads is never taken: there is one.
            return (_Axes(0, axes[0], axes[1], (1, head_size * axes[2][1]), axes[2]),)
    return None


def _strides(plane: _Axes, tensor: torch.Tensor, block_size: int, num_blocks: int) -> PlaneStrides:
    """Strides by manager block, which may be several of the kernel's blocks."""
    (kernel_blocks, block), (kernel_tokens, token) = plane.blocks, plane.tokens
    ratio, rest = divmod(kernel_blocks, num_blocks)
    if rest or ratio < 1 or kernel_tokens * ratio != block_size:
        raise LayoutError(
            f"{_describe(tensor)}: {kernel_blocks} blocks of {kernel_tokens} tokens do not make up"
            f" {num_blocks} blocks of {block_size}"
        )
    if ratio > 1 and block != kernel_tokens * token:
        raise LayoutError(
            f"{_describe(tensor)}: a block of {block_size} tokens is split into {ratio} that do not continue each"
            f" other; set the engine's block size to {kernel_tokens}"
        )
    return PlaneStrides(plane.offset, ratio * block, token, plane.heads[1], plane.dims[1])


def _tensor(name: str, kv_caches: Mapping[str, Any]) -> torch.Tensor:
    if name not in kv_caches:
        raise LayoutError(f"layer {name} is missing among the registered KV tensors {sorted(kv_caches)}")
    tensor = kv_caches[name]
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"layer {name} registers {type(tensor).__name__}, not one tensor; its state is not paged KV")
    return tensor


def _check_aliases(kv_caches: Mapping[str, Any], layers: Mapping[str, torch.Tensor]) -> None:
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        other = owners.setdefault(layer.data_ptr(), name)
        if other != name:
            raise LayoutError(f"layers {other} and {name} lie at the same address; one object cannot hold both")
    for name, tensor in kv_caches.items():
        if name in layers:
            continue
        owner = owners.get(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) else None
        if owner is None or _form(tensor) != _form(layers[owner]):
            found = _describe(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise LayoutError(f"layer {name} ({found}) belongs to no known KV cache group and shares no layer's memory")


def _is_injective(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether no two indices address the same element, judged by nested strides."""
    reach = 0
    for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride <= reach:
            return False
        reach += (count - 1) * stride
    return True


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _describe(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"
