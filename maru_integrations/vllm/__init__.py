"""Maru for vLLM: ``kv_connector="MaruKVConnector"``, ``kv_connector_module_path="maru_integrations.vllm"``.

The class is imported when it is asked for, so that parts of this package can be used without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maru_integrations.vllm.connector import MaruKVConnector

__all__ = ["MaruKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "MaruKVConnector":
        from maru_integrations.vllm.compat import register_by_name
        from maru_integrations.vllm.connector import MaruKVConnector

        register_by_name(name, __name__)
        return MaruKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
