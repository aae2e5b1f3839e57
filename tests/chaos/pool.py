"""What lies in a pool file while no server has it: the readable objects of a dead server."""

from __future__ import annotations

import mmap
from pathlib import Path

from attrs import frozen

from maru_core.pool_format import HEADER_SIZE, SUPERBLOCK_SIZE, Header, State, unpack_header, unpack_superblock


@frozen
class Found:
    """READY objects of a pool, and how many headers are torn."""

    identity: bytes
    ready: tuple[Header, ...]
    torn: int


def find_pool(folder: Path) -> Path:
    """The only pool file below a server's ``maru_pool_path``."""
    (path,) = folder.glob("maru-*/pool-*")
    return path


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
