"""Documents that are written from the code, or run as code."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import fields

from maru_core import hookspecs
from maru_core.config import FORMER_NAMES, PREFIX, settings
from maru_core.protocol import messages
from maru_core.protocol.version import PROTOCOL_VERSION
from maru_core.server.metrics import StatsCollector
from maru_core.testing_backend import BackendContract
from maru_plugins_dax.switches import Switches
from tests.host.vendor import install
from tests.server.test_edge import make_handlers

ROOT = Path(__file__).parents[2]
RUN = re.compile(r"<!-- run(?:: (\d))? -->\n```sh\n(.*?)```\n```text\n(.*?)```\n", re.DOTALL)
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<text>.*?)```\n", re.DOTALL)


def test_the_configuration_page_is_up_to_date() -> None:
    run = subprocess.run([sys.executable, ROOT / "scripts/docs-config.py", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_configuration_page_names_every_setting() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    for name in [*(PREFIX + attribute.name for attribute in settings()), *FORMER_NAMES]:
        assert f"`{name}`" in page


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The plugin of docs/plugins.md, installed by pip where its build backend is there, else file by file."""
    files = dict(FILE.findall((ROOT / "docs/plugins.md").read_text()))
    assert set(files) >= {"pyproject.toml", "maru_acme/plugin.py", "tests/test_acme.py", "pytest.ini"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if {"hatchling", "pip"} <= {found.metadata["Name"] for found in importlib.metadata.distributions()}:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--target", tmp_path / "site", tmp_path], check=True, capture_output=True)
        shutil.rmtree(tmp_path / "maru_acme")  # what is tested is what was installed
    else:
        entries = re.search(r'entry-points."maru.plugins"\]\n((?:\S+ = "\S+"\n)+)', files["pyproject.toml"])
        assert entries
        install(tmp_path / "site", "maru-acme", dict(re.findall(r'(\S+) = "(\S+)"', entries[1])), {}, "0.1.0")
        shutil.move(tmp_path / "maru_acme", tmp_path / "site" / "maru_acme")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("caller", [{}, {"MARU_PLUGINS": "none"}, {"MARU_PLUGINS": "acme,other"}], ids=str)
def test_the_plugin_of_the_documentation_passes_its_tests(example: Path, caller: dict[str, str]) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MARU_", "PYTEST_"))}
    clean["PYTHONPATH"] = os.pathsep.join([str(example / "site"), str(ROOT)])
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins only cost time here
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=example, env=clean | caller, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    # Five of its own, and the contract.
    contract = [name for name in vars(BackendContract) if name.startswith("test_")]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 5 + len(contract)


@pytest.mark.slow
def test_the_commands_of_the_documentation_show_what_it_says(example: Path) -> None:
    """Each ``run`` block in a shell, with the status in its comment; every line of the block behind it is shown."""
    program = example / "bin" / "maru"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom maru_core.cli import main\nmain()\n")
    program.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MARU_", "PYTEST_"))}
    clean["PYTHONPATH"] = os.pathsep.join([str(example / "site"), str(ROOT)])
    clean["PATH"] = f"{program.parent}{os.pathsep}{clean['PATH']}"
    blocks = RUN.findall((ROOT / "docs/plugins.md").read_text())
    assert len(blocks) == 2
    for status, commands, shown in blocks:
        run = subprocess.run(["bash", "-c", commands], env=clean, capture_output=True, text=True, timeout=60)
        assert run.returncode == int(status or 0), run.stdout + run.stderr
        for line in shown.splitlines():
            assert line in run.stdout + run.stderr, run.stdout + run.stderr


def test_the_page_of_hints_names_every_switch_with_its_default() -> None:
    page = (ROOT / "docs/hints.md").read_text()
    for switch in fields(Switches):
        (default,) = re.findall(rf"\| `MARU_DAX_{switch.name.upper()}` \| (.+?) \|$", page, re.MULTILINE)
        if isinstance(switch.default, bool):
            assert default == ("on" if switch.default else "off"), switch.name
        elif isinstance(switch.default, str):
            assert default == f"`{switch.default}`"


def test_the_documentation_lists_every_hook_with_its_arguments() -> None:
    text = (ROOT / "docs/plugins.md").read_text()
    hooks = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("maru_")}
    signatures = {f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in hooks.items()}
    assert set(re.findall(r"^\| `(maru_\w+\(.*?\))` \|", text, re.MULTILINE)) == signatures
    assert set(re.findall(r"def (maru_\w+)\(", text)) <= set(hooks)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], anchor


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {page.name for page in (ROOT / "docs").glob("*.md")} - {
        "README.md"
    }


def cells(page: str) -> set[tuple[str, str]]:
    """The first two cells of each line of a table, without what follows a colon."""
    found = re.findall(r"^\| ([^|]*) \| ([^|:]*)", (ROOT / page).read_text(), re.MULTILINE)
    return {(first.strip(), second.strip()) for first, second in found}


def test_the_page_of_the_protocol_has_its_numbers() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    assert f"\nVersion {PROTOCOL_VERSION}. " in page
    for limit in ("MAX_KEYS", "MAX_RESUME"):
        assert re.search(rf"{getattr(messages, limit):,}[^.]*`{limit}`", page), limit
    table = cells("docs/protocol.md")
    for kind in (messages.Op, messages.Code, messages.ReserveStatus):
        assert {(str(int(item)), item.name) for item in kind} <= table, kind
    assert {verb.value for verb in messages.AdminVerb} <= {first for first, _ in table}


def test_the_page_of_operations_has_every_metric_and_no_other() -> None:
    collector = StatsCollector()
    collector.snapshot = make_handlers()[0].snapshot()
    told = {sample.name for family in collector.collect() for sample in family.samples}
    # Without a request these have no sample.
    told |= {f"{family.name}_total" for family in collector.collect() if not family.samples}
    page = (ROOT / "docs/operations.md").read_text().partition("## Metrics")[2].partition("## Limits")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `maru_")]
    assert set(re.findall(r"`(maru_\w+)(?:\{\S*\})?`", "".join(rows))) == told
