"""The memory behind KV tensors: which layers share one storage, at which distance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import frozen

from maru_core.errors import TransferError
from maru_core.geometry import PagedLayout
from maru_transfer.plan import extent


@frozen(eq=False)
class LayerGroup:
    """Layers that are ``first .. first+count-1`` in an object, all in one storage.

    One lies every ``stride`` bytes, the first at byte ``offset``.
    """

    storage: torch.UntypedStorage
    first: int
    count: int
    offset: int
    stride: int


def group_layers(layers: Sequence[torch.Tensor], paged: PagedLayout) -> list[LayerGroup]:
    """Group layers so that each group can be addressed by one strided view, in layer order.

    Raises TransferError when layers are on several devices, or one's storage ends before the layout's last element.
    """
    needed = extent(paged) * paged.element_size
    groups: list[LayerGroup] = []
    for index, layer in enumerate(layers):
        if layer.device != layers[0].device:
            raise TransferError(f"layer {index} is on {layer.device}, layer 0 on {layers[0].device}")
        storage = layer.untyped_storage()
        offset = layer.data_ptr() - storage.data_ptr()
        if layer.element_size() != paged.element_size:
            raise TransferError(
                f"layer {index} has elements of {layer.element_size()} bytes, the layout of {paged.element_size}"
            )
        if offset + needed > storage.nbytes():
            raise TransferError(
                f"layer {index} (shape {tuple(layer.shape)}, strides {layer.stride()}) ends at byte {storage.nbytes()}"
                f" of its storage, the layout reaches to {offset + needed}"
            )
        last = groups[-1] if groups else None
        if last and last.storage.data_ptr() == storage.data_ptr():
            step = offset - (last.offset + (last.count - 1) * last.stride)
            if step > 0 and (last.count == 1 or step == last.stride):
                groups[-1] = LayerGroup(last.storage, last.first, last.count + 1, last.offset, step)
                continue
        groups.append(LayerGroup(storage, index, 1, offset, 0))
    return groups


def single_layers(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    """The same layers, each as a group of its own, as layerwise objects hold them: ``first`` is 0."""
    return [
        LayerGroup(group.storage, 0, 1, group.offset + index * group.stride, 0)
        for group in groups
        for index in range(group.count)
    ]
