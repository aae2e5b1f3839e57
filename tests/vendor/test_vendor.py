"""The vendor's example as its users have it: installed beside Maru in an environment of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vendor.installed import ROOT, Installed, wheel

pytestmark = [pytest.mark.vendor, pytest.mark.timeout(300)]

BUILT_INS = {"cpu", "mixed", "torch-copy", "eviction"}


def by_name(listed: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {info["name"]: info for info in listed}


def test_it_is_found_and_listed(installed: Installed) -> None:
    found = by_name(installed.plugins())["example"]
    assert (found["distribution"], found["version"], found["status"]) == ("maru-example-vendor", "0.1.0", "active")
    assert found["provides"] == ["backend example"]
    assert found["hints"] == ["maru_before_read", "maru_after_read", "maru_hint_stats"]
    assert str(installed.folder) in found["location"]
    text = installed.run(["maru", "plugins"]).stdout
    assert "example  active  maru-example-vendor 0.1.0 (backend example; hints before_read, after_read" in text


PROBE = """
import json, os, sys
from maru_core.config import MaruConfig, PluginSettings
from maru_core.host import PluginHost
MaruConfig.from_mapping({}, os.environ)
host = PluginHost.discover(PluginSettings.from_environ(os.environ))
names = ("maru_example_vendor.plugin", "maru_plugins_dax.plugin")
print("RESULT " + json.dumps([sorted(host.backends()), [name for name in names if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    ("variable", "active"),
    [
        (None, {"example", "dax"}),
        ("", {"example", "dax"}),
        ("none", set()),
        ("example", {"example"}),
        ("dax", {"dax"}),
        ("other", set()),
    ],
)
def test_the_list_decides_whether_it_is_imported(installed: Installed, variable: str | None, active: set[str]) -> None:
    """``dax`` comes with Maru and is a plugin of hints: the list governs it as it does a vendor's."""
    environ = {} if variable is None else {"MARU_PLUGINS": variable}
    listed = by_name(installed.plugins(**environ))
    assert {name for name, info in listed.items() if info["status"] == "active"} >= BUILT_INS | active
    for name in {"example", "dax"}:
        assert listed[name]["status"] == ("active" if name in active else "not selected")
    run = installed.run(["python", "-c", PROBE], **environ)
    assert run.returncode == 0, run.stderr
    backends, imported = result(run.stdout)
    assert ("example" in backends) == ("example" in active)
    assert len(imported) == len(active)
    assert ("plugins_not_found" in run.stdout + run.stderr) == (variable == "other")


def test_its_variables_are_its_own(installed: Installed) -> None:
    run = installed.run(["python", "-c", PROBE], MARU_EXAMPLE_SPARE="1M", MARU_DAX_NUMA="0", MARU_EXAMPEL_SPARE="1M")
    told = run.stdout + run.stderr
    assert "MARU_EXAMPEL_SPARE" in told
    assert "variable=MARU_EXAMPLE_SPARE" not in told.replace("'", "")
    assert "MARU_DAX_NUMA" not in told


def result(output: str) -> Any:
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


Serve = Callable[..., Path]


@pytest.fixture
def serve(installed: Installed, maru_runtime_dir: Path) -> Iterator[Serve]:
    """``serve(*options, **environ)``: ``maru serve`` in that environment; the folder of marked pools is ``pools``."""
    started: list[subprocess.Popen[bytes]] = []
    pools = maru_runtime_dir / "pools"
    pools.mkdir()
    (pools / ".maru-example").touch()

    def start(*options: str, **environ: str) -> Path:
        command = [
            *(str(installed.folder / "bin" / "maru"), "serve", "--runtime-dir", str(maru_runtime_dir)),
            *("--pool-path", str(pools), "--idle-exit", "120", *options),
        ]
        with (maru_runtime_dir / "out").open("ab") as out:
            process = subprocess.Popen(
                command, cwd=maru_runtime_dir, env=installed.environ(**environ), stdout=out, stderr=out
            )
        started.append(process)
        deadline = time.monotonic() + 60
        while not (maru_runtime_dir / "server.json").exists():
            assert process.poll() is None, (maru_runtime_dir / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return maru_runtime_dir

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


#: Stores objects of 256 KiB under a prefix, or reads them as an engine does, and tells what came of it.
CLIENT = """
import json, os, sys
from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.namespace import Namespace
what, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = MaruConfig.from_mapping({"maru_runtime_dir": folder}, os.environ)
body = lambda n: bytes([n % 251]) * (256 << 10)
with MaruHandler.connect(config, Namespace.of({"model": "m"}), name="client") as handler:
    good = 0
    for n in range(count):
        if what == "store":
            good += bool(handler.store(f"k{n}", body(n)))
        else:
            lease = handler.acquire([handler.key(f"k{n}")], leading=True)
            if lease.leading:
                located = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths, lease.keys)
                with located.reading():
                    good += bytes(located.view(0)) == body(n)
            handler.release(lease)
    stats = handler.stats()
    pools = [[pool["backend"], pool["used"]] for pool in stats["pools"]]
    print("RESULT " + json.dumps([good, pools, stats["client"]["plugins"], stats["client"]["hints"]]))
"""


def client(installed: Installed, what: str, folder: Path, count: int, **environ: str) -> Any:
    run = installed.run(["python", "-c", CLIENT, what, str(folder), str(count)], **environ)
    assert run.returncode == 0, run.stdout + run.stderr
    return result(run.stdout)


def test_a_server_serves_its_pools(installed: Installed, serve: Serve) -> None:
    folder = serve("--storage-backend", "example", "--pool-size", "16M")
    stored, pools, *_ = client(installed, "store", folder, 12)
    assert stored == 12
    assert [backend for backend, _ in pools] == ["example"]
    read, _, figures, hints = client(installed, "read", folder, 12)
    assert read == 12
    assert (figures["example.reads"], figures["example.read_bytes"]) == (12, 12 * 256 << 10)
    assert figures["dax.reads"] == 12
    assert {name: (health["failures"], health["off"]) for name, health in hints.items()} == {
        "example": (0, ""),
        "dax": (0, ""),
    }


def test_it_is_a_member_of_mixed(installed: Installed, serve: Serve, maru_runtime_dir: Path) -> None:
    """The first pool is too small for everything: the rest goes into the vendor's, which is where the vendor says."""
    disk = maru_runtime_dir / "disk"
    disk.mkdir()
    (disk / ".maru-example").touch()
    folder = serve(
        *("--storage-backend", "mixed", "--write-order", "cpu,example", "--cpu-pool-size", "4M", "--pool-size", "16M"),
        MARU_EXAMPLE_PATH=str(disk),
    )
    assert len(list(disk.glob("*.pool"))) == 1
    assert not list((maru_runtime_dir / "pools").glob("*.pool"))
    stored, pools, *_ = client(installed, "store", folder, 30)
    assert stored == 30
    assert [backend for backend, _ in pools] == ["cpu", "example"]
    assert all(used for _, used in pools)
    read, _, figures, _ = client(installed, "read", folder, 30)
    # A little of a pool is kept free, for which objects go: out of the server, or into the next pool.
    assert 25 <= read <= 30
    assert 0 < figures["example.reads"] < read


def test_a_server_that_may_not_load_it_says_so(installed: Installed, maru_runtime_dir: Path) -> None:
    run = installed.run(
        ["maru", "serve", "--runtime-dir", str(maru_runtime_dir), "--storage-backend", "example"], MARU_PLUGINS="none"
    )
    assert run.returncode == 1
    assert "plugin example (maru-example-vendor) is not selected: not in MARU_PLUGINS" in run.stderr


@pytest.mark.parametrize(
    "caller",
    [{}, {"MARU_PLUGINS": "none"}, {"MARU_PLUGINS": "example,typo", "MARU_PLUGINS_STRICT": "1"}],
    ids=str,
)
def test_its_own_tests_pass_whatever_the_shell_exports(
    installed: Installed, tmp_path: Path, caller: dict[str, str]
) -> None:
    """Against what is installed: its sources are not beside the tests."""
    shutil.copytree(ROOT / "examples/vendor-plugin/tests", tmp_path / "tests")
    shutil.copy(ROOT / "examples/vendor-plugin/pyproject.toml", tmp_path)
    run = installed.run(
        ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        timeout=120,
        **caller,
        MARU_POOL_SIZE="wrong",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "47 passed" in run.stdout, run.stdout


# -- among bad neighbours --

#: Tells by a file which process imported it.
TELLING = """
import os, pathlib
(pathlib.Path(__file__).parent / f"imported.{__name__}.{os.getpid()}").touch()
from maru_core.contracts import BackendProvision
from maru_core.plugin import hookimpl
"""
NEIGHBOURS = {
    "broken": TELLING + "import a_driver_that_is_not_there\n",
    "hollow": TELLING
    + """
@hookimpl
def maru_storage_backends():
    def make(): raise OSError("no such device")
    return [BackendProvision("hollow", make)]
""",
    "slow": TELLING
    + """
import time
time.sleep(1.2)
@hookimpl
def maru_session_opened(): time.sleep(60)
""",
    "hanging": TELLING
    + """
import time
@hookimpl
def maru_before_read(): time.sleep(1.5)
""",
    "raising": TELLING
    + """
@hookimpl
def maru_after_read(): raise SystemExit(3)
""",
    "unlisted": TELLING
    + """
@hookimpl
def maru_hint_stats(): return {"unlisted.x": 1}
""",
}


@pytest.fixture(scope="module")
def crowd(installed: Installed) -> Path:
    """A folder with the neighbours, each a distribution of its own, and one that wants the example's name."""
    wheels, target = installed.folder / "wheels", installed.folder / "crowd"
    wheels.mkdir()
    made = [
        wheel(wheels, f"dist-{name}", {name: f"crowd_{name}"}, {f"crowd_{name}": s}) for name, s in NEIGHBOURS.items()
    ]
    # It comes after the example: of two with one name the first by the name of their distribution is used.
    made.append(wheel(wheels, "zz-copy", {"example": "crowd_copy"}, {"crowd_copy": TELLING}))
    installed.install(*made, target=target)
    return target


@pytest.fixture
def imported(crowd: Path) -> Callable[[], dict[str, set[int]]]:
    """``imported()``: which processes imported which neighbours, since the test began."""
    for path in crowd.glob("imported.*"):
        path.unlink()

    def look() -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for path in crowd.glob("imported.*"):
            _, module, pid = path.name.split(".")
            found.setdefault(module.removeprefix("crowd_"), set()).add(int(pid))
        return found

    return look


Imported = Callable[[], dict[str, set[int]]]


def test_what_is_not_listed_is_imported_in_no_process(
    installed: Installed, crowd: Path, serve: Serve, imported: Imported
) -> None:
    """Server, clients, and the tool that lists them."""
    environ = {"PYTHONPATH": str(crowd), "MARU_PLUGINS": "example"}
    folder = serve("--storage-backend", "example", "--pool-size", "16M", **environ)
    assert client(installed, "store", folder, 4, **environ)[0] == 4
    assert client(installed, "read", folder, 4, **environ)[0] == 4
    listed = installed.plugins(**environ)
    assert {info["name"] for info in listed if info["status"] == "not selected"} == {*NEIGHBOURS, "dax"}
    assert imported() == {}
    environ["MARU_PLUGINS"] = "unlisted"
    installed.plugins(**environ)
    assert list(imported()) == ["unlisted"]


def test_bad_neighbours_cost_a_warning_each_and_nothing_else(
    installed: Installed, crowd: Path, serve: Serve, imported: Imported
) -> None:
    environ = {"PYTHONPATH": str(crowd)}
    folder = serve("--storage-backend", "example", "--pool-size", "16M", **environ)
    server = json.loads((folder / "server.json").read_text())["pid"]
    assert imported() == {name: {server} for name in NEIGHBOURS}, "the copy is not even imported"
    started = time.monotonic()
    assert client(installed, "store", folder, 4, **environ)[0] == 4
    read, _, figures, hints = client(installed, "read", folder, 4, **environ)
    assert time.monotonic() - started < 50, "the slow one would have slept for a minute"
    assert read == 4
    assert figures["example.reads"] == 4
    assert figures["unlisted.x"] == 1
    off = {name: health["off"] for name, health in hints.items() if health["off"]}
    assert set(off) == {"slow", "hanging", "raising"}
    assert "maru_session_opened was left behind after 2 s" in off["slow"]
    assert "maru_before_read held up the load after 1.5" in off["hanging"]
    assert "maru_after_read raised SystemExit: 3; 3 failures in all" in off["raising"]
    listed = installed.plugins(**environ)
    assert {(info["name"], info["status"]) for info in listed if info["status"] in ("failed", "duplicate")} == {
        ("broken", "failed"),
        ("example", "duplicate"),
    }
    assert "importing and registering it took 1." in by_name(listed)["slow"]["note"]
    told = (folder / "out").read_text()
    for word in ("dist-broken", "zz-copy", "plugin_slow"):
        assert told.count(word) == 1, told


def test_a_backend_whose_factory_fails_is_an_error_that_names_it(
    installed: Installed, crowd: Path, maru_runtime_dir: Path
) -> None:
    run = installed.run(
        ["maru", "serve", "--runtime-dir", str(maru_runtime_dir), "--storage-backend", "hollow"],
        PYTHONPATH=str(crowd),
        MARU_PLUGINS="hollow",
    )
    assert run.returncode == 1
    assert "backend hollow of plugin hollow (dist-hollow) failed: OSError: no such device" in run.stderr


def test_strict_makes_a_broken_neighbour_fatal(installed: Installed, crowd: Path) -> None:
    run = installed.run(["maru", "plugins"], PYTHONPATH=str(crowd), MARU_PLUGINS="broken", MARU_PLUGINS_STRICT="1")
    assert run.returncode == 1
    assert "dist-broken 1.0" in run.stderr
    assert "a_driver_that_is_not_there" in run.stderr
    assert "fatal because MARU_PLUGINS_STRICT is set" in run.stderr
