"""The metadata server. Programs use :func:`run_server`."""

from maru_core.server.service import ServerSettings, run_server

__all__ = ["ServerSettings", "run_server"]
