"""``MARU_PLUGINS`` holds in every process of a real engine: what it leaves out is imported in none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import REPOSITORY, end, result_of, spawn
from tests.host.vendor import install

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: Tells by files which process imported it, and what sessions and loads that process has.
TELLING = """
    import os, pathlib
    from maru_core.plugin import hookimpl

    def tell(what):
        (pathlib.Path(__file__).parent / f"{{what}}.{name}.{{os.getpid()}}").touch()

    tell("imported")

    @hookimpl
    def maru_session_opened(role): tell(role)

    @hookimpl
    def maru_after_read(extents): tell("read")
"""


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, set[int]]]:
    """What the engine said, and the processes (by id) that told something, as ``what.plugin``."""
    folder, runtime = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("run")
    for name in ("listed", "unlisted"):
        install(folder, f"dist-{name}", {name: f"told_{name}"}, {f"told_{name}": TELLING.format(name=name)})
    process = spawn(
        *("-m", "tests.engine.plugged", str(tiny_model), str(runtime)),
        PYTHONPATH=f"{REPOSITORY}:{folder}",
        MARU_PLUGINS="listed",
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    told: dict[str, set[int]] = {}
    for path in folder.glob("*.*.*"):
        what, name, pid = path.name.split(".")
        if pid.isdigit():
            told.setdefault(f"{what}.{name}", set()).add(int(pid))
    return result_of(output), told


def test_the_engine_works_with_it(run: tuple[dict[str, Any], dict[str, set[int]]]) -> None:
    found, _ = run
    assert (found["cached"][0], found["cached"][-1]) == (0, 256)


def test_what_is_listed_is_imported_where_it_is_needed(run: tuple[dict[str, Any], dict[str, set[int]]]) -> None:
    """The engine's core, its worker, and the server: three processes."""
    found, told = run
    (core,), (worker,) = told["scheduler.listed"], told["worker.listed"]
    assert len({core, worker, found["server"], found["pid"]}) == 4
    assert {core, worker, found["server"]} <= told["imported.listed"]
    assert told["read.listed"] == {worker}, "loads are announced to it"


def test_what_is_not_listed_is_imported_in_no_process(run: tuple[dict[str, Any], dict[str, set[int]]]) -> None:
    _, told = run
    assert [name for name in told if name.endswith(".unlisted")] == []
