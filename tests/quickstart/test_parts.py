"""Parts of the quickstart and of the benchmarks that need no process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from benchmarks.outcome import Bound, Outcome, main
from scripts.quickstart import document
from scripts.quickstart.progress import Progress


def words_as_tokens(prompt: str) -> list[int]:
    return [hash(word) for word in prompt.split()]


@pytest.mark.parametrize("chunks", [4, 12, 20])
def test_the_document_shares_whole_chunks_and_little_more(chunks: int) -> None:
    prompts = document.fit(words_as_tokens, 256, chunks, 64)
    first, second = words_as_tokens(prompts.first), words_as_tokens(prompts.second)
    assert first[: chunks * 256] == second[: chunks * 256]
    assert first != second
    assert (len(first), len(second)) == (prompts.first_tokens, prompts.second_tokens)
    assert chunks * 256 < max(len(first), len(second)) <= chunks * 256 + 64


def test_a_document_that_is_too_short_or_leaves_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 51200 tokens"):
        document.fit(words_as_tokens, 256, 200, 64)
    with pytest.raises(ValueError, match=r"\d tokens follow the last shared chunk; at most 3 may"):
        document.fit(words_as_tokens, 256, 4, 3)


def test_progress_is_shown_in_a_log_and_in_a_terminal() -> None:
    log = io.StringIO()
    progress = Progress(log)
    progress.step("one")
    progress.tick()
    progress.note("two")
    assert [line[9:] for line in log.getvalue().splitlines()] == ["one", "  two"]


@pytest.mark.parametrize(("figure", "code"), [(1.0, 0), (1.1, 1), (float("nan"), 1)])
def test_a_missed_bound_decides_the_exit_status(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    figure: float,
    code: int,
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    outcome = Outcome([["what", "ms"], ["it", "1"]], {"it": 1}, [Bound("it", figure, 1.0)])
    target = tmp_path / "figures.json"
    assert main("about", lambda options: outcome, arguments=["--json", str(target)]) == code
    assert json.loads(target.read_text())["missed"] == ["it"] * code
    assert ("MISSED" in capsys.readouterr().out) is bool(code)
