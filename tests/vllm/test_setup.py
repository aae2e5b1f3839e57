"""What binds a namespace, what is refused, and what settings do at start."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from attrs import evolve
from structlog.testing import capture_logs

pytest.importorskip("vllm")

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from maru_core.config import MaruConfig
from maru_core.errors import BackendError, ConfigError, MaruError
from maru_core.pools import granule_for
from maru_integrations.vllm import compat, setup, support
from maru_integrations.vllm.compat import KVGeometry
from maru_integrations.vllm.connector import MaruKVConnector
from maru_integrations.vllm.engines import EngineChooser
from maru_integrations.vllm.identity import namespace_of, weights_fingerprint
from maru_integrations.vllm.metadata import MaruConnectorMetadata
from maru_transfer.held import HeldTransfer

GEOMETRY = KVGeometry(("model.layers.0.attn",), 16, 8, 2, 64, 2, "bfloat16", "auto")


def fake_config(**changes: Any) -> Any:
    model = {
        "model": "org/name",
        "revision": None,
        "hf_config": SimpleNamespace(_commit_hash=None),
        "quantization": None,
        "dtype": torch.bfloat16,
        "hf_overrides": {},
        "runner_type": "generate",
    }
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    for name, value in changes.items():
        (parallel if name in parallel else model)[name] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )


def test_every_fact_gives_another_namespace() -> None:
    """R009: dtype, geometry, weights, revision, chunk size, shape, tenant: each alone separates."""
    config = MaruConfig()
    base = namespace_of(fake_config(), GEOMETRY, 256, config)
    others = [
        namespace_of(fake_config(model="org/other"), GEOMETRY, 256, config),
        namespace_of(fake_config(revision="v2"), GEOMETRY, 256, config),
        namespace_of(fake_config(hf_config=SimpleNamespace(_commit_hash="abc")), GEOMETRY, 256, config),
        namespace_of(fake_config(quantization="awq"), GEOMETRY, 256, config),
        namespace_of(fake_config(dtype=torch.float16), GEOMETRY, 256, config),
        namespace_of(fake_config(hf_overrides={"rope_theta": 5}), GEOMETRY, 256, config),
        namespace_of(fake_config(tensor_parallel_size=2), GEOMETRY, 256, config),
        namespace_of(fake_config(pipeline_parallel_size=2), GEOMETRY, 256, config),
        namespace_of(fake_config(), evolve(GEOMETRY, dtype="float16"), 256, config),
        namespace_of(fake_config(), evolve(GEOMETRY, cache_dtype="fp8"), 256, config),
        namespace_of(fake_config(), evolve(GEOMETRY, num_kv_heads=4), 256, config),
        namespace_of(fake_config(), evolve(GEOMETRY, head_size=128), 256, config),
        namespace_of(fake_config(), evolve(GEOMETRY, layer_names=("a.0", "a.1")), 256, config),
        namespace_of(fake_config(), GEOMETRY, 128, config),
        namespace_of(fake_config(), GEOMETRY, 256, MaruConfig(cache_namespace="tenant")),
        namespace_of(fake_config(), GEOMETRY, 256, MaruConfig(use_layerwise=True)),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == len(others) + 1
    # Page geometry and names do not: unlike instances share.
    same = [
        namespace_of(fake_config(), evolve(GEOMETRY, block_size=128, num_blocks=9), 256, config),
        namespace_of(fake_config(), GEOMETRY, 256, MaruConfig(engine_id="x", instance_id="y", pool_size="1G")),
    ]
    assert {base.digest} == {other.digest for other in same}


def test_other_weights_at_the_same_path_are_another_model(tmp_path: Path) -> None:
    """R010: re-baked weights, also of equal size and time, and a changed config.json."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 3_000_000)
    os.utime(weights, ns=(1, 1))
    (tmp_path / "config.json").write_text("{}")
    first = weights_fingerprint(str(tmp_path), "auto")
    assert weights_fingerprint(str(tmp_path), "auto") == first
    weights.write_bytes(b"a" * 2_999_999 + b"b")
    os.utime(weights, ns=(1, 1))
    second = weights_fingerprint(str(tmp_path), "auto")
    os.utime(weights, ns=(2, 2))
    third = weights_fingerprint(str(tmp_path), "auto")
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    fourth = weights_fingerprint(str(tmp_path), "auto")
    assert len({first, second, third, fourth, weights_fingerprint(str(tmp_path), "dummy")}) == 5
    assert weights_fingerprint("org/name", "auto") == "hub"


@pytest.mark.parametrize(
    ("block", "asked", "used"), [(16, 256, 256), (128, 256, 256), (48, 256, 288), (528, 256, 528), (16, 8, 16)]
)
def test_chunks_are_whole_blocks(block: int, asked: int, used: int) -> None:
    """A chunk size that the blocks do not divide is rounded up, with a warning."""
    with capture_logs() as logs:
        assert setup.aligned_chunk(asked, block) == used
    assert [entry["event"] for entry in logs] == ([] if asked == used else ["maru.chunk_aligned"])


def kv_config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{index}.attn"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def full(**extra: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, **extra)


@pytest.mark.parametrize(
    ("specs", "cache_dtype", "reason"),
    [
        ((full(), full()), "auto", "2 KV cache groups"),
        ((), "auto", "0 KV cache groups"),
        ((full(sliding_window=128),), "auto", "sliding-window"),
        ((full(head_size_v=32),), "auto", "value heads of 32"),
        ((full(),), "fp8", "quantised"),
        (
            (SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=8),),
            "auto",
            "SlidingWindowSpec",
        ),
        (
            (MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),),
            "auto",
            "MLAAttentionSpec",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused(specs: Any, cache_dtype: str, reason: str) -> None:
    """Hybrid, sliding-window, quantised, MLA and unequal value heads get zero hits until their own work is done."""
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype))
    found = compat.kv_geometry(config, kv_config(*specs))
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallel size 2"),
        ({"pipeline_parallel_size": 4}, "pipeline parallel size 4"),
        ({"runner_type": "pooling"}, "pooling"),
    ],
)
def test_engines_without_support_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(support.refused_engine(fake_config(**changes)))
    assert support.refused_engine(fake_config()) is None


def test_speculation_with_a_draft_model_is_refused() -> None:
    """A draft model's layers lie in the same cache and depend on its own weights; n-grams have none."""
    config = fake_config()
    for method, refused in (("ngram", False), ("eagle", True), ("draft_model", True)):
        config.speculative_config = SimpleNamespace(method=method)
        assert (support.refused_engine(config) is not None) == refused


def real_config(model: str, role: str = "kv_both", **extra: Any) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float16", seed=0),
        cache_config=CacheConfig(block_size=16, gpu_memory_utilization=0.5, cache_dtype="auto"),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=64,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MaruKVConnector",
            kv_connector_module_path="maru_integrations.vllm",
            kv_role=role,
            kv_connector_extra_config=extra,
        ),
    )


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"maru_pool_sise": "1G"}, "maru_pool_size"),
        ({"maru_pool_size": "lots"}, "maru_pool_size"),
        ({"maru_kv_chunk_tokens": "many"}, "maru_kv_chunk_tokens"),
        ({"maru_server_url": "http://somewhere"}, "maru_server_url"),
    ],
)
def test_a_wrong_setting_stops_the_start(model_folder: str, extra: dict[str, Any], text: str) -> None:
    """One clear error that names the setting, in both roles."""
    config = real_config(model_folder, **extra)
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match=text):
            MaruKVConnector(config, role, kv_config(full()))


def test_an_unsupported_engine_starts_with_one_warning(model_folder: str) -> None:
    """Hybrid models start as they do without Maru: every hook answers, nothing is promised, both roles."""
    config = real_config(model_folder)
    with capture_logs() as logs:
        sides = [MaruKVConnector(config, role, kv_config(full(), full())) for role in KVConnectorRole]
        scheduler = next(side for side in sides if side.role == KVConnectorRole.SCHEDULER)
        worker = next(side for side in sides if side.role == KVConnectorRole.WORKER)
        worker.register_kv_caches({})
        assert worker.get_handshake_metadata() is None
        assert scheduler.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)
        assert scheduler.request_finished_all_groups(SimpleNamespace(request_id="r"), ([1], [2])) == (False, None)
        assert scheduler.reset_cache() is True
        metadata = scheduler.build_connector_meta(None)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        assert worker.get_finished(set()) == (None, None)
        assert worker.get_block_ids_with_load_errors() == set()
        assert worker.build_connector_worker_meta() is None
        for side in sides:
            side.shutdown()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "2 KV cache groups" in logs[0]["reason"]


def test_a_layout_that_only_the_worker_sees_disables_the_scheduler_side(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown page layout: one warning with shape and strides, zero hits."""
    from tests.vllm.fake_store import FakeHandler, FakeStore

    handler = FakeHandler(FakeStore())
    monkeypatch.setattr(setup, "connect", lambda plan, role, device="cpu": handler)
    monkeypatch.setattr(compat, "attention_backend", lambda *args: "NEW_ATTENTION")
    config = real_config(model_folder)
    scheduler = MaruKVConnector(config, KVConnectorRole.SCHEDULER, kv_config(full()))
    worker = MaruKVConnector(config, KVConnectorRole.WORKER, kv_config(full()))
    with capture_logs() as logs:
        worker.register_kv_caches({"model.layers.0.attn": torch.zeros(8, 16, 2, 2, 64, dtype=torch.bfloat16)})
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    (warning,) = [entry for entry in logs if entry["event"] == "maru.disabled"]
    assert "NEW_ATTENTION" in warning["reason"]
    assert "(8, 16, 2, 2, 64)" in warning["reason"] or "[8, 16, 2, 2, 64]" in warning["reason"]
    assert scheduler._scheduler is None
    assert handler.closed


def idle_knobs(logs: list[Any]) -> set[str]:
    return {entry["setting"] for entry in logs if entry["event"] == "maru.setting_without_effect"}


def test_knobs_without_their_prerequisite_warn_at_start(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former names are the same knobs, with a warning of their own."""
    from tests.vllm.fake_store import FakeHandler, FakeStore

    monkeypatch.setattr(setup, "connect", lambda plan, role, device="cpu": FakeHandler(FakeStore()))
    extra = {"maru_enable_write_behind": True, "maru_enable_layerwise_overlap": True}
    with capture_logs() as logs:
        connector = MaruKVConnector(real_config(model_folder, **extra), KVConnectorRole.SCHEDULER, kv_config(full()))
    assert idle_knobs(logs) == {"maru_overlap_load_with_compute"}
    assert {entry["use"] for entry in logs if entry["event"] == "former_setting"} == {
        "maru_async_store",
        "maru_overlap_load_with_compute",
    }
    settings = connector._scheduler._promises.settings
    assert settings.stores_later
    assert not settings.parks
    assert not settings.overlap


@pytest.mark.parametrize(
    ("planned", "profiled", "budget"), [(64, 100, 63), (None, 100, 99), (0, 100, 99), (1, None, 1), (None, None, None)]
)
def test_requests_can_have_all_blocks_but_the_null_block(
    planned: int | None, profiled: int | None, budget: int | None
) -> None:
    """From the KV cache configuration, else from the cache configuration; not known: no budget."""
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=profiled))
    assert compat.block_budget(vllm_config, SimpleNamespace(num_blocks=planned)) == budget


@pytest.mark.parametrize("needs_parking", [False, True])
@pytest.mark.parametrize("bits", range(64))
def test_every_combination_of_knobs(bits: int, needs_parking: bool) -> None:
    """A knob warns exactly when what it needs is off, whatever the others say."""
    load, store, overlap, release, window, spare = (bool(bits >> place & 1) for place in range(6))
    extra: dict[str, Any] = {
        "maru_async_load": load,
        "maru_async_store": store,
        "maru_overlap_load_with_compute": overlap,
    }
    if release:
        extra["maru_overlap_release_after_layers"] = 2
    if window:
        extra["maru_load_admission_window"] = 3
    if spare:
        extra["maru_overlap_spare_decodes"] = bool(bits & 1)
    config = MaruConfig.from_mapping(extra, {})
    with capture_logs() as logs:
        setup.warn_of_idle_knobs(config, parks=load or needs_parking)
    expected = set()
    if overlap and not load:
        expected.add("maru_overlap_load_with_compute")
    if release and not (overlap and load):
        expected.add("maru_overlap_release_after_layers")
    if spare and not (overlap and load):
        expected.add("maru_overlap_spare_decodes")
    if window and not (load or needs_parking):
        expected.add("maru_load_admission_window")
    assert idle_knobs(logs) == expected
    assert setup.overlaps(config) == (overlap and load)


@pytest.mark.parametrize(("layerwise", "objects", "layers"), [(False, 1, 3), (True, 3, 1)])
def test_a_plan_says_what_an_object_holds_and_how_many_make_a_chunk(
    monkeypatch: pytest.MonkeyPatch, layerwise: bool, objects: int, layers: int
) -> None:
    geometry = evolve(GEOMETRY, layer_names=("a.0", "a.1", "a.2"))
    monkeypatch.setattr(compat, "kv_geometry", lambda *_: geometry)
    plan = setup.make_plan(fake_config(), None, MaruConfig(use_layerwise=layerwise), setup.PluginSettings())
    assert isinstance(plan, setup.Plan)
    assert plan.objects_per_chunk == objects
    assert (plan.stored.num_layers, plan.stored.nbytes) == (layers, 2 * layers * 256 * 2 * 64 * 2)
    assert plan.granule == granule_for(plan.stored.nbytes)
    facts = dict(plan.namespace.facts)
    # Stored objects outlive a release: the name of a format never changes.
    assert facts["format"] == ("layerwise/1" if layerwise else "chunkwise/1")
    assert facts["layers"] == 3


def test_vllm_finds_the_class_and_our_overrides_fit(model_folder: str) -> None:
    """R120: loaded by module path as vLLM does, and every override takes what the base class's method takes."""
    import inspect

    found = KVConnectorFactory.get_connector_class(real_config(model_folder).kv_transfer_config)
    assert found is MaruKVConnector
    assert not inspect.isabstract(found)
    for name, method in inspect.getmembers(MaruKVConnector, inspect.isfunction):
        base = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or base is None or name not in vars(MaruKVConnector):
            continue
        ours, theirs = (list(inspect.signature(item).parameters) for item in (method, base))
        assert ours == theirs, name
    assert MaruKVConnector.requires_piecewise_for_cudagraph({}) is False


def test_parking_follows_the_engine() -> None:
    """Synchronous loads only where vLLM processes one step at a time."""
    for asynchronous, pipeline, v2, parks in (
        (False, 1, False, False),
        (True, 1, False, True),
        (False, 2, False, True),
        (False, 1, True, True),
    ):
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
            parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
            use_v2_model_runner=v2,
        )
        assert compat.parks_hits(config) is parks


class Moves:
    """A transfer for a device that can be told which memory is locked, and the engine and host that offer it."""

    name = "moves"

    def __init__(self) -> None:
        self.pinned: list[Any] = []
        self.closed = 0

    def use_pinned(self, pinned: Any) -> None:
        self.pinned.append(pinned)

    def close(self) -> None:
        self.closed += 1

    def open(self, layers: Any, paged: Any, stored: Any) -> Moves:
        return self

    def is_available(self) -> bool:
        return True

    def unsupported(self, paged: Any, stored: Any, device: str) -> None:
        assert device == "cuda"

    def import_error(self) -> None:
        return None

    def engines(self) -> dict[str, Any]:
        return {"moves": SimpleNamespace(name="moves", rank=1)}

    def engine(self, name: str) -> Moves:
        return self


@pytest.mark.parametrize("pin", [True, False])
def test_a_gpu_engine_and_its_session_share_one_registrar(monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
    moves = Moves()
    handlers: list[Any] = []

    def connect(plan: Any, role: str, device: str, registrar: Any = None, engine: str = "") -> str:
        handlers.append((role, device, registrar, engine))
        if len(handlers) > 1:
            raise MaruError("no server")
        return "handler"

    monkeypatch.setattr(setup.PluginHost, "discover", lambda plugins: moves)
    monkeypatch.setattr(setup, "connect", connect)
    plan: Any = SimpleNamespace(plugins=None, stored="stored", config=MaruConfig(pin_pools=pin))
    layers = [SimpleNamespace(device=torch.device("cuda", 0))]
    chooser = EngineChooser()
    works = iter([False, True])
    link = setup.open_link(plan, cast(Any, "paged"), layers, chooser, works.__next__)
    assert link.handler == "handler"  # type: ignore[comparison-overlap]
    registrar = handlers[0][2]
    assert handlers[0][:2] == ("worker", "cuda")
    assert handlers[0][3] == "moves", "which stats then show"
    assert moves.pinned == ([registrar] if pin else [])
    assert (registrar is not None) is pin
    assert not pin or [registrar._busy(), registrar._busy()] == [False, True]
    assert isinstance(link.transfer, HeldTransfer) is pin
    with pytest.raises(MaruError, match="no server"):
        setup.open_link(plan, cast(Any, "paged"), layers, chooser, works.__next__)
    assert moves.closed == 1, "what was opened for a session that there is not is given back"


def test_an_engine_is_at_work_from_its_first_step_on(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then vLLM tries out and captures, without a step: pools are registered in large pieces meanwhile."""
    found: list[Any] = []

    def open_link(*arguments: Any) -> Any:
        found.append(arguments[-1])
        raise MaruError("no server")

    monkeypatch.setattr(setup, "open_link", open_link)
    monkeypatch.setattr(compat, "attention_backend", lambda *args: "FLASH_ATTN")
    connector = MaruKVConnector(real_config(model_folder), KVConnectorRole.WORKER, kv_config(full()))
    connector.register_kv_caches({"model.layers.0.attn": torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)})
    (at_work,) = found
    assert not at_work()
    connector.get_handshake_metadata()
    assert not at_work()
    connector.bind_connector_metadata(MaruConnectorMetadata())
    assert at_work()
    connector.clear_connector_metadata()
    assert at_work(), "for good: the next step may come any time"
    connector.shutdown()


def test_a_worker_that_connects_again_has_said_already_what_it_lacks(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7: one warning in a process, however often the server is gone when it is looked for."""
    choosers: list[EngineChooser] = []

    def open_link(plan: Any, paged: Any, layers: Any, chooser: EngineChooser, at_work: Any) -> Any:
        choosers.append(chooser)
        raise MaruError("no server")

    monkeypatch.setattr(setup, "open_link", open_link)
    monkeypatch.setattr(compat, "attention_backend", lambda *args: "FLASH_ATTN")
    connector = MaruKVConnector(real_config(model_folder), KVConnectorRole.WORKER, kv_config(full()))
    connector.register_kv_caches({"model.layers.0.attn": torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)})
    assert connector._worker is not None
    with pytest.raises(MaruError, match="no server"):
        connector._worker.connect()
    assert len(choosers) == 2
    assert choosers[0] is choosers[1]
    connector.shutdown()


@pytest.mark.parametrize(
    ("knobs", "transfers"),
    [({}, 1), ({"async_load": True}, 2), ({"async_store": True}, 2)],
    ids=["none", "load", "store"],
)
def test_threads_beside_the_steps_get_a_transfer_of_their_own(
    monkeypatch: pytest.MonkeyPatch, knobs: dict[str, bool], transfers: int
) -> None:
    """A transfer is used by one thread at a time; what a second one takes is told."""
    moves = Moves()
    monkeypatch.setattr(setup.PluginHost, "discover", lambda plugins: moves)
    monkeypatch.setattr(setup, "connect", lambda *arguments: "handler")
    plan: Any = SimpleNamespace(plugins=None, stored="stored", config=MaruConfig(pin_pools=False, **knobs))
    layers = [SimpleNamespace(device=torch.device("cuda", 0))]
    with capture_logs() as logs:
        link = setup.open_link(plan, cast(Any, "paged"), layers, EngineChooser(), lambda: True)
    assert (link.storing is None) is (transfers == 1)
    assert link.stores is (link.storing or link.transfer)
    assert [entry["count"] for entry in logs if entry["event"] == "maru.transfers"] == ([2] if transfers == 2 else [])


def test_a_link_that_fails_says_why_also_when_what_was_opened_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves()
    moves.close = Mock(side_effect=SystemExit("injected"))  # type: ignore[method-assign]
    monkeypatch.setattr(setup.PluginHost, "discover", lambda plugins: moves)
    monkeypatch.setattr(setup, "connect", Mock(side_effect=BackendError("no such pool")))
    config = MaruConfig(pin_pools=False, async_load=True)
    plan: Any = SimpleNamespace(plugins=None, stored="stored", config=config)
    layers = [SimpleNamespace(device=torch.device("cuda", 0))]
    with capture_logs() as logs, pytest.raises(BackendError, match="no such pool"):
        setup.open_link(plan, cast(Any, "paged"), layers, EngineChooser(), lambda: True)
    assert moves.close.call_count == 2
    assert [entry["transfer"] for entry in logs if entry["log_level"] == "warning"] == ["Moves"] * 2


def test_only_engines_with_a_gpu_register_pools_and_not_when_told_not_to() -> None:
    assert setup.pinned_pools(MaruConfig(), torch.device("cpu"), lambda: True) is None
    assert setup.pinned_pools(MaruConfig(pin_pools=False), torch.device("cuda", 1), lambda: True) is None
    pools = setup.pinned_pools(MaruConfig(), torch.device("cuda", 1), lambda: True)
    assert pools is not None
    assert pools.stats()["state"] == "no pool", "nothing happens before a pool is mapped"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"maru_pool_size": "9000G"}, "9663676416000"),
        ({"maru_pool_path": "/proc/nowhere"}, "/proc/nowhere"),
        ({"maru_storage_backend": "vendor"}, "vendor"),
        ({"maru_runtime_dir": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_a_server_that_cannot_start_is_one_warning(
    model_folder: str, maru_runtime_dir: Path, extra: dict[str, Any], text: str
) -> None:
    """Pool too large, folder unusable: the engine starts, one warning names the reason, no traceback, no hits."""
    config = real_config(model_folder, **{"maru_runtime_dir": str(maru_runtime_dir), **extra})
    with capture_logs() as logs:
        worker = MaruKVConnector(config, KVConnectorRole.WORKER, kv_config(full()))
        compat_name = compat.attention_backend
        compat.attention_backend = lambda *args: "FLASH_ATTN"  # type: ignore[assignment]
        try:
            worker.register_kv_caches({"model.layers.0.attn": torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)})
        finally:
            compat.attention_backend = compat_name
        scheduler = MaruKVConnector(config, KVConnectorRole.SCHEDULER, kv_config(full()))
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    loud = [entry for entry in logs if entry["log_level"] not in ("info", "debug")]
    assert [entry["event"] for entry in loud] == ["maru.disabled"]
    assert text in loud[0]["reason"]
    assert not any("exc_info" in entry for entry in logs)
    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"maru_transfer_engine": "nope"}, ("maru_transfer_engine=nope", "torch-copy")),
        ({"maru_transfer_engine": "kernel"}, ("maru_transfer_engine=kernel", "CUDA")),
        ({"maru_transfer_exclude": "torch-copy,kernel,layerwise"}, ("maru_transfer_exclude",)),
    ],
)
def test_settings_that_leave_no_transfer_engine_are_one_warning_and_no_hits(
    model_folder: str, maru_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], texts: list[str]
) -> None:
    """Otherwise every hit would be promised, fail to load and be computed, for as long as the engine runs."""
    from tests.vllm.fake_store import FakeHandler, FakeStore

    handler = FakeHandler(FakeStore())
    monkeypatch.setattr(setup, "connect", lambda *args: handler)
    monkeypatch.setattr(compat, "attention_backend", lambda *args: "FLASH_ATTN")
    config = real_config(model_folder, **{"maru_runtime_dir": str(maru_runtime_dir), **extra})
    scheduler = MaruKVConnector(config, KVConnectorRole.SCHEDULER, kv_config(full()))
    worker = MaruKVConnector(config, KVConnectorRole.WORKER, kv_config(full()))
    with capture_logs() as logs:
        worker.register_kv_caches({"model.layers.0.attn": torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)})
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    (warning,) = [entry for entry in logs if entry["log_level"] not in ("info", "debug")]
    assert warning["event"] == "maru.disabled"
    assert all(text in warning["reason"] for text in texts)
    assert handler.closed
    assert scheduler.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0) == (0, False)


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_worker_says_how_long_its_objects_are(monkeypatch: pytest.MonkeyPatch, layerwise: bool) -> None:
    """So that a pool whose granule is too large for them is told of, once for an engine."""
    said: list[tuple[str, int | None]] = []
    monkeypatch.setattr(compat, "kv_geometry", lambda *_: evolve(GEOMETRY, layer_names=("a.0", "a.1", "a.2")))
    monkeypatch.setattr(
        setup.MaruHandler, "connect", lambda *_, role, object_bytes, **__: said.append((role, object_bytes))
    )
    plan = setup.make_plan(fake_config(), None, MaruConfig(use_layerwise=layerwise), setup.PluginSettings(allowed=()))
    assert isinstance(plan, setup.Plan)
    for role in ("scheduler", "worker"):
        setup.connect(plan, role)
    assert said == [("scheduler", None), ("worker", (1 if layerwise else 3) * 2 * 256 * 2 * 64 * 2)]
