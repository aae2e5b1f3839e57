"""What comes over a socket or lies in shared memory is never run: nothing in the core could unpickle or evaluate it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Modules that turn bytes into code or objects of any class.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "code",
    "codeop",
}
#: Functions that do, wherever they come from; the methods are those of ZeroMQ sockets, torch and numpy.
NAMES = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "load_module", "ext_hook", "object_hook"}
LOADERS = {("torch", "load"), ("numpy", "load"), ("np", "load")}


def suspects(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in METHODS or (owner, node.attr) in LOADERS:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.keyword) and (node.arg in METHODS or node.arg == "shell"):
            yield str(node.arg)
        elif isinstance(node, ast.Constant) and node.value in MODULES - {"code"}:
            yield str(node.value)  # the name for importlib


@pytest.mark.parametrize("package", ["maru_core", "maru_backends", "maru_transfer", "maru_plugins_dax"])
def test_nothing_could_run_what_it_receives(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert {str(path): found for path in files if (found := list(suspects(path.read_text())))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml as y",
        "import importlib\nimportlib.import_module('pickle')",
        "eval(x)",
        "f = exec",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "msgpack.unpackb(b, object_hook=f)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_look_finds_what_it_looks_for(source: str) -> None:
    assert list(suspects(source))
