"""``maru serve``."""

from __future__ import annotations

import os
from contextlib import suppress

import click
from attrs import evolve

from maru_core import logs
from maru_core.cli.common import fail, settings, where
from maru_core.client.bootstrap import DEFAULT_GRANULE, EXIT_TAKEN
from maru_core.config import PluginSettings
from maru_core.errors import ConfigError, MaruError
from maru_core.foreign import plan_pools
from maru_core.host import PluginHost
from maru_core.pools import pool_wish
from maru_core.pools import read_order as read_order_of
from maru_core.runtime_dir import AlreadyRunning
from maru_core.server.distrust import distrusted
from maru_core.server.service import ServerSettings, run_server
from maru_core.sizes import parse_size

#: Exit code of any failure to start but that another server has the folder.
EXIT_FAILED = 1


@click.command()
@where
@click.option("--storage-backend", metavar="NAME", help="Kind of memory. [default: cpu]")
@click.option("--pool-size", metavar="SIZE", help="Size of the pool, such as 4G; with mixed that of each backend.")
@click.option("--pool-path", metavar="PATH", help="Where the pool is made. [default: /dev/shm]")
@click.option("--cpu-pool-size", metavar="SIZE", help="Size of the cpu pool. [default: --pool-size]")
@click.option("--cxl-pool-size", metavar="SIZE", help="Size of all cxl pools. [default: whole devices]")
@click.option("--cxl-pool-path", metavar="PATH,...", help="DAX devices, or files for development.")
@click.option("--write-order", metavar="NAME,...", help="Backends of mixed, first those written first.")
@click.option("--read-order", metavar="NAME,...", help="Backends of mixed, first those read first.")
@click.option("--demote/--no-demote", default=None, help="Move what is used least to the next pool. [default: on]")
@click.option("--promote/--no-promote", default=None, help="Copy what is read often to an earlier pool. [default: off]")
@click.option("--visibility", metavar="MODE", help="Who sees the pools: auto, host or hosts. [default: auto]")
@click.option("--take-over", is_flag=True, help="Use devices whose last users cannot be proven dead: they have ended.")
@click.option("--granule", metavar="SIZE", help="Allocation granule. [default: 64K]")
@click.option("--idle-exit", metavar="SECONDS", help="End so long after the last session. [default: never]")
@click.option("--eviction-policy", metavar="NAME", help="What goes first when a pool is full. [default: reuse]")
@click.option("--lease-share", metavar="FRACTION", help="Most of a pool that one session may lease. [default: 0.5]")
@click.option("--keep-pools", is_flag=True, help="Leave the pools in memory at the end, for the next server.")
@click.option("--dma-grace", metavar="SECONDS", help="How long devices of a dead client may move bytes. [default: 1]")
@click.option("--namespace-quota", metavar="SIZE", help="Most that one namespace may take. [default: all pools]")
@click.option("--metrics", metavar="HOST:PORT", help="Answer GET /metrics there, for Prometheus. [default: nowhere]")
@click.option("--log-level", default="info", show_default=True, type=click.Choice(logs.LEVELS))
@click.option("--log-json", is_flag=True, help="Log one JSON object per line.")
@click.option("--report-fd", type=int, hidden=True, help="Descriptor that gets the exit code when the start fails.")
def serve(
    runtime_dir: str | None,
    url: str | None,
    keys: str | None,
    storage_backend: str | None,
    pool_size: str | None,
    pool_path: str | None,
    cpu_pool_size: str | None,
    cxl_pool_size: str | None,
    cxl_pool_path: str | None,
    write_order: str | None,
    read_order: str | None,
    demote: bool | None,
    promote: bool | None,
    visibility: str | None,
    take_over: bool,
    granule: str | None,
    idle_exit: str | None,
    eviction_policy: str | None,
    lease_share: str | None,
    keep_pools: bool,
    dma_grace: str | None,
    namespace_quota: str | None,
    metrics: str | None,
    log_level: str,
    log_json: bool,
    report_fd: int | None,
) -> None:
    """Own the pools and serve their directory until SIGTERM, SIGINT, SIGHUP, or idle."""
    logs.setup(log_level, json=log_json)
    try:
        config = settings(
            {
                "runtime_dir": runtime_dir,
                "server_url": url,
                "keys": keys,
                "metrics": metrics,
                "storage_backend": storage_backend,
                "pool_size": pool_size,
                "pool_path": pool_path,
                "cpu_pool_size": cpu_pool_size,
                "cxl_pool_size": cxl_pool_size,
                "cxl_pool_path": cxl_pool_path,
                "write_order": write_order,
                "read_order": read_order,
                "demote": demote,
                "promote": promote,
                "visibility": visibility,
                "chunk_size": granule,
                "idle_exit": idle_exit,
                "eviction_policy": eviction_policy,
                "lease_share": lease_share,
                "dma_grace": dma_grace,
            }
        )
        if report_fd is not None:
            # Passed on by an engine, whose user knows the settings, not the options.
            config = evolve(config, sources=dict.fromkeys(config.sources, "extra config"))
        if pool_size is not None:
            # What the environment says of one backend is not what this command line says of all.
            config = evolve(
                config,
                cpu_pool_size=config.cpu_pool_size if cpu_pool_size else None,
                cxl_pool_size=config.cxl_pool_size if cxl_pool_size else None,
            )
        quota = None if namespace_quota is None else _quota(namespace_quota)
        # The setting is for servers that `auto` starts; one that an operator starts stays until told otherwise.
        idle = config.idle_exit if idle_exit is not None else 0.0
        host = PluginHost.discover(PluginSettings.from_environ(os.environ))
        plans = plan_pools(host.backend, pool_wish(config))
        run_server(
            ServerSettings(
                pools=plans,
                granule=config.chunk_size or DEFAULT_GRANULE,
                url=None if config.server_url == "auto" else config.server_url,
                runtime_dir=config.runtime_path,
                idle_exit=idle or None,
                lease_share=config.lease_share,
                eviction_policy=host.policy(config.eviction_policy, guard=distrusted),
                keep_pools=keep_pools,
                dma_grace=config.dma_grace,
                namespace_quota=quota,
                keys=config.keys,
                # Like idle: one that `auto` starts listens on nothing but its private socket.
                metrics=config.metrics if report_fd is None else None,
                read_order=read_order_of(config, plans),
                demote=config.demote,
                promote=config.promote,
                shared_by_hosts=None if config.visibility == "auto" else config.visibility == "hosts",
                take_over=take_over,
            ),
            host.backend,
        )
    except MaruError as error:
        code = EXIT_TAKEN if isinstance(error, AlreadyRunning) else EXIT_FAILED
        if report_fd is not None:
            # Whoever wanted to know may be gone, or the number may be no descriptor at all.
            with suppress(OSError, OverflowError):
                os.write(report_fd, bytes([code]))
        fail(error, code)


def _quota(text: str) -> int:
    try:
        return parse_size(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"--namespace-quota is {text!r}; expected a size such as 4G or 500M") from None
