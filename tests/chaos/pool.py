"""What lies in pool files while no server has it: the readable objects of a dead server."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from maru_core.pool_format import HEADER_SIZE, SUPERBLOCK_SIZE, Header, State, unpack_header, unpack_superblock


@frozen
class Found:
    """READY objects of a pool, and how many headers are torn."""

    identity: bytes
    ready: tuple[Header, ...]
    torn: int


def find_pools(folder: Path) -> list[Path]:
    """The pool files below a server's ``maru_pool_path``, in the order in which they are written to."""
    found = [*folder.glob("maru-*/pool-*"), *folder.glob("maru-cxl-*")]
    assert found
    return found


def survey_all(paths: Sequence[Path]) -> Found:
    """All pools as one. Of an object that is on its way from one to another there may be two: the first counts."""
    each = [survey(path) for path in paths]
    ready: dict[tuple[bytes, bytes, int], Header] = {}
    for found in each:
        for header in found.ready:
            ready.setdefault((header.digest, header.key, header.weights_epoch), header)
    return Found(b"".join(found.identity for found in each), tuple(ready.values()), sum(found.torn for found in each))


def identities(paths: Sequence[Path]) -> bytes:
    """Which pools these are."""
    return b"".join(unpack_superblock(path.read_bytes()[:SUPERBLOCK_SIZE]).identity for path in paths)


def survey(path: Path) -> Found:
    """Read the header table of a pool that nobody writes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pool:
        block = unpack_superblock(pool[:SUPERBLOCK_SIZE])
        ready = []
        torn = 0
        for at in range(block.table_offset, block.table_offset + block.entry_count * HEADER_SIZE, HEADER_SIZE):
            raw = pool[at : at + HEADER_SIZE]
            header = unpack_header(raw)
            if header is None:
                torn += any(raw)
            elif header.state is State.READY:
                ready.append(header)
    return Found(block.identity, tuple(ready), torn)
