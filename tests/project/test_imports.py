"""The arrows between packages, and imports that do nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = {"attrs", "pluggy", "msgpack", "zmq", "structlog", "xxhash"}
#: What each package may import beside the standard library and itself.
ALLOWED: dict[str, set[str]] = {
    "maru_core": CORE,
    "maru_backends": {"maru_core", "attrs", "structlog"},
    "maru_transfer": {"maru_core", "attrs", "numpy", "structlog", "torch"},
    "maru_integrations": {"maru_core", "maru_transfer", "attrs", "structlog", "torch", "vllm"},
    "maru_plugins_dax": {"maru_core", "attrs", "structlog"},
}
#: Single modules that may import more: the command line, and what is only used by tests.
MORE: dict[str, set[str]] = {
    "maru_core/cli": {"click"},
    "maru_core/testing.py": {"pytest"},
    "maru_core/testing_backend.py": {"pytest"},
    "maru_core/server/metrics.py": {"prometheus_client"},
}
#: Modules that may not import torch although their package may.
NO_TORCH = (
    *(
        "maru_transfer/plan.py",
        "maru_transfer/selection.py",
        "maru_transfer/torch_copy_plugin.py",
        "maru_transfer/kernel_plugin.py",
        "maru_transfer/layerwise_plugin.py",
    ),
    *("maru_transfer/cuda_driver.py", "maru_transfer/pinning.py", "maru_transfer/pinning_findings.py"),
    *("maru_transfer/memlock.py", "maru_transfer/pinned_pieces.py"),
    "maru_transfer/build_info.py",
)
#: Public names of the core for plugins that live outside of it, and for ours which is written like them.
PUBLIC = {"config", "contracts", "errors", "geometry", "hookspecs", "plugin", "pool_format", "protocol", "sizes"}
PUBLIC |= {"composite"}
#: Lower layers of the core may not know higher ones.
LAYERS = [
    {"checksum", "errors", "logs", "plugin", "sizes", "address", "brake"},
    {"pool_format", "geometry"},
    {"protocol"},
    {"namespace", "keys", "contracts", "discovery", "config", "setting_kinds", "setting_sources", "access"},
    {"hookspecs", "hints", "plugin_checks", "foreign", "composite", "fakes"},
    {"host"},
]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute module names that a file imports anywhere, also inside functions and ``TYPE_CHECKING``."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def breaches(path: Path, package: str) -> list[str]:
    """Imports of ``path`` that its package does not allow, as ``file:line module``."""
    name = str(path.relative_to(ROOT))
    allowed = {package, *ALLOWED[package], *sys.stdlib_module_names}
    for part, more in MORE.items():
        if name == part or name.startswith((part + "/", part + ".py")):
            allowed |= more
    if name in NO_TORCH:
        allowed -= {"numpy", "torch"}
    return [f"{name}:{line} {module}" for module, line in imports(path) if module.split(".")[0] not in allowed]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    files = sources(package)
    assert files
    assert [breach for path in files for breach in breaches(path, package)] == []


def test_a_forbidden_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "maru_core"
    folder.mkdir()
    path = folder / "x.py"
    for source in ("import torch.nn", "def f():\n    from maru_backends import cpu", "from vllm import LLM"):
        path.write_text(source)
        assert breaches(path, "maru_core") != []
    path.write_text("import os, attrs\nfrom . import y\nfrom maru_core.z import a\n")
    assert breaches(path, "maru_core") == []


def test_layers_of_the_core_look_down_only() -> None:
    rank = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    upward = []
    for path in sources("maru_core"):
        own = path.relative_to(ROOT / "maru_core").parts[0].removesuffix(".py")
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] != "maru_core" or own not in rank or len(parts) < 2:
                continue
            if parts[1] != own and rank.get(parts[1], len(LAYERS)) > rank[own]:
                upward.append(f"{path.name}:{line} {module}")
    assert upward == []


def test_server_and_client_meet_only_in_the_protocol() -> None:
    crossing = []
    for side, other in (("server", "client"), ("client", "server")):
        for path in sources(f"maru_core/{side}"):
            crossing += [f"{path.name}:{line}" for module, line in imports(path) if f"maru_core.{other}" in module]
    assert crossing == []


def test_backends_and_plugins_use_public_names_of_the_core() -> None:
    private = []
    for package in ("maru_backends", "maru_plugins_dax"):
        for path in sources(package):
            for module, line in imports(path):
                parts = module.split(".")
                if parts[0] == "maru_core" and (parts[1] not in PUBLIC or parts[-1].startswith("_")):
                    private.append(f"{path.name}:{line} {module}")
    assert private == []


def test_the_example_of_a_vendor_uses_public_names_only() -> None:
    """Of Maru the public modules, and beside them what its pyproject.toml declares."""
    folder = ROOT / "examples/vendor-plugin/maru_example_vendor"
    allowed = {"maru_example_vendor", "attrs", "maru_core", *sys.stdlib_module_names}
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] not in allowed or (parts[0] == "maru_core" and parts[1] not in PUBLIC):
                wrong.append(f"{path.name}:{line} {module}")
    assert list(folder.rglob("*.py"))
    assert wrong == []


def modules_of(package: str) -> list[str]:
    names = []
    for path in sources(package):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__"):
            names.append(name)
    return names


PROBE = """
import json, logging, os, sys, threading
before = {"env": dict(os.environ), "handlers": list(logging.root.handlers), "fds": sorted(os.listdir("/proc/self/fd"))}
import importlib
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import structlog, zmq
print(json.dumps({
    "heavy": sorted({n.split(".")[0] for n in sys.modules} & set(json.loads(sys.argv[2]))),
    "threads": [t.name for t in threading.enumerate()],
    "configured": structlog.is_configured(),
    "handlers": logging.root.handlers != before["handlers"],
    "environment": dict(os.environ) != before["env"],
    "fds": len(os.listdir("/proc/self/fd")) - len(before["fds"]),
    "context": zmq.Context._instance is not None,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("maru_core", ["torch", "vllm", "numpy", "maru_backends", "maru_transfer", "maru_integrations"]),
        ("maru_backends", ["torch", "vllm", "numpy", "maru_transfer", "maru_integrations"]),
        ("maru_plugins_dax", ["torch", "vllm", "numpy", "maru_backends", "maru_transfer", "maru_integrations"]),
    ],
)
def test_importing_starts_nothing_and_loads_nothing_heavy(package: str, heavy: list[str]) -> None:
    names = [name for name in modules_of(package) if name not in ("maru_core.testing", "maru_core.testing_backend")]
    command = [sys.executable, "-c", PROBE, json.dumps(names), json.dumps(heavy)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "heavy": [],
        "threads": ["MainThread"],
        "configured": False,
        "handlers": False,
        "environment": False,
        "fds": 0,
        "context": False,
    }


@pytest.mark.slow
def test_plugin_entry_points_load_without_torch() -> None:
    code = """
import json, sys
from maru_core.config import PluginSettings
from maru_core.host import PluginHost
host = PluginHost.discover(PluginSettings(()), path=[])
print(json.dumps([sorted(host.backends()), sorted(host.engines()), "torch" in sys.modules]))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [["cpu", "cxl", "mixed"], ["kernel", "layerwise", "torch-copy"], False]
