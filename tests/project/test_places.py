"""Every test has a place: each combination of markers belongs to a step of ``scripts/test.sh``, and to one alone."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[2]
#: Markers that name a place of their own, and where tests that bear them lie.
PLACES = {"engine": "engine", "build": "project", "vendor": "vendor", "vm": "vm"}
#: Runs only when a person asks for it.
ON_REQUEST = "long"


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """What pyproject.toml tells pytest."""
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def default(options: dict[str, Any]) -> str:
    """What ``pytest`` selects of itself."""
    return _selection(shlex.split(options["addopts"]))


def _selection(words: list[str]) -> str:
    return words[words.index("-m") + 1]


def steps(text: str, default: str) -> list[str]:
    """The marker expressions with which a script runs pytest."""
    found = []
    for line in text.splitlines():
        if re.match(r"\s*(step|exec) python -m pytest ", line):
            words = shlex.split(line.split("||")[0])
            words = words[words.index("pytest") + 1 :]
            assert not [word for word in words if word.startswith("tests/") and word != "tests/vm"], line
            found.append(_selection(words) if "-m" in words else default)
    return found


@pytest.fixture(scope="module")
def expressions(default: str) -> list[str]:
    """Of all steps that continuous integration takes."""
    script = (ROOT / "scripts/test.sh").read_text()
    assert "step scripts/test-vm.sh" in script
    return steps(script, default) + steps((ROOT / "scripts/test-vm.sh").read_text(), default)


def taken(expressions: list[str], markers: set[str]) -> int:
    """How many of the steps run a test that bears these markers."""
    compiled = [Expression.compile(expression) for expression in expressions]
    return sum(one.evaluate(lambda name, **_: name in markers) for one in compiled)


def names(options: dict[str, Any]) -> list[str]:
    """All markers of the project."""
    return [line.split(":")[0] for line in options["markers"]]


def test_a_test_is_run_once_whatever_markers_it_bears(options: dict[str, Any], expressions: list[str]) -> None:
    others = [name for name in names(options) if name not in (*PLACES, ON_REQUEST)]
    assert "slow" in others
    for place in (None, *PLACES):
        for chosen in itertools.product([False, True], repeat=len(others)):
            markers = {name for name, wanted in zip(others, chosen, strict=True) if wanted} | {place} - {None}
            assert taken(expressions, markers) == 1, f"tests marked {sorted(markers)} are in no step, or in several"


def test_two_places_are_no_way_to_be_left_out(expressions: list[str]) -> None:
    for pair in itertools.combinations(PLACES, 2):
        assert taken(expressions, {*pair}) >= 1
        assert taken(expressions, {*pair, "slow"}) >= 1


def test_what_takes_minutes_runs_only_on_request(expressions: list[str]) -> None:
    assert taken(expressions, {ON_REQUEST}) == taken(expressions, {ON_REQUEST, "slow"}) == 0


def test_pytest_alone_runs_the_quick_tests(options: dict[str, Any], default: str, expressions: list[str]) -> None:
    assert taken([default], set()) == 1
    for marker in ("slow", ON_REQUEST, *PLACES):
        assert taken([default], {marker}) == 0
    assert default in expressions


def test_steps_search_with_full_budgets() -> None:
    script = (ROOT / "scripts/test.sh").read_text()
    steps = [line for line in script.splitlines() if "pytest -q -n" in line and not line.endswith("-m build")]
    assert len(steps) == 2
    assert all("--hypothesis-profile=full" in line for line in steps)


@pytest.mark.parametrize("place", PLACES)
def test_markers_are_where_their_tests_lie(place: str) -> None:
    """The step of the machines names its folder; and nobody marks a unit test into a step of minutes by mistake."""
    bearing = [path for path in (ROOT / "tests").rglob("*.py") if f"pytest.mark.{place}\n" in _ended(path)]
    assert bearing
    assert {path.parent.name for path in bearing} == {PLACES[place]}


def _ended(path: Path) -> str:
    return re.sub(r"(pytest\.mark\.\w+)\b", r"\1\n", path.read_text())
