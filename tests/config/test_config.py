"""One place parses every setting; a wrong one stops the start and says how to put it right."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from maru_core import discovery
from maru_core.config import FORMER_NAMES, PREFIX, MaruConfig, PluginSettings, settings
from maru_core.errors import ConfigError
from tests.host.vendor import install

ROOT = Path(__file__).parents[2]
KEYS = [PREFIX + attribute.name for attribute in settings()]


def config(extra: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> MaruConfig:
    return MaruConfig.from_mapping(extra or {}, environ or {})


def test_defaults() -> None:
    c = config()
    assert (c.server_url, c.storage_backend, c.pool_size, c.kv_chunk_tokens) == ("auto", "cpu", 4 << 30, 256)
    assert not any((c.async_load, c.async_store, c.overlap_load_with_compute, c.use_layerwise))
    assert {source for _, source in c.describe().values()} == {"default"}
    assert list(c.describe()) == KEYS


def test_the_mapping_wins_over_the_environment_and_both_over_the_default() -> None:
    c = config({"maru_pool_size": "2G"}, {"MARU_POOL_SIZE": "1G", "MARU_LEASE_SHARE": "0.25"})
    assert c.describe()["maru_pool_size"] == (2 << 30, "extra config")
    assert c.describe()["maru_lease_share"] == (0.25, "environment")


def test_none_in_the_mapping_and_an_empty_variable_are_as_if_not_given() -> None:
    c = config({"maru_pool_size": None}, {"MARU_POOL_SIZE": "1G", "MARU_SERVER_URL": ""})
    assert c.pool_size == 1 << 30
    assert c.server_url == "auto"


def test_keys_of_others_are_ignored() -> None:
    assert config({"lmcache.x": 1, "kv_port": object()}, {"HOME": "/", "XMARU_POOL_SIZE": "?"}) == config()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("maru_poolsize", "maru_pool_size"),
        ("maru_async_loads", "maru_async_load"),
        ("maru_", None),
        ("maru_zzz", None),
        # As variables and options are spelt.
        ("MARU_POOL_SIZE", "maru_pool_size"),
        ("Maru_Async_Load", "maru_async_load"),
        ("maru-async-load", "maru_async_load"),
        (" maru_async_load", "maru_async_load"),
    ],
)
def test_an_unknown_key_stops_the_start_and_names_the_nearest(key: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError, match=f"{key}; the nearest is {nearest or 'maru_'}"):
        config({key: 1})


def test_an_unknown_variable_is_warned_of_with_the_nearest() -> None:
    with capture_logs() as logs:
        config({}, {"MARU_POOLSIZE": "1G", "MARU_PLUGINS": "x", "MARU_PLUGINS_STRICT": "1", "MARU_SKIP_KV_OPS": "1"})
    assert logs == [
        {
            "event": "unknown_variable",
            "log_level": "warning",
            "variable": "MARU_POOLSIZE",
            "nearest": "MARU_POOL_SIZE",
        }
    ]


def test_variables_that_our_scripts_read_are_no_mistakes() -> None:
    """Of scripts, benchmarks, the build and tests: who sets one and starts an engine is not warned of it."""
    read = re.compile(r"""(?:environ(?:\.get)?[\[(]|getenv\(|\$\{?|export )["']?(MARU_[A-Z_]+)""")
    paths = [path for name in ("scripts", "benchmarks", "csrc", "tests") for path in (ROOT / name).rglob("*")]
    found = {
        variable: path
        for path in paths
        if path.suffix in (".py", ".sh") and "build" not in path.parts
        for variable in read.findall(path.read_text())
    }
    assert {"MARU_CACHE", "MARU_TEST_DAX", "MARU_PLUGINS"} <= set(found)
    for variable in found.keys() - {key.upper() for key in KEYS}:
        with capture_logs() as logs:
            config({}, {variable: "x"})
        assert not logs, found[variable]


def test_variables_of_an_installed_plugin_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the list allows it or not: nothing is imported to find out."""
    install(tmp_path, "acme", {"Acme-Disk": "no_such_module", "cpu": "no_such_module"}, {})
    variables = {"MARU_ACME_DISK_DEPTH": "4", "MARU_ACME_DEPTH": "4", "MARU_CPU_SPEED": "1", "MARU_PLUGINS": "none"}
    for path, warned in (
        ([], ["MARU_ACME_DEPTH", "MARU_ACME_DISK_DEPTH", "MARU_CPU_SPEED"]),
        ([str(tmp_path)], ["MARU_ACME_DEPTH", "MARU_CPU_SPEED"]),
    ):
        monkeypatch.setattr(discovery, "search_path", lambda path=path: path)
        with capture_logs() as logs:
            config({}, variables)
        assert [log["variable"] for log in logs] == warned


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("maru_pool_size", "4X"),
        ("maru_pool_size", True),
        ("maru_pool_size", 1000),
        ("maru_pool_size", ""),
        ("maru_chunk_size", 4097),
        ("maru_chunk_size", 0),
        ("maru_kv_chunk_tokens", 0),
        ("maru_kv_chunk_tokens", 256.0),
        ("maru_kv_chunk_tokens", True),
        ("maru_kv_chunk_tokens", "many"),
        ("maru_load_admission_window", -1),
        ("maru_async_load", "maybe"),
        ("maru_async_load", 2),
        ("maru_async_load", [True]),
        ("maru_lease_share", 0),
        ("maru_lease_share", 1.5),
        ("maru_lease_share", float("nan")),
        ("maru_request_timeout", "soon"),
        ("maru_request_timeout", True),
        ("maru_request_timeout", float("inf")),
        ("maru_storage_backend", "c p u"),
        ("maru_storage_backend", ["cpu"]),
        ("maru_write_order", ["cpu", "cpu"]),
        ("maru_write_order", 3),
        ("maru_write_order", ["cpu", 3]),
        ("maru_runtime_dir", "relative"),
        ("maru_pool_path", "/a\0b"),
        ("maru_cxl_pool_path", "/dev/dax0.0,dax1.0"),
        ("maru_cxl_pool_path", "/dev/dax0.0,/dev/../dev/dax0.0"),
        ("maru_visibility", "everybody"),
        ("maru_cache_namespace", 7),
        ("maru_cache_namespace", "a\nb"),
        ("maru_cache_namespace", "x" * 257),
        ("maru_server_url", "localhost:1"),
        ("maru_server_url", "tcp://*:5555"),
        ("maru_server_url", "tcp://127.0.0.1:*"),
        ("maru_server_url", "tcp://127.0.0.1:\u0663"),
        ("maru_server_url", "tcp://10.0.0.9;10.0.0.1:5555"),
        ("maru_server_url", "ipc:///"),
        ("maru_server_url", "ipc:///a\0b"),
        ("maru_server_url", "ipc://@abstract"),
        ("maru_keys", "relative"),
        ("maru_metrics", "9090"),
        ("maru_metrics", "127.0.0.1:"),
        ("maru_metrics", "127.0.0.1:70000"),
        ("maru_metrics", "127.0.0.1:\u0663"),
        ("maru_server_url", "tcp://127.0.0.1:70000"),
        ("maru_server_url", "tcp://127.0.0.1:5555/x"),
        ("maru_server_url", "ipc://relative"),
        ("maru_server_url", "ipc:///" + "x" * 107),
    ],
)
def test_an_ill_typed_value_is_an_error_with_key_value_and_expectation(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config({key: value})
    text = str(caught.value)
    assert text.startswith(f"{key} is {value!r} (from the extra config); expected ")


def test_an_error_from_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^MARU_POOL_SIZE is 'big' \(from the environment\); expected a size"):
        config({}, {"MARU_POOL_SIZE": "big"})


def test_values_are_checked_however_the_object_is_made() -> None:
    assert MaruConfig(pool_size="8M").pool_size == 8 << 20  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="maru_lease_share is 2"):
        MaruConfig(lease_share=2)
    with pytest.raises(ConfigError, match="maru_pool_size is None"):
        MaruConfig(pool_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_booleans_may_be_text(text: str) -> None:
    assert config({}, {"MARU_ASYNC_LOAD": text}).async_load is True
    assert config({"maru_eager_map": "off"}).eager_map is False


@pytest.mark.parametrize(
    "url", ["auto", "ipc:///run/maru.sock", "tcp://127.0.0.1:5555", "tcp://localhost:1", "tcp://[::1]:65535"]
)
def test_addresses(url: str) -> None:
    assert config({"maru_server_url": url}).server_url == url


def test_an_address_of_another_host_needs_keys() -> None:
    for url in ("tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555", "tcp://cache.example:5555", "tcp://[2001:db8::1]:5555"):
        with pytest.raises(ConfigError, match=re.escape(url) + ".*maru keygen"):
            config({"maru_server_url": url})
        assert config({"maru_server_url": url}, {"MARU_KEYS": "/keys"}).server_url == url


def test_metrics_need_a_host() -> None:
    assert config({"maru_metrics": "[::]:9090"}).metrics == "[::]:9090"
    assert config({}, {"MARU_METRICS": "127.0.0.1:0"}).metrics == "127.0.0.1:0"


def test_keys_that_are_no_text_belong_to_others() -> None:
    assert MaruConfig.from_mapping({5: 1, None: 2, b"maru_keys": 3}, {}).describe()["maru_keys"] == (None, "default")  # type: ignore[dict-item]


def test_orders_may_be_lists_or_text() -> None:
    c = config({"maru_write_order": ["cxl", "cpu"]}, {"MARU_READ_ORDER": "cpu, cxl"})
    assert (c.write_order, c.read_order) == (("cxl", "cpu"), ("cpu", "cxl"))


@pytest.mark.parametrize(("former", "key"), FORMER_NAMES.items())
def test_former_names_work_and_warn(former: str, key: str) -> None:
    with capture_logs() as logs:
        c = config({former: True})
        v = config({}, {former.upper(): "1"})
    assert c.describe()[key] == (True, "extra config")
    assert v.describe()[key] == (True, "environment")
    assert [(log["event"], log["setting"], log["use"]) for log in logs] == [
        ("former_setting", former, key),
        ("former_setting", former.upper(), key.upper()),
    ]


def test_a_current_name_wins_over_its_former_one() -> None:
    with capture_logs() as logs:
        c = config({"maru_enable_write_behind": True, "maru_async_store": False})
    assert c.async_store is False
    assert logs[0]["ignored"] is True


def test_a_pool_has_its_own_size_or_the_common_one() -> None:
    c = config({"maru_pool_size": "2G", "maru_cxl_pool_size": "8G"})
    assert [c.pool_size_of(name) for name in ("cpu", "cxl", "acme")] == [2 << 30, 8 << 30, 2 << 30]
    assert config().pool_size_of("cxl") is None, "whole devices"
    assert config({"maru_pool_size": "4G"}).pool_size_of("cxl") == 4 << 30


@pytest.mark.parametrize(
    ("extra", "quota"),
    [
        ({}, 0),
        ({"maru_storage_backend": "cxl"}, 0),
        ({"maru_storage_backend": "cxl", "maru_cxl_pool_size": "8G"}, 8 << 30),
        ({"maru_storage_backend": "cpu", "maru_cxl_pool_size": "8G"}, 0),
        ({"maru_storage_backend": "mixed", "maru_cpu_pool_size": "1G"}, 0),
        ({"maru_storage_backend": "mixed", "maru_cpu_pool_size": "1G", "maru_cxl_pool_size": "8G"}, 9 << 30),
        ({"maru_storage_backend": "mixed", "maru_pool_size": "2G", "maru_write_order": "cxl,cpu,acme"}, 6 << 30),
    ],
)
def test_a_quota_is_what_the_sizes_that_were_set_add_up_to(extra: dict[str, str], quota: int) -> None:
    assert config(extra).quota_wish() == quota


def test_a_size_is_called_as_it_was_set() -> None:
    options = {"maru_cpu_pool_size": "--cpu-pool-size"}
    made = MaruConfig.from_mapping({"maru_cpu_pool_size": "2G"}, {"MARU_CXL_POOL_SIZE": "2G"}, options=options)
    names = [made.size_setting_of(name) for name in ("cpu", "cxl", "acme")]
    assert names == ["--cpu-pool-size", "MARU_CXL_POOL_SIZE", "maru_pool_size"]
    assert config({"maru_pool_size": "4G"}).size_setting_of("cxl") == "maru_pool_size"
    assert config().size_setting_of("cxl") == "maru_cxl_pool_size", "whole devices: what would set it"
    assert config().size_setting_of("cpu") == "maru_pool_size"
    assert MaruConfig(cpu_pool_size=1 << 30).size_setting_of("cpu") == "maru_cpu_pool_size"


def test_the_paths_of_cxl_are_its_own() -> None:
    c = config({"maru_cxl_pool_path": "/dev/dax0.0, /dev/dax1.0/", "maru_pool_path": "/mnt/huge"})
    assert (c.pool_path_of("cxl"), c.pool_path_of("cpu")) == ("/dev/dax0.0,/dev/dax1.0", "/mnt/huge")
    mixed = config({"maru_storage_backend": "mixed", "maru_pool_path": "/mnt/huge"})
    assert (mixed.pool_path_of("cxl"), mixed.pool_path_of("cpu")) == (None, "/mnt/huge")
    alone = config({"maru_storage_backend": "cxl", "maru_pool_path": "/dev/dax0.0"})
    assert alone.pool_path_of("cxl") == "/dev/dax0.0"


def test_the_runtime_folder_is_the_operators_or_the_users() -> None:
    assert config({"maru_runtime_dir": "/run/x/"}).runtime_path == "/run/x"
    assert config().runtime_path.startswith("/tmp/maru-")


#: Of which many a setting takes some.
WORDS = [
    "",
    "0",
    "1",
    "-1",
    "0.5",
    "4G",
    "9" * 500,
    "none",
    "auto",
    "on",
    "a,b",
    "/tmp",
    "cpu",
    "mixed",
    "nan",
    "tcp://*:1",
]


@given(
    st.sampled_from(KEYS),
    st.sampled_from([*WORDS, 0, 1, 256, 1 << 40, 0.5])
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.text())
    | st.dictionaries(st.text(), st.integers()),
)
def test_any_value_is_taken_or_refused_by_name(key: str, value: object) -> None:
    refusal = ""
    try:
        config({key: value})
    except ConfigError as error:
        refusal = str(error)
    assert refusal == "" or key in refusal


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (None, None),
        ("", None),
        ("  ", None),
        (",", None),
        ("none", ()),
        (" none ", ()),
        ("a,b", ("a", "b")),
        (" a , b ,,a", ("a", "b")),
        ("none,a", ("none", "a")),
    ],
)
def test_the_plugin_list(text: str | None, allowed: tuple[str, ...] | None) -> None:
    environ = {} if text is None else {"MARU_PLUGINS": text}
    chosen = PluginSettings.from_environ(environ)
    assert chosen == PluginSettings(allowed, strict=False)
    assert chosen.allows("a") == (allowed is None or "a" in allowed)


def test_strict() -> None:
    assert PluginSettings.from_environ({"MARU_PLUGINS_STRICT": "1"}).strict
    assert not PluginSettings.from_environ({"MARU_PLUGINS_STRICT": "0"}).strict
    assert not PluginSettings.from_environ({"MARU_PLUGINS_STRICT": ""}).strict
    with pytest.raises(ConfigError, match="MARU_PLUGINS_STRICT is 'perhaps'; expected true or false"):
        PluginSettings.from_environ({"MARU_PLUGINS_STRICT": "perhaps"})
