"""What the documentation names is there: files, settings, and commands with their options."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from maru_core.cli import main
from maru_core.config import FORMER_NAMES, PREFIX, settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FOLDERS = ("maru_*", "csrc", "benchmarks", "scripts", "tests", "examples", "docs")
#: Endings of files that are written; what is built lies beside them or not.
WRITTEN = ("py", "sh", "c", "h", "cu", "md", "toml", "txt")
#: `name.py --option value --flag`, wherever it stands.
SCRIPT = re.compile(r"\b(\w+\.py)\b((?: +--?[a-z][\w-]*(?:[ =][\w./,=*-]+)?)*)")
#: A command line, behind variables of its own or not.
MARU = re.compile(r"(?:`|^)(?:[A-Z_]+=\S* )*maru ([^`\n]+)", re.MULTILINE)

page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def files() -> list[str]:
    """Paths of everything that is written, each behind a slash."""
    found = [*ROOT.iterdir(), *(path for folder in FOLDERS for top in ROOT.glob(folder) for path in top.rglob("*"))]
    return [f"/{path.relative_to(ROOT)}" for path in found if path.suffix[1:] in WRITTEN]


def words() -> set[str]:
    """Names with Maru's prefix in everything that is no documentation, and those that are made of parts."""
    code = [ROOT / name[1:] for name in files() if not name.endswith(".md")]
    found = set(re.findall(r"\b(?:maru|MARU)_\w+", "\n".join(path.read_text(errors="replace") for path in code)))
    made = {PREFIX + attribute.name for attribute in settings()} | set(FORMER_NAMES)
    return found | made | {name.upper() for name in made}


@page_by_page
def test_files_are_there(page: Path) -> None:
    named = set(re.findall(rf"`([\w./-]+\.(?:{'|'.join(WRITTEN)}))`", page.read_text()))
    # The plugin that docs/plugins.md writes is tested as it stands there.
    own = set(re.findall(r"<!-- file: (\S+) -->", page.read_text()))
    there = files()
    assert [name for name in named - own if not any(path.endswith(f"/{name}") for path in there)] == []


@page_by_page
def test_settings_variables_and_functions_are_there(page: Path) -> None:
    # Metrics are made of parts, and compared with the page that lists them.
    named = set(re.findall(r"(?<!vllm:)\b(?:maru|MARU)_\w+", page.read_text()))
    assert sorted(name for name in named - words() if not name.endswith("_total")) == []


def scripts() -> dict[str, set[str]]:
    """Programs in benchmarks/ that pages name, and the options that they are shown with."""
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for name, options in SCRIPT.findall(page.read_text()):
            if name in programs:
                found.setdefault(name, set()).update(re.findall(r"(?<= )--[\w-]+", options))
    return found


def test_commands_are_found_in_the_pages() -> None:
    """Else the test behind this one would be of nothing."""
    assert "--fairness" in scripts()["metadata.py"]
    assert len(scripts()) > 20
    said = [words for page in PAGES for words in shown(page)]
    assert {"serve", "status", "plugins", "doctor", "keygen", "admin"} <= {words[0] for words in said}
    assert any("--take-over" in words for words in said)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(scripts()))
def test_a_benchmark_takes_the_options_that_it_is_shown_with(script: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert scripts()[script] - set(re.findall(r"--[\w-]+", run.stdout)) == set()


def shown(page: Path) -> Iterator[list[str]]:
    """The words behind each `maru` of a page that begins a command."""
    for line in MARU.findall(page.read_text()):
        yield re.split(r"\s+", line.split("#")[0].split("|")[0].split("&&")[0].strip())


@page_by_page
def test_commands_of_maru_take_the_options_that_they_are_shown_with(page: Path) -> None:
    for said in shown(page):
        command: click.Command = main
        rest = list(said)
        while rest and isinstance(command, click.Group) and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"maru {' '.join(said)}"
            command = command.commands[rest.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {
            "--help",
            "-h",
        }
        given = {word.split("=")[0].rstrip(".,;:") for word in rest if word.startswith("--")}
        assert given - known == set(), f"maru {' '.join(said)}"
