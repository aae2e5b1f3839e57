"""The pytest plugin that we give to vendors, run as they run it: pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.host.vendor import install

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

#: A plugin that tells, by a file, whenever a process imports it.
TELLING = """
    import os, pathlib
    from maru_core.contracts import BackendProvision
    from maru_core.plugin import hookimpl
    pathlib.Path(__file__).with_suffix(".imported").touch()
    @hookimpl
    def maru_storage_backends(): return [BackendProvision("told", list)]
"""


class Runner:
    """A folder with an installed vendor plugin and a test file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        install(self.site, "dist-told", {"told": "vendor_told"}, {"vendor_told": TELLING})
        self.imported = self.site / "vendor_told.imported"

    def run(self, test: str, environ: dict[str, str] | None = None, *options: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "test_it.py").write_text(dedent(test))
        (self.folder / "pytest.ini").write_text("[pytest]\naddopts = -p maru_core.testing --strict-markers\n")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MARU_", "PYTEST_"))}
        clean["PYTHONPATH"] = os.pathsep.join([str(self.site), str(ROOT)])
        clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins only cost time here
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"]
        return subprocess.run(
            command, cwd=self.folder, env=clean | (environ or {}), capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


CALLERS = [{}, {"MARU_PLUGINS": "none"}, {"MARU_PLUGINS": "told"}, {"MARU_PLUGINS": "typo", "MARU_PLUGINS_STRICT": "1"}]

ISOLATED = """
    import os, subprocess, sys
    from maru_core.config import MaruConfig, PluginSettings
    from maru_core.host import PluginHost

    NAMES = ["cpu", "cxl", "mixed", "kernel", "layerwise", "torch-copy", "eviction"]
    AT_IMPORT = {name: value for name, value in os.environ.items() if name.startswith("MARU_")}

    def test_environment():
        assert AT_IMPORT == {"MARU_PLUGINS": "none"}
        assert {n: v for n, v in os.environ.items() if n.startswith("MARU_")} == {"MARU_PLUGINS": "none"}

    def test_discovery_finds_nothing_even_when_all_are_allowed():
        for settings in (PluginSettings(), PluginSettings.from_environ(os.environ), PluginSettings(("told",))):
            host = PluginHost.discover(settings)
            assert [i.name for i in host.report()] == NAMES

    def test_child():
        code = (
            "import os; from maru_core.config import *; from maru_core.host import *;"
            "host = PluginHost.discover(PluginSettings.from_environ(os.environ));"
            "print([i.name for i in host.report() if i.status == 'active'])"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out.strip() == str(NAMES)
"""


@pytest.mark.parametrize("caller", CALLERS, ids=str)
def test_nothing_installed_is_loaded_whatever_the_shell_exports(runner: Runner, caller: dict[str, str]) -> None:
    run = runner.run(ISOLATED, caller | {"MARU_POOL_SIZE": "wrong", "MARU_SERVER_URL": "tcp://127.0.0.1:1"})
    assert "3 passed" in run.stdout, run.stdout + run.stderr
    assert not runner.imported.exists()


def test_what_is_told_to_tests_reaches_them(runner: Runner) -> None:
    test = """
        import os
        def test_told():
            assert os.environ["MARU_TEST_DAX"] == "/dev/dax0.0"
            assert "MARU_TESTS" not in os.environ
    """
    run = runner.run(test, {"MARU_TEST_DAX": "/dev/dax0.0", "MARU_TESTS": "no"})
    assert "1 passed" in run.stdout, run.stdout + run.stderr


def test_it_holds_in_the_workers_of_xdist(runner: Runner) -> None:
    run = runner.run(ISOLATED, {"MARU_PLUGINS": "told"}, "-p", "xdist", "-n", "1")
    assert "3 passed" in run.stdout, run.stdout + run.stderr
    assert not runner.imported.exists()


@pytest.mark.parametrize("caller", CALLERS, ids=str)
def test_a_marked_test_sees_what_is_installed(runner: Runner, caller: dict[str, str]) -> None:
    test = """
        import os, subprocess, sys
        import pytest
        from maru_core.config import PluginSettings
        from maru_core.host import PluginHost

        def names():
            return [i.name for i in PluginHost.discover(PluginSettings.from_environ(os.environ)).report()]

        @pytest.mark.installed_plugins
        def test_open():
            assert "told" in names()
            assert "MARU_PLUGINS" not in os.environ

        def test_closed_again():
            assert "told" not in names()
            assert os.environ["MARU_PLUGINS"] == "none"
    """
    run = runner.run(test, caller)
    assert "2 passed" in run.stdout, run.stdout + run.stderr
    assert runner.imported.exists()


@pytest.mark.parametrize(
    "leak",
    ["os.environ['LEAKED'] = '1'", "os.environ['MARU_PLUGINS'] = 'told'", "del os.environ['MARU_PLUGINS']"],
)
def test_a_test_that_leaves_the_environment_changed_fails_and_harms_no_other(runner: Runner, leak: str) -> None:
    test = f"""
        import os
        def test_leak():
            {leak}
        def test_after():
            assert os.environ.get("MARU_PLUGINS") == "none"
            assert "LEAKED" not in os.environ
    """
    run = runner.run(test)
    assert run.returncode == 1
    assert "2 passed, 1 error" in run.stdout, run.stdout + run.stderr
    assert "left these variables changed" in run.stdout


def test_monkeypatch_is_no_leak_and_libraries_may_be_excused(runner: Runner) -> None:
    test = """
        import os
        def test_patch(monkeypatch):
            monkeypatch.setenv("MARU_POOL_SIZE", "1G")
            monkeypatch.delenv("HOME", raising=False)
        def test_library():
            os.environ["LIB_X"] = "1"
    """
    run = runner.run(test, None, "-o", "maru_environment_ignore=LIB_*")
    assert "2 passed" in run.stdout, run.stdout + run.stderr


def test_a_logging_setup_does_not_outlive_its_test(runner: Runner) -> None:
    test = """
        import io, structlog
        from maru_core import logs
        def test_first():
            stream = io.StringIO()
            logs.setup(stream=stream)
            structlog.get_logger().info("told")
            assert "told" in stream.getvalue()
            stream.close()
        def test_second(capsys):
            assert not structlog.is_configured()
            structlog.get_logger().info("told again")
            assert "told again" in capsys.readouterr().out
    """
    run = runner.run(test)
    assert "2 passed" in run.stdout, run.stdout + run.stderr


def test_fixtures(runner: Runner) -> None:
    test = """
        import pytest
        from maru_core.contracts import PoolRequest
        from maru_core.errors import PluginError

        def test_host(maru_host, maru_fake_backend):
            host = maru_host({"fake": maru_fake_backend})
            assert sorted(host.backends()) == ["cpu", "cxl", "fake", "mixed"]
            assert host.backend("fake") is maru_fake_backend
            assert sorted(maru_host().backends()) == ["cpu", "cxl", "mixed"]

        def test_host_is_strict(maru_host):
            with pytest.raises(PluginError):
                maru_host({"nothing": object()})
            assert maru_host({"nothing": object()}, strict=False).report()[-1].status == "failed"

        def test_folder(maru_runtime_dir):
            assert len(str(maru_runtime_dir)) < 60
            assert maru_runtime_dir.stat().st_mode & 0o777 == 0o700
            (maru_runtime_dir / "x").mkdir()
            open("folder", "w").write(str(maru_runtime_dir))
    """
    run = runner.run(test)
    assert "3 passed" in run.stdout, run.stdout + run.stderr
    assert not Path((runner.folder / "folder").read_text()).exists()


def test_the_plugin_configures_no_logging_and_loads_no_torch(runner: Runner) -> None:
    test = """
        import logging, sys, structlog
        def test_clean():
            assert "torch" not in sys.modules
            assert not structlog.is_configured()
    """
    run = runner.run(test)
    assert "1 passed" in run.stdout, run.stdout + run.stderr
