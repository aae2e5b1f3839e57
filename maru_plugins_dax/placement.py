"""Is the memory near the CPUs that this process may run on? Pure over a given sysfs root and sample of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import field, frozen

SYSFS: Final = Path("/sys")


@frozen
class Topology:
    """CPUs of each NUMA node, and distances from it to every node, by node number."""

    cpus: Mapping[int, frozenset[int]]
    distances: Mapping[int, Mapping[int, int]]

    @classmethod
    def read(cls, sysfs: Path = SYSFS) -> Topology:
        """From ``devices/system/node``; empty where that is not there."""
        cpus: dict[int, frozenset[int]] = {}
        rows: dict[int, list[int]] = {}
        for folder in sorted(sysfs.glob("devices/system/node/node[0-9]*")):
            try:
                number = int(folder.name.removeprefix("node"))
                cpus[number] = parse_list((folder / "cpulist").read_text())
                rows[number] = [int(word) for word in (folder / "distance").read_text().split()]
            except (OSError, ValueError):
                continue
        order = sorted(cpus)
        return cls(cpus, {node: dict(zip(order, row, strict=False)) for node, row in rows.items()})

    def nearest_to(self, node: int) -> frozenset[int]:
        """The nodes with CPUs that are nearest to the memory of ``node``; one without CPUs is a memory expander."""
        with_cpus = [other for other, cpus in self.cpus.items() if cpus]
        away = {other: self.distances.get(other, {}).get(node, 255) for other in with_cpus}
        return frozenset(other for other in with_cpus if away[other] == min(away.values()))


@frozen
class Placement:
    """``nodes``: sampled pages by node. ``far``: the share of them that no CPU of this process is nearest to."""

    nodes: Mapping[int, int] = field(factory=dict)
    far: float = 0.0
    remedy: str = ""


def judge(nodes: Sequence[int], allowed: Collection[int], topology: Topology) -> Placement:
    """``nodes``: of each sampled page, negative when not known. ``allowed``: CPUs that the process may run on."""
    counts = Counter(node for node in nodes if node >= 0)
    if not counts or len(topology.cpus) < 2:
        return Placement(dict(counts))
    own = {node for node, cpus in topology.cpus.items() if cpus & frozenset(allowed)}
    nearest = {node: topology.nearest_to(node) for node in counts}
    away = [node for node in counts if nearest[node] and not nearest[node] & own]
    if not away:
        return Placement(dict(counts))
    wanted = sorted(frozenset().union(*(nearest[node] for node in away)))
    remedy = (
        f"start this engine with `numactl --cpunodebind={','.join(map(str, wanted))}`, or make the pool near node "
        f"{','.join(map(str, sorted(own)))}, for example with `numactl --membind={min(own, default=0)} maru serve`"
    )
    return Placement(dict(counts), sum(counts[node] for node in away) / sum(counts.values()), remedy)


def node_of_device(device: tuple[int, int], sysfs: Path = SYSFS) -> int:
    """The node that sysfs names for a character device; -1 when it does not."""
    folder = sysfs / "dev" / "char" / f"{device[0]}:{device[1]}"
    for name in ("target_node", "numa_node", "device/numa_node"):
        try:
            node = int((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if node >= 0:
            return node
    return -1


def parse_list(text: str) -> frozenset[int]:
    """``0-3,8`` as numbers; raises ValueError on anything else."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
