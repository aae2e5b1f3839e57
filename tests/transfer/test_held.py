"""Nothing is unregistered while a transfer copies, from the beginning of a layered load to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from maru_core.brake import Brake
from maru_core.contracts import LoadsByLayer, PreparesLayeredLoads
from maru_core.errors import TransferError
from maru_transfer.held import HeldByLayer, held


class Pools:
    users = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1


class Load:
    def __init__(self, error: bool) -> None:
        self.error = error
        self.cancelled = False

    def layers_done(self) -> int:
        return 2

    def wait_layer(self, layer: int) -> None:
        assert layer == 1

    def finish(self) -> None:
        if self.error:
            raise TransferError("injected")

    def cancel(self) -> None:
        self.cancelled = True


class Copies:
    staging_bytes = 17

    def __init__(self) -> None:
        self.called: list[str] = []

    def load(self, block_ids: Any, copies: Any) -> None:
        self.called.append("load")

    def store(self, block_ids: Any, copies: Any) -> None:
        self.called.append("store")

    def close(self) -> None:
        pass


class ByLayer(Copies):
    refuses = error = False

    def begin_load(self, block_ids: Any, copies: Any) -> Load:
        if self.refuses:
            raise TransferError("injected")
        self.begun = Load(self.error)
        return self.begun


def test_only_what_loads_by_layer_says_that_it_does() -> None:
    pools: Any = Pools()
    assert not isinstance(held(Copies(), pools), LoadsByLayer)
    assert isinstance(held(ByLayer(), pools), LoadsByLayer)
    assert held(Copies(), pools).staging_bytes == 17  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["load", "store"])
def test_what_is_prepared_holds_from_its_plan_until_it_is_closed(what: str) -> None:
    pools: Any = Pools()
    copies = Copies()
    prepared = getattr(held(copies, pools), f"prepare_{what}")([], [None, None])
    assert pools.users == 1
    assert not copies.called
    assert prepared.run(Brake(), 1) == 2
    assert copies.called == [what] * 2
    assert pools.users == 1
    prepared.close()
    prepared.close()
    assert not pools.users


@pytest.mark.parametrize("plan", ["prepare_load", "prepare_store"])
def test_what_cannot_be_planned_holds_nothing(plan: str) -> None:
    class Refusing(Copies):
        def prepare_load(self, block_ids: Any, copies: Any) -> Any:
            raise TransferError("injected")

        prepare_store = prepare_load

    pools: Any = Pools()
    transfer: Any = held(Refusing(), pools)
    with pytest.raises(TransferError, match="injected"):
        getattr(transfer, plan)([], [])
    assert not pools.users


@pytest.mark.parametrize("error", [False, True])
def test_a_layered_load_holds_until_it_has_finished(error: bool) -> None:
    pools: Any = Pools()
    inner = ByLayer()
    inner.error = error
    transfer = held(inner, pools)
    assert isinstance(transfer, LoadsByLayer)
    load = transfer.begin_load([], [])
    assert pools.users == 1
    load.wait_layer(1)
    assert load.layers_done() == 2
    load.cancel()
    assert inner.begun.cancelled
    assert pools.users == 1
    for _ in range(2):
        if error:
            with pytest.raises(TransferError):
                load.finish()
        else:
            load.finish()
        assert pools.users == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_planned_layered_load_holds_from_its_plan_until_it_has_finished_or_was_closed(begun: bool) -> None:
    pools: Any = Pools()
    transfer = held(ByLayer(), pools)
    assert isinstance(transfer, PreparesLayeredLoads)
    prepared = transfer.prepare_layers([], [])
    assert pools.users == 1
    load = prepared.begin() if begun else None
    assert pools.users == 1
    prepared.close()
    prepared.close()
    assert pools.users == begun
    if load is not None:
        load.finish()
        load.finish()
    assert pools.users == 0
    with pytest.raises(TransferError, match="begun or closed before"):
        prepared.begin()
    assert pools.users == 0


def test_a_layered_load_that_is_refused_holds_nothing() -> None:
    """One that was planned holds until it is closed."""
    pools: Any = Pools()
    inner = ByLayer()
    inner.refuses = True
    transfer = held(inner, pools)
    assert isinstance(transfer, HeldByLayer)
    with pytest.raises(TransferError, match="injected"):
        transfer.begin_load([], [])
    assert pools.users == 0
    prepared = transfer.prepare_layers([], [])
    with pytest.raises(TransferError, match="injected"):
        prepared.begin()
    prepared.close()
    assert pools.users == 0
