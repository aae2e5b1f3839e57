"""The model's cache: made once, by one process, and again when it is incomplete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import prepare_model
from scripts.prepare_model import ModelError, is_complete, prepare, write_manifest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARU_CACHE", str(tmp_path))
    return tmp_path


def fill(target: Path) -> None:
    target.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_text(name)
    write_manifest(target)


def test_it_is_made_once(cache: Path) -> None:
    made = []

    def maker(target: Path) -> None:
        made.append(target)
        fill(target)

    assert prepare(maker) == prepare(maker) == cache / "models" / prepare_model.NAME
    assert len(made) == 1


@pytest.mark.parametrize("damage", ["model.safetensors", prepare_model.MANIFEST])
def test_an_incomplete_model_is_not_complete(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    fill(folder)
    assert is_complete(folder)
    (folder / damage).write_text("cut")
    assert not is_complete(folder)
    (folder / damage).unlink()
    assert not is_complete(folder)


def test_a_conversion_that_writes_too_little_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model\.safetensors, tokenizer\.json"):
        write_manifest(tmp_path)


def test_an_incomplete_model_is_replaced_by_one_rename(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cache / "models" / prepare_model.NAME
    target.mkdir(parents=True)
    (target / "model.safetensors").write_text("half")
    leftover = cache / "models" / f".{prepare_model.NAME}-killed"
    leftover.mkdir()
    monkeypatch.setattr(prepare_model, "download", lambda folder: folder / "x.gguf")

    def convert(source: Path, made: Path) -> None:
        assert (target / "model.safetensors").read_text() == "half"
        assert not is_complete(target)
        fill(made)
        (made / prepare_model.MANIFEST).unlink()

    monkeypatch.setattr(prepare_model, "convert", convert)
    assert is_complete(prepare())
    assert sorted(path.name for path in (cache / "models").iterdir()) == [
        f".{prepare_model.NAME}.lock",
        prepare_model.NAME,
    ]


def test_several_processes_make_it_once(cache: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from scripts.prepare_model import prepare, write_manifest
def maker(target):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    target.mkdir()
    time.sleep(0.3)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_text(name)
    write_manifest(target)
print(prepare(maker))
"""
    log = cache / "log"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(log)]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {run.communicate(timeout=30)[0] for run in runs}
    assert outputs == {f"{cache / 'models' / prepare_model.NAME}\n"}
    assert log.read_text() == "made\n"
