"""D1: what vLLM's own cache-write op put into its pages is found in the stored object, token by token.

Pages are allocated by vLLM's own allocator and written by its own op. The object is read by this test alone.
"""

from __future__ import annotations

import warnings
from contextlib import closing

import numpy as np
import pytest
import torch

from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_integrations.vllm.cpu_isa import cpu_attention_isa
from maru_integrations.vllm.layout import describe_layout
from maru_transfer.torch_copy import TorchCopyEngine

LAYERS, HEADS = 3, 2
CHUNK = 32


@pytest.fixture(scope="module")
def vllm():
    """vLLM with its CPU kernels loaded, when it is installed and is the CPU build."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed")
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform
        from vllm.v1 import kv_cache_interface
        from vllm.v1.worker import utils

        if not current_platform.is_cpu():
            pytest.skip("the installed vLLM is not built for the CPU")
        current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("vLLM's CPU kernels could not be loaded, as with another version of torch")
    return ops, kv_cache_interface, utils


def has_layouts(vllm) -> bool:
    """Whether this vLLM allocates pages in layouts that it names. Up to 0.28 each backend knows one shape."""
    return hasattr(vllm[1], "KVCacheLayout")


def allocate(vllm, layout: str, block_size: int, head_size: int, dtype, blocks: int) -> dict[str, torch.Tensor]:
    _, interface, utils = vllm
    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    if not has_layouts(vllm):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        shape = CPUAttentionBackend.get_kv_cache_shape(blocks, block_size, HEADS, head_size)
        return {name: torch.zeros(shape, dtype=dtype) for name in reversed(names)}
    spec = interface.FullAttentionSpec(block_size=block_size, num_kv_heads=HEADS, head_size=head_size, dtype=dtype)
    page = spec.page_size_bytes
    # Bytes from one layer to the next, and from one block to the next, as vLLM's planner sets them.
    strides = {
        "LHBNC": (page * blocks, page // HEADS),
        "BLHNC": (page, page * LAYERS),
        "BLNHC": (page, page * LAYERS),
        "BHLNC": (page // HEADS, page * LAYERS),
    }.get(layout, (page * blocks, page))
    config = interface.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[interface.KVCacheTensor(page * blocks * LAYERS, names, *strides)],
        kv_cache_groups=[interface.KVCacheGroupSpec(names, spec)],
    )
    caches = utils.allocate_kv_cache(config, torch.device("cpu"), interface.KVCacheLayout[layout])
    return dict(reversed(caches.items()))


def write(vllm, pages: torch.Tensor, isa: str, keys, values, slots) -> None:
    """What vLLM's CPU backend does with a layer's new keys and values."""
    if pages.dim() == 5:  # 0.22
        key_cache, value_cache = pages.unbind(0)
    else:
        blocks, heads, tokens, _ = pages.shape
        key_cache, value_cache = pages.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    vllm[0].cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


def as_integers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("layerwise", [False, True], ids=["chunkwise", "layerwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("isa", "block_size", "head_size"),
    [("vec16", 16, 64), ("vec", 32, 64), ("vec16", 48, 64), ("vec", 64, 32), ("vec16", 64, 80), ("vec", 128, 128)],
)
def test_token_t_of_the_object_is_what_vllm_wrote_for_token_t(vllm, isa, block_size, head_size, dtype, layerwise):
    """Chunkwise at ``[plane, layer, t]``, layerwise at ``[plane, t]`` of the true layer's object.

    Pages are registered in the reverse of the layers' order, and objects are asked for in one of their own.
    """
    tokens = 4 * CHUNK
    blocks = -(-tokens // block_size) + 3
    kv_caches = allocate(vllm, "LBHNC", block_size, head_size, dtype, blocks)
    table = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()
    slots = torch.tensor([table[t // block_size] * block_size + t % block_size for t in range(tokens)])
    written = torch.randn(2, LAYERS, tokens, HEADS, head_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    for layer in range(LAYERS):
        pages = kv_caches[f"model.layers.{layer}.self_attn.attn"]
        write(vllm, pages, isa, written[0, layer], written[1, layer], slots)

    facts = {
        "layer_order": list(kv_caches),
        "block_size": block_size,
        "num_blocks": blocks,
        "num_kv_heads": HEADS,
        "head_size": head_size,
        "element_size": dtype.itemsize,
        "backend": "CPU_ATTN",
        "isa": isa,
    }
    paged, layers = describe_layout(kv_caches, **facts)
    stored = ObjectLayout(2, 1 if layerwise else LAYERS, CHUNK, HEADS * head_size, dtype.itemsize)
    assert stored.nbytes == 2 * (1 if layerwise else LAYERS) * CHUNK * HEADS * head_size * dtype.itemsize
    copies = [
        ChunkCopy(c, c * CHUNK, (c + 1) * CHUNK, memoryview(bytearray(stored.nbytes)), layer)
        for layer in ((1, 2, 0) if layerwise else (None,))
        for c in range(tokens // CHUNK)
    ]
    with closing(TorchCopyEngine().open(layers, paged, stored)) as transfer:
        transfer.store(table, copies)
    wanted = as_integers(written).reshape(2, LAYERS, tokens, HEADS * head_size)
    for copy in copies:
        found = np.frombuffer(copy.buffer, wanted.dtype)
        if layerwise:
            found = found.reshape(2, CHUNK, HEADS * head_size)
        else:
            found = found.reshape(2, LAYERS, CHUNK, HEADS * head_size)
        for plane in range(2):
            for layer in range(LAYERS) if copy.layer is None else (copy.layer,):
                rows = found[plane] if layerwise else found[plane, layer]
                for t in range(CHUNK):
                    token = copy.first + t
                    assert np.array_equal(rows[t], wanted[plane, layer, token]), (plane, layer, token)

    fresh = allocate(vllm, "LBHNC", block_size, head_size, dtype, blocks)
    paged, layers = describe_layout(fresh, **facts)
    with closing(TorchCopyEngine().open(layers, paged, stored)) as transfer:
        transfer.load(table, copies)
    for name, pages in kv_caches.items():
        assert torch.equal(as_bytes(fresh[name]), as_bytes(pages))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_amx_packs_keys_otherwise_so_it_stays_refused(vllm):
    """Should this fail, AMX pages became readable with the layout of the others: accept them then."""
    pages = torch.zeros(2, HEADS, 32, 128, dtype=torch.bfloat16)
    keys = torch.randn(32, HEADS, 64).to(torch.bfloat16)
    try:
        write(vllm, pages, "amx", keys, keys, torch.arange(32, 64))
    except RuntimeError:
        pytest.skip("this build of vLLM has no AMX packing")
    transposed = pages[1].reshape(HEADS, -1)[:, : 32 * 64].view(HEADS, 64, 32)
    assert not torch.equal(transposed.permute(2, 0, 1), keys)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_the_packed_pages_of_every_layout_are_read_as_gpu_backends_read_them(vllm, layout):
    """Backends other than the CPU's split ``[B, H, N, K‖V]`` along its last axis, whatever the strides."""
    if not has_layouts(vllm):
        pytest.skip("this vLLM names no layouts of pages: its CPU backend knows its own shape only")
    block_size, head_size, blocks = 16, 8, 6
    kv_caches = allocate(vllm, layout, block_size, head_size, torch.bfloat16, blocks)
    for number, pages in enumerate(kv_caches.values()):
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(number)))
    paged, layers = describe_layout(
        kv_caches,
        layer_order=list(kv_caches),
        block_size=block_size,
        num_blocks=blocks,
        num_kv_heads=HEADS,
        head_size=head_size,
        element_size=2,
        backend="FLASH_ATTN",
    )
    stored = ObjectLayout(2, LAYERS, CHUNK, HEADS * head_size, 2)
    buffer = memoryview(bytearray(stored.nbytes))
    with closing(TorchCopyEngine().open(layers, paged, stored)) as transfer:
        transfer.store([4, 2], [ChunkCopy(0, 0, CHUNK, buffer)])
    found = torch.frombuffer(buffer, dtype=torch.bfloat16).view(2, LAYERS, CHUNK, HEADS, head_size)
    for layer in range(LAYERS):
        tokens_first = kv_caches[f"model.layers.{layer}.self_attn.attn"].transpose(1, 2)
        keys, values = tokens_first.split(head_size, dim=-1)
        for t in range(CHUNK):
            block, slot = [4, 2][t // block_size], t % block_size
            assert torch.equal(found[0, layer, t], keys[block, slot])
            assert torch.equal(found[1, layer, t], values[block, slot])


@pytest.mark.parametrize(
    ("block_size", "head_size", "expected"), [(128, 64, "vec"), (16, 64, "vec16"), (32, 80, "vec16")]
)
def test_the_instruction_set_is_the_one_that_vllm_picks(vllm, block_size, head_size, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert cpu_attention_isa(torch.bfloat16, block_size, head_size, "auto") == expected


def test_amx_is_seen_where_vllm_would_use_it(vllm, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert cpu_attention_isa(torch.bfloat16, 128, 64, "auto") == "amx"


def test_facts_that_vllm_has_no_kernel_for_have_no_instruction_set(vllm):
    assert cpu_attention_isa(torch.bfloat16, 128, 80, "fp8") is None
