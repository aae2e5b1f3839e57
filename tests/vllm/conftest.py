"""Fixtures for the connector's tests; all skip where vLLM is not installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.vllm.mini_engine import Engine


@pytest.fixture(autouse=True)
def vllm_leaves_no_environment() -> Iterator[None]:
    """vLLM exports variables of its own when it builds a configuration."""
    saved = dict(os.environ)
    yield
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    os.environ.update(saved)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("vllm")
    from tests.vllm.mini_engine import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_on(model_folder: str) -> Iterator[Callable[..., Engine]]:
    """``engine_on(store, **options)`` makes a mini engine on a fake store."""
    from tests.vllm.mini_engine import make_engine

    made: list[Engine] = []

    def make(store: Any, **options: Any) -> Engine:
        made.append(make_engine(store, model_folder, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
