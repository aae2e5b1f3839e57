"""The quickstart's driver, with fake engines: what it reports, when it fails, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARK = "QUICKSTART_TEST"


def marked(mark: str) -> list[int]:
    """Living processes whose environment has the mark: everything that a run has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile, or not ours
                continue
    return found


class Quickstart:
    """Starts the script as a user's shell does: in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.state.mkdir()
        self.mark = uuid.uuid4().hex
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent}/fake_python.py" "$@"\n')
        self.python.chmod(0o755)
        self.report = folder / "report.json"

    def start(self, *options: str, **faults: str) -> subprocess.Popen[str]:
        environment = os.environ | {
            MARK: self.mark,
            "PYTHON": sys.executable,
            "PYTHONHASHSEED": "1",
            "FAKE_STATE": str(self.state),
            "MARU_CACHE": str(self.folder / "cache"),
        } | faults  # fmt: skip
        command = [ROOT / "scripts/quickstart.sh", "--python", self.python, "--json", self.report, *options]
        pipe = subprocess.PIPE
        # A test run in the background ignores interrupts, and so would the shell.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=heard
        )

    def run(self, *options: str, **faults: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*options, **faults)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.state / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)

    def left_behind(self) -> list[object]:
        """Processes, pools and shared memory that are still there."""
        names = [self.state / "pools", self.state / "segments"]
        paths = [Path(line) for name in names if name.exists() for line in name.read_text().splitlines()]
        return [*marked(self.mark), *filter(Path.exists, paths)]

    def logs(self) -> list[Path]:
        return list((self.folder / "cache/quickstart").glob("*/*.log"))


@pytest.fixture
def quickstart(tmp_path: Path) -> Iterator[Quickstart]:
    run = Quickstart(tmp_path)
    yield run
    for pid in marked(run.mark):
        os.kill(pid, signal.SIGKILL)
    # Of runs that were killed, or of tests that failed.
    for path in run.left_behind():
        if isinstance(path, Path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
def test_a_run_reports_what_was_reused_and_leaves_nothing(quickstart: Quickstart) -> None:
    run = quickstart.run()
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(quickstart.report.read_text())
    assert report["passed"]
    rows = report["rows"]
    assert [row["maru_tokens"] for row in rows] == [0, 0, 0, 0, 3072, 3072]
    assert [row["own_cache_tokens"] for row in rows] == [0, 0, 3072, 0, 0, 0]
    assert all(3072 < row["prompt_tokens"] <= 3072 + 64 for row in rows)
    assert rows[3]["speed_up"] == 1
    assert rows[4]["speed_up"] > 5
    assert rows[3]["answer"] == rows[5]["answer"] != rows[4]["answer"]
    for row in rows:
        assert f"{row['ttft_s'] * 1e3:.0f} ms" in run.stdout
    assert quickstart.left_behind() == []
    assert len((quickstart.state / "segments").read_text().split()) == 3
    assert (quickstart.state / "server-ended").read_text() == "in good order"
    assert quickstart.logs() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "failed", "told"),
    [
        ("answer", ["answer to", "answer to"], "but without Maru"),
        ("metric", ["reuse of", "reuse of"], "vLLM's external hits 1536,"),
        ("server", ["reuse of", "reuse of"], "11 chunks of 256 = 2816"),
        ("slow", ["TTFT of", "TTFT of"], "at most 12% may be"),
    ],
)
def test_it_fails_when_something_does_not_hold(
    quickstart: Quickstart, fault: str, failed: list[str], told: str
) -> None:
    run = quickstart.run(FAKE_FAULT=fault)
    lines = [line.removeprefix("FAILED  ") for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert [line[: len(start)] for line, start in zip(lines, failed, strict=True)] == failed
    assert all(told in line for line in lines)
    assert run.returncode == (1 if failed else 0)
    assert json.loads(quickstart.report.read_text())["passed"] is not bool(failed)
    assert bool(quickstart.logs()) is bool(failed)


@pytest.mark.slow
def test_no_request_is_measured_beside_an_engine_that_polls_after_the_last_one(quickstart: Quickstart) -> None:
    run = quickstart.run(FAKE_FAULT="polls")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_an_engine_that_dies_is_named_with_the_end_of_its_log(quickstart: Quickstart) -> None:
    run = quickstart.run(FAKE_FAULT="dies")
    assert run.returncode == 1
    assert "vllm-A ended with exit code 7" in run.stderr
    assert "the engine met its fate" in run.stderr
    assert quickstart.left_behind() == []


def interrupt_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def interrupt_twice(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["model", "start", "ask"])
@pytest.mark.parametrize(("how", "code"), [(interrupt_group, 130), (interrupt_twice, 130), (terminate, 143)])
def test_an_interrupt_leaves_no_process_behind(
    quickstart: Quickstart, where: str, how: Callable[[subprocess.Popen[str]], None], code: int
) -> None:
    process = quickstart.start(FAKE_HANG=where)
    quickstart.wait_for("hangs")
    assert len(marked(quickstart.mark)) >= 4
    how(process)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "everything was ended" in err
    assert quickstart.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.02, 0.1, 0.2, 0.3, 0.5, 0.8])
def test_an_interrupt_at_any_moment_leaves_no_process_behind(quickstart: Quickstart, delay: float) -> None:
    process = quickstart.start()
    time.sleep(delay)
    interrupt_group(process)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert quickstart.left_behind() == []


def test_an_interrupt_that_a_child_of_the_shell_does_not_hear_ends_it(quickstart: Quickstart, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text(f"#!/bin/sh\ntrap '' INT\ntouch '{quickstart.state}/hangs'\nsleep 0.5\n")
    deaf.chmod(0o755)
    process = quickstart.start(PYTHON=str(deaf))
    quickstart.wait_for("hangs")
    interrupt_group(process)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert quickstart.left_behind() == []


SIGNAL_BETWEEN_FORK_AND_NOTE = """
import os, signal, subprocess, sys
from pathlib import Path
from scripts.quickstart.processes import Interrupted, Processes
real = subprocess.Popen
def popen(*arguments, **options):
    process = real(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
subprocess.Popen = popen
try:
    with Processes() as processes:
        processes.start("sleep", ["sleep", "600"], Path(sys.argv[1]), os.environ)
        print("went on")
except Interrupted as interrupted:
    print(interrupted.number)
"""


def test_a_signal_in_the_middle_of_a_start_loses_no_process(quickstart: Quickstart, tmp_path: Path) -> None:
    environment = os.environ | {MARK: quickstart.mark, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SIGNAL_BETWEEN_FORK_AND_NOTE, str(tmp_path / "log")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert run.stdout == f"{int(signal.SIGTERM)}\n", run.stderr
    assert quickstart.left_behind() == []


@pytest.mark.slow
def test_children_of_a_killed_run_are_told(quickstart: Quickstart) -> None:
    process = quickstart.start(FAKE_HANG="start")
    quickstart.wait_for("hangs")
    process.kill()
    process.communicate(timeout=30)
    quickstart.wait_for("server-ended")


def test_wrong_options_are_refused_before_anything_starts(quickstart: Quickstart) -> None:
    run = quickstart.run("--json", "/no/such/folder/x.json")
    assert run.returncode == 2
    assert "there is no folder /no/such/folder" in run.stderr


def test_an_unsuitable_python_is_named(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": "/bin/false"}
    run = subprocess.run([ROOT / "scripts/quickstart.sh"], env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert "/bin/false" in run.stderr
