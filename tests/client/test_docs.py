"""The handler's page is executed as it stands."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.client.real import Folder


@pytest.mark.slow
def test_the_snippets_of_the_handlers_page_run(folder: Folder) -> None:
    page = Path(__file__).parents[2] / "docs" / "handler.md"
    globs = {"runtime_dir": str(folder.path), "pool_path": str(folder.path)}
    text = page.read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, globs, page.name, str(page), 0)
    assert len(test.examples) > 20
    report: list[str] = []
    runner = doctest.DocTestRunner()
    with capture_logs():
        failed = runner.run(test, out=report.append).failed
    assert not failed, "".join(report)
