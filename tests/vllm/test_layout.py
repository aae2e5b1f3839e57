"""Recognising KV tensors by shape, strides and backend; refusing all that is not known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from maru_core.errors import LayoutError
from maru_integrations.vllm.layout import describe_layout, layer_index, true_layer_order

L, B, N, H, D = 3, 5, 4, 2, 8


def names(count: int = L) -> list[str]:
    return [f"model.layers.{index}.self_attn.attn" for index in range(count)]


def allocate(memory_shape: tuple[int, ...], order: tuple[int, ...], dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Layers of one storage; ``memory_shape`` is how a layer lies, ``order`` permutes it to what the engine shows."""
    size = math.prod(memory_shape)
    flat = torch.zeros(L * size, dtype=dtype)
    return {
        name: flat[index * size : (index + 1) * size].view(memory_shape).permute(order)
        for index, name in enumerate(names())
    }


def describe(kv_caches, **changes):
    facts = {
        "layer_order": names(),
        "block_size": N,
        "num_blocks": B,
        "num_kv_heads": H,
        "head_size": D,
        "element_size": 2,
        "backend": "FLASH_ATTN",
    }
    return describe_layout(kv_caches, **{**facts, **changes})


def planes_first(tensor, p, b, t, h, d):
    return tensor[p, b, t, h, d]


def blocks_first(tensor, p, b, t, h, d):
    return tensor[b, p, t, h, d]


def packed(tensor, p, b, t, h, d):
    return tensor[b, h, t, p * D + d]


def latent(tensor, p, b, t, h, d):
    return tensor[b, t, h * D + d]


def latent_4d(tensor, p, b, t, h, d):
    return tensor[b, 0, t, h * D + d]


KNOWN = [
    pytest.param((2, B, N, H, D), (0, 1, 2, 3, 4), planes_first, "FLASH_ATTN", id="0.22 flash NHD"),
    pytest.param((2, B, H, N, D), (0, 1, 3, 2, 4), planes_first, "FLASH_ATTN", id="0.22 flash HND"),
    pytest.param((2, B, N, H, D), (0, 1, 2, 3, 4), planes_first, "FLEX_ATTENTION", id="0.22 flex"),
    pytest.param((B, 2, N, H, D), (0, 1, 2, 3, 4), blocks_first, "FLASH_ATTN", id="0.23 flash NHD"),
    pytest.param((B, 2, H, N, D), (0, 1, 3, 2, 4), blocks_first, "FLASH_ATTN", id="0.23 flash HND"),
    pytest.param((B, N, 2, H, D), (0, 2, 1, 3, 4), blocks_first, "FLEX_ATTENTION", id="0.23 flex"),
    pytest.param((B, 2, N, H, D), (0, 1, 2, 3, 4), blocks_first, "FLASHINFER", id="0.22 flashinfer NHD"),
    pytest.param((B, 2, H, N, D), (0, 1, 3, 2, 4), blocks_first, "FLASHINFER", id="0.22 flashinfer HND"),
    pytest.param((B, 2, N, H, D), (0, 1, 2, 3, 4), blocks_first, "TRITON_ATTN", id="0.22 triton"),
    pytest.param((B, N, H, 2 * D), (0, 2, 1, 3), packed, "FLASH_ATTN", id="0.32 LBNHC"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), packed, "FLASHINFER", id="0.32 LBHNC"),
    pytest.param((H, B, N, 2 * D), (1, 0, 2, 3), packed, "TRITON_ATTN", id="0.32 LHBNC"),
]


def check_addresses(tensor, plane, number, read, heads=H):
    """Every element that the engine would read through its own view is where the strides say, and no other is."""
    base = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // 2,), (1,), 0)
    for b, t, h, d in itertools.product(range(B), range(N), range(heads), range(plane_dims(plane, heads))):
        address = tensor.storage_offset() + plane.offset + b * plane.block + t * plane.token
        address += h * plane.head + d * plane.dim
        assert read(tensor, number, b, t, h, d).data_ptr() == base[address].data_ptr()


def plane_dims(plane, heads):
    return D if heads == H else H * D


@pytest.mark.parametrize(("memory", "order", "read", "backend"), KNOWN)
def test_known_layouts_are_addressed_as_the_engine_addresses_them(memory, order, read, backend):
    kv_caches = allocate(memory, order)
    paged, layers = describe(kv_caches, backend=backend)
    assert (paged.num_layers, paged.num_blocks, paged.block_size) == (L, B, N)
    assert (paged.num_heads, paged.head_size, paged.element_size) == (H, D, 2)
    assert [layer.data_ptr() for layer in layers] == [kv_caches[name].data_ptr() for name in names()]
    assert len(paged.planes) == 2
    for number, plane in enumerate(paged.planes):
        check_addresses(layers[1], plane, number, read)


@pytest.mark.parametrize(
    ("memory", "read"), [((B, N, H * D), latent), ((B, 1, N, H * D), latent_4d)], ids=["0.22", "0.32"]
)
def test_mla_is_one_plane_of_one_head(memory, read):
    kv_caches = allocate(memory, tuple(range(len(memory))))
    paged, layers = describe(kv_caches, backend="FLASHMLA", num_kv_heads=1, head_size=H * D)
    assert len(paged.planes) == 1
    check_addresses(layers[1], paged.planes[0], 0, read, heads=1)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_cpu_pages_hold_keys_transposed(isa):
    paged, _ = describe(allocate((B, H, N, 2 * D), (0, 1, 2, 3)), backend="CPU_ATTN", isa=isa)
    keys, values = paged.planes
    assert (keys.offset, keys.token, keys.dim) == (0, 1, N)
    assert (values.offset, values.token, values.dim) == (N * D, D, 1)
    assert keys.head == values.head == 2 * N * D
    assert keys.block == values.block == H * 2 * N * D


def test_cpu_pages_of_old_hold_keys_transposed_in_a_plane_of_their_own():
    """vLLM 0.22."""
    paged, _ = describe(allocate((2, B, H, N, D), (0, 1, 2, 3, 4)), backend="CPU_ATTN", isa="vec")
    keys, values = paged.planes
    assert (keys.offset, keys.token, keys.dim) == (0, 1, N)
    assert (values.offset, values.token, values.dim) == (B * H * N * D, D, 1)
    assert keys.head == values.head == N * D
    assert keys.block == values.block == H * N * D


REFUSED = [
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"backend": "CPU_ATTN", "isa": "amx"}, id="CPU pages of AMX"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"backend": "CPU_ATTN", "isa": None}, id="CPU, unknown isa"),
    pytest.param((B, N, H, 2 * D), (0, 2, 1, 3), {"backend": "CPU_ATTN", "isa": "vec"}, id="CPU, token-major"),
    pytest.param((2, B, H, N, D), (0, 1, 2, 3, 4), {"backend": "CPU_ATTN", "isa": "amx"}, id="CPU of 0.22, AMX"),
    pytest.param(
        (2, B, H, N, D), (0, 1, 3, 2, 4), {"backend": "CPU_ATTN", "isa": "vec"}, id="CPU of 0.22, token-major"
    ),
    pytest.param((B, 2, H, N, D), (0, 1, 2, 3, 4), {"backend": "CPU_ATTN", "isa": "vec"}, id="CPU with blocks first"),
    pytest.param((2, B, H, N, D), (0, 1, 2, 3, 4), {}, id="heads where tokens belong"),
    pytest.param((B, 3, N, H, D), (0, 1, 2, 3, 4), {}, id="three planes"),
    pytest.param((2, B, N, H, D), (0, 1, 2, 3, 4), {"backend": "TRITON_ATTN"}, id="triton with planes first"),
    pytest.param((B, H, N, 2 * D + 4), (0, 1, 2, 3), {}, id="appended scales"),
    pytest.param((B, H, N, D + 4), (0, 1, 2, 3), {}, id="value heads of another size"),
    pytest.param((B, 2 * H, N, D), (0, 1, 2, 3), {}, id="K and V as heads"),
    pytest.param((B, N, 2 * H * D), (0, 1, 2), {}, id="three axes without MLA"),
    pytest.param((B, N, D), (0, 1, 2), {"backend": "FLASHMLA", "num_kv_heads": 1, "head_size": D - 1}, id="MLA width"),
    pytest.param((B, N, H * D), (0, 1, 2), {"backend": "FLASHMLA", "head_size": D}, id="MLA with heads"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"backend": "NEW_ATTN"}, id="unknown backend"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"backend": "FLASH_ATTN_DIFFKV"}, id="a relative of a backend"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"num_blocks": B - 1}, id="more blocks than managed"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"block_size": 2 * N}, id="blocks too small"),
    pytest.param((B, H, N, 2 * D), (0, 1, 2, 3), {"element_size": 1}, id="other elements"),
]


@pytest.mark.parametrize(("memory", "order", "changes"), REFUSED)
def test_what_is_not_known_is_refused_with_shape_and_strides(memory, order, changes):
    kv_caches = allocate(memory, order)
    shown = kv_caches[names()[0]]
    with pytest.raises(LayoutError) as caught:
        describe(kv_caches, **changes)
    assert f"shape {tuple(shown.shape)}, strides {shown.stride()}, torch.bfloat16" in str(caught.value)


def test_two_blocks_do_not_confuse_planes_with_blocks():
    """(2, 2, …) fits both orders; the backend decides, and for one that has had both, nothing does."""
    kv_caches = allocate((2, 2, N, H, D), (0, 1, 2, 3, 4))
    known, _ = describe(kv_caches, num_blocks=2, backend="TRITON_ATTN")
    assert (known.planes[1].offset, known.planes[0].block) == (N * H * D, 2 * N * H * D)
    with pytest.raises(LayoutError):
        describe(kv_caches, num_blocks=2, backend="FLASH_ATTN")


def test_kernel_blocks_that_continue_each_other_make_up_a_managers_block():
    paged, _ = describe(allocate((2, 3 * B, N, H, D), (0, 1, 2, 3, 4)), block_size=3 * N)
    assert (paged.block_size, paged.num_blocks) == (3 * N, B)
    assert {plane.block for plane in paged.planes} == {3 * N * H * D}


@pytest.mark.parametrize(
    ("memory", "changes"),
    [((3 * B, H, N, 2 * D), {}), ((3 * B, H, N, 2 * D), {"backend": "CPU_ATTN", "isa": "vec"})],
    ids=["heads outside of tokens", "CPU pages"],
)
def test_kernel_blocks_that_do_not_are_refused(memory, changes):
    with pytest.raises(LayoutError, match=r"split into 3.*block size to 4"):
        describe(allocate(memory, (0, 1, 2, 3)), block_size=3 * N, **changes)


def test_layers_come_in_true_order_whatever_the_order_of_registration():
    """D6: a position in a dict is not a layer's index, and 10 does not come before 2."""
    flat = torch.zeros(12, B, H, N, 2 * D, dtype=torch.bfloat16)
    all_names = names(12)
    kv_caches = {all_names[index]: flat[index] for index in (10, 2, 0, 11, 1, 9, 3, 8, 4, 7, 5, 6)}
    paged, layers = describe(kv_caches, layer_order=sorted(all_names))
    assert paged.num_layers == 12
    assert [layer.data_ptr() for layer in layers] == [flat[index].data_ptr() for index in range(12)]


def test_a_pipeline_stage_starts_at_any_layer():
    assert true_layer_order(["m.layers.11.attn", "m.layers.9.attn", "m.layers.10.attn"])[0] == "m.layers.9.attn"


@pytest.mark.parametrize("name", ["attn", "layers.1.experts.2.attn", "model.layers.x.attn"])
def test_a_name_without_exactly_one_index_is_refused(name):
    with pytest.raises(LayoutError, match="integers"):
        layer_index(name)


def test_two_layers_of_one_index_are_refused():
    with pytest.raises(LayoutError, match="same index"):
        true_layer_order(["encoder.layers.1.attn", "decoder.layers.1.attn"])


def test_a_layer_that_shares_anothers_memory_is_dropped():
    kv_caches = allocate((B, H, N, 2 * D), (0, 1, 2, 3))
    kv_caches["model.layers.7.self_attn.attn"] = kv_caches[names()[1]]
    paged, layers = describe(kv_caches)
    assert (paged.num_layers, len(layers)) == (L, L)


def test_a_tensor_of_no_known_group_is_refused():
    kv_caches = allocate((B, H, N, 2 * D), (0, 1, 2, 3))
    kv_caches["model.layers.7.mamba"] = torch.zeros(3)
    with pytest.raises(LayoutError, match=r"model\.layers\.7\.mamba.*no known KV cache group"):
        describe(kv_caches)


def test_an_alias_seen_through_another_shape_is_refused():
    kv_caches = allocate((B, H, N, 2 * D), (0, 1, 2, 3))
    kv_caches["model.layers.7.self_attn.attn"] = kv_caches[names()[1]].flatten(2)
    with pytest.raises(LayoutError, match="shares no layer's memory"):
        describe(kv_caches)


def test_groups_that_overlay_each_other_are_refused():
    kv_caches = allocate((B, H, N, 2 * D), (0, 1, 2, 3))
    kv_caches[names()[2]] = kv_caches[names()[1]]
    with pytest.raises(LayoutError, match="same address"):
        describe(kv_caches)


@pytest.mark.parametrize("state", [[torch.zeros(2), torch.zeros(2)], None], ids=["a list of states", "missing"])
def test_a_layer_that_is_no_single_tensor_is_refused(state):
    kv_caches = allocate((B, H, N, 2 * D), (0, 1, 2, 3))
    if state is None:
        del kv_caches[names()[1]]
    else:
        kv_caches[names()[1]] = state
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.self_attn\.attn"):
        describe(kv_caches)


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(B, H, N, 2 * D, dtype=torch.float16),
        torch.zeros(B, H, N, 4 * D, dtype=torch.bfloat16)[..., : 2 * D],
        torch.zeros(B, H, N, 2 * D + 2, dtype=torch.bfloat16),
        torch.zeros(B + 1, H, N, 2 * D, dtype=torch.bfloat16),
    ],
    ids=["dtype", "strides", "width", "blocks"],
)
def test_layers_that_differ_are_refused(odd):
    kv_caches = allocate((B, H, N, 2 * D), (0, 1, 2, 3))
    kv_caches[names()[2]] = odd
    with pytest.raises(LayoutError, match=r"layers differ: .*layers\.0.*layers\.2"):
        describe(kv_caches)


def test_tensors_whose_elements_overlap_are_refused():
    shared = torch.zeros(L * 1000, dtype=torch.bfloat16)
    kv_caches = {
        name: shared[index * 1000 :].as_strided((B, H, N, 2 * D), (0, N * 2 * D, 2 * D, 1))
        for index, name in enumerate(names())
    }
    with pytest.raises(LayoutError, match=r"strides \(0,"):
        describe(kv_caches)


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(LayoutError, match="ROCm"):
        describe(allocate((B, H, N, 2 * D), (0, 1, 2, 3)))


def test_a_group_without_layers_is_refused():
    with pytest.raises(LayoutError, match="no layers"):
        describe({}, layer_order=[])
