"""Which engine is taken, of any that plugins may offer, and what is said of the others."""

from __future__ import annotations

from typing import Any, cast

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from maru_core.contracts import EngineProvision, TransferEngine
from maru_transfer.selection import AUTO, Choice, Pages, choose

PAGES = cast(Any, Pages)("paged", "stored", "cuda")


@frozen
class Engine:
    """``missing``: what it needs and has not; ``cannot``: why it never moves such pages; ``raises``: where it fails."""

    name: str
    rank: int = 0
    missing: str | None = None
    cannot: str | None = None
    raises: str = ""

    def unsupported(self, paged: Any, stored: Any, device: str) -> str | None:
        assert (paged, stored, device) == ("paged", "stored", "cuda")
        self.fail("unsupported")
        return self.cannot

    def is_available(self) -> bool:
        self.fail("is_available")
        return self.missing is None

    def import_error(self) -> str | None:
        return self.missing

    def fail(self, where: str) -> None:
        if self.raises == where:
            raise SystemExit(f"{where} of {self.name}")

    @property
    def is_usable(self) -> bool:
        return self.missing is None and self.cannot is None and not self.raises


def chosen(*engines: Engine, **how: Any) -> tuple[Choice, list[str]]:
    """The choice, and the engines that were made for it."""
    made = []
    by_name = {engine.name: engine for engine in engines}

    def find(name: str) -> TransferEngine:
        made.append(name)
        by_name[name].fail("factory")
        return cast(TransferEngine, by_name[name])

    offered = {name: EngineProvision(name, cast(Any, None), engine.rank) for name, engine in by_name.items()}
    return choose(offered, find, PAGES, **how), made


FAST = Engine("fast", 2)
SLOW = Engine("slow", 0)


def test_auto_takes_the_best_and_does_not_touch_the_others() -> None:
    choice, made = chosen(SLOW, FAST)
    assert (choice.chosen, made) == ("fast", ["fast"])
    assert choice.reasons == {"slow": "ranked after fast; maru_transfer_engine=slow asks for it"}
    assert choice.missed == ()


def test_one_that_lacks_something_is_missed_and_one_that_never_could_is_not() -> None:
    choice, _ = chosen(SLOW, Engine("fast", 2, missing="no kernels; install nvcc"))
    assert choice.chosen == "slow"
    assert [(passed.name, passed.reason) for passed in choice.missed] == [("fast", "no kernels; install nvcc")]
    choice, _ = chosen(SLOW, Engine("fast", 2, missing="no kernels; install nvcc", cannot="pages on cpu"))
    assert choice.reasons == {"fast": "pages on cpu"}
    assert choice.missed == ()


def test_forced_and_excluded_engines() -> None:
    choice, made = chosen(SLOW, FAST, wanted="slow")
    assert (choice.chosen, made, choice.reasons) == ("slow", ["slow"], {"fast": "maru_transfer_engine=slow"})
    choice, made = chosen(SLOW, Engine("fast", 2, missing="gone"), excluded=("fast",))
    assert (choice.chosen, made, choice.missed) == ("slow", ["slow"], ())
    assert choice.reasons == {"fast": "excluded by maru_transfer_exclude"}


def test_a_forced_engine_is_not_replaced() -> None:
    choice, made = chosen(SLOW, Engine("fast", 2, missing="no kernels; install nvcc"), wanted="fast")
    assert (choice.chosen, made) == (None, ["fast"])
    assert "maru_transfer_engine=fast: no engine can move these pages" in choice.refusal()
    assert "fast: no kernels; install nvcc" in choice.refusal()


def test_refusals_say_what_to_do() -> None:
    choice, _ = chosen(SLOW, FAST, excluded=("slow", "fast"))
    assert choice.chosen is None
    assert "take a name out of maru_transfer_exclude" in choice.refusal()
    choice, made = chosen(SLOW, FAST, wanted="fats")
    assert (choice.unknown, made) == (("fats",), [])
    assert choice.refusal() == "maru_transfer_engine=fats: no plugin offers it; there are: fast, slow"
    choice, _ = chosen()
    assert "no plugin offers one" in choice.refusal()


def test_a_name_that_nobody_offers_is_told() -> None:
    choice, _ = chosen(SLOW, FAST, excluded=("fats", "fast"))
    assert (choice.chosen, choice.unknown) == ("slow", ("fats",))


@pytest.mark.parametrize("where", ["factory", "unsupported", "is_available"])
def test_an_engine_that_fails_is_passed_over(where: str) -> None:
    choice, _ = chosen(SLOW, Engine("fast", 2, raises=where))
    assert (choice.chosen, choice.reasons) == ("slow", {"fast": f"SystemExit: {where} of fast"})


engines = st.lists(
    st.builds(
        Engine,
        name=st.sampled_from("abcdef"),
        rank=st.integers(-1, 2),
        missing=st.sampled_from([None, None, "gone"]),
        cannot=st.sampled_from([None, None, "never"]),
        raises=st.sampled_from(["", "", "factory", "unsupported", "is_available"]),
    ),
    unique_by=lambda engine: engine.name,
)


@given(
    engines,
    st.sampled_from([AUTO, AUTO, *"abg"]),
    st.lists(st.sampled_from("abcdefg"), unique=True, max_size=4),
)
def test_the_first_that_may_and_can(offered: list[Engine], wanted: str, excluded: list[str]) -> None:
    choice, made = chosen(*offered, wanted=wanted, excluded=excluded)
    may = [engine for engine in offered if engine.name not in excluded and wanted in (AUTO, engine.name)]
    best = min((e for e in may if e.is_usable), key=lambda e: (-e.rank, e.name), default=None)
    assert choice.chosen == (best.name if best else None)
    # Every other one has a reason, and none was made that could not have been chosen.
    assert {*choice.reasons, *([best.name] if best else [])} == {engine.name for engine in offered}
    assert all(choice.reasons.values())
    assert set(made) <= {engine.name for engine in may}
    before = [e for e in may if best is None or (-e.rank, e.name) < (-best.rank, best.name)]
    missed = {
        e.name for e in before if e.raises in ("factory", "unsupported") or (e.cannot is None and not e.is_usable)
    }
    assert {passed.name for passed in choice.missed} == missed
