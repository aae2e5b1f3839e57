"""Figures of the connector for vLLM's log and for Prometheus. Plain numbers: they cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

#: What is counted, and its text. Names may end with ``.reason``.
COUNTERS: Mapping[str, str] = {
    "lookups": "Look-ups sent to the server.",
    "lookups_late": "Look-ups given up because no answer came in time.",
    "lookups_busy": "Requests that waited for this engine to give back what it may lease.",
    "lookups_skipped": "Requests that were computed without a look-up because the server counts as away.",
    "loads": "Loads that ended well.",
    "loads_failed": "Loads of which something had to be computed again.",
    "loads_skipped": "Hits that were computed because loading them was expected to be slower, by reason.",
    "load_bytes": "Bytes moved by loads.",
    "stores": "Stores handed to the workers; one may have many chunks of a request.",
    "dropped": "Objects that were computed and not stored, by reason.",
}
#: What is told as it is now, and its text.
GAUGES: Mapping[str, str] = {
    "parked": "Requests that have a share of the blocks for parked requests.",
    "loading": "Loads that are promised or under way.",
    "waiting": "Requests that wait for a share of blocks, a place among the loads in flight or a lease.",
    "storing": "Asynchronous stores without an answer.",
    "server_away": "1 while the server counts as away.",
}


class MaruStats(KVConnectorStats):
    """``data``: ``counters`` since the last report and ``gauges``, the newest values, each name to number."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(data=dict(data or {}))
        self.data.setdefault("counters", {})
        self.data.setdefault("gauges", {})

    def count(self, name: str, amount: float = 1, reason: str = "") -> None:
        """Add to a counter of :data:`COUNTERS`."""
        key = f"{name}.{reason}" if reason else name
        counters = self.data["counters"]
        counters[key] = counters.get(key, 0) + amount

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> MaruStats:
        """Both: counters are summed, of gauges the other's are newer."""
        result = MaruStats({"counters": dict(self.data["counters"])})
        for key, value in other.data["counters"].items():
            result.count(key, value)
        result.data["gauges"] = {**self.data["gauges"], **other.data["gauges"]}
        return result

    def reduce(self) -> dict[str, int | float]:
        """One value per name, for the log."""
        return {**self.data["counters"], **self.data["gauges"]}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data["counters"] and not self.data["gauges"]


@define
class Report:
    """What there is to tell since it was last told: what was counted, and of what is as it is now what has changed."""

    stats: MaruStats
    #: Values that were told last, in the order of GAUGES.
    _told: tuple[int, ...] | None = field(default=None, init=False)

    def take(self, values: tuple[int, ...]) -> MaruStats | None:
        """``values`` of all GAUGES, in their order; ``None``: there is nothing to tell."""
        before = self._told
        if values == before and self.stats.is_empty():
            return None
        self._told = values
        changed = {
            name: value
            for number, (name, value) in enumerate(zip(GAUGES, values, strict=True))
            if before is None or before[number] != value
        }
        told = MaruStats({"counters": self.stats.data["counters"], "gauges": changed})
        self.stats.reset()
        return told


class MaruPromMetrics(KVConnectorPromMetrics):
    """The same in Prometheus: ``vllm:maru_<name>``, reasons as a label.

    vLLM removes what it registered under names with ``vllm`` before it registers again in the same process.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_cls: Any = self._counter_cls
        gauge_cls: Any = self._gauge_cls
        self._counters = {
            name: counter_cls(name=f"vllm:maru_{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: gauge_cls(
                name=f"vllm:maru_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one report; names that are not known are left out."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.get("counters", {}).items():
            name, _, reason = key.partition(".")
            if name in self._counters and amount > 0:
                self._counters[name].labels(*values, reason).inc(amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name].labels(*values).set(value)
