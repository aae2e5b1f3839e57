"""Lets rows of many objects flow into slices: pure arithmetic on NumPy arrays, whatever the size of an object.

A slice is what crosses the bus at a time, at most one slot of staging memory. How large it is decides what a request
costs a thread and how long a copy of somebody else waits, so slices are filled across the edges of objects.
"""

from __future__ import annotations

import itertools

import numpy as np
from attrs import evolve, frozen

from maru_transfer.cuda_library import MOST_BLOCKS, MOST_SEGMENTS, SEGMENT, Array

#: Where segments of one slice begin within a slot.
ALIGNMENT = 256
#: In order of layers, a slice of at most so many bytes may hold several: a smaller one takes longer to submit than to
#: cross.
LEAST_SLICE = 8 << 20


@frozen(eq=False)
class Shares:
    """What is moved of objects: arrays of int64, all equally long and in the order in which it is moved.

    Of each share, ``rows`` rows from ``row`` on, every ``step``, which lie ``pitch`` bytes from each other in the
    object; of each row ``tokens`` tokens from the request's ``token`` on, the first of them at address ``host``.
    ``way``: as in SEGMENT. ``layer``: ascending, which one this is if layers are told apart.
    """

    host: Array
    token: Array
    tokens: Array
    row: Array
    way: Array
    layer: Array
    rows: int
    step: int
    pitch: int

    def take(self, index: Array | slice) -> Shares:
        """Some of them."""
        return Shares(
            self.host[index],
            self.token[index],
            self.tokens[index],
            self.row[index],
            self.way[index],
            self.layer[index],
            self.rows,
            self.step,
            self.pitch,
        )


@frozen
class Cutter:
    """``slot``: bytes of a slice at most. ``token_bytes`` of a row's token. ``layers``: followed one by one, or 0."""

    slot: int
    token_bytes: int
    block_size: int
    layers: int = 0

    def cut(self, shares: Shares) -> Array:
        """Segments of type SEGMENT that cover the shares in their order."""
        shares = self._split(shares)
        edges = [0, *(np.flatnonzero(np.diff(shares.way)) + 1).tolist(), len(shares.way)]
        parts = []
        slices = 0
        layers = []
        for first, last in itertools.pairwise(edges):
            run = shares if len(edges) == 2 else shares.take(slice(first, last))
            part, owner = self._fill(run)
            part["slice"] += slices
            slices = int(part["slice"][-1]) + 1
            parts.append(part)
            layers.append(run.layer[owner])
        made = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.layers:
            number = made["slice"].astype(np.int64)
            # A layer is complete when a later one begins.
            complete = np.empty(slices, np.int64)
            complete[:-1] = np.concatenate(layers)[_fresh(number).nonzero()[0][1:]]
            complete[-1] = self.layers
            made["layers"] = complete[number]
        return made

    def _split(self, shares: Shares) -> Shares:
        """Shares of which a row fits a slice, and its blocks a launch, whatever slot the first token has."""
        most = min(self.slot // self.token_bytes, (MOST_BLOCKS - 1) * self.block_size)
        counts = -(-shares.tokens // most)
        if counts.max() == 1:
            return shares
        which = np.repeat(np.arange(len(counts)), counts)
        part = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        shares = shares.take(which)
        return evolve(
            shares,
            host=shares.host + part * self.token_bytes,
            token=shares.token + part,
            tokens=np.minimum(shares.tokens - part, most),
        )

    def _fill(self, shares: Shares) -> tuple[Array, Array]:
        """Segments of shares that travel alike, slices counted from 0, and the share of each segment."""
        width = shares.tokens * self.token_bytes
        owner = np.repeat(np.arange(len(width)), shares.rows)
        position, unit = self._alike(shares, width) if (width == width[0]).all() else self._unlike(shares, width)
        if self.layers:
            # What waits for the first layer shall not wait for the beginning of the next.
            later = shares.layer[owner] > shares.layer[0]
            first = int(np.count_nonzero(~later))
            if first < len(later):
                position = position + later * (-int(position[first]) % unit)
        fresh = _fresh(position // unit)
        starts = (fresh | _fresh(owner)).nonzero()[0]
        owner_of, row = owner[starts], starts % shares.rows
        made = np.zeros(len(starts), SEGMENT)
        rows = np.empty(len(starts), np.int64)
        np.subtract(starts[1:], starts[:-1], out=rows[:-1])
        rows[-1] = len(owner) - starts[-1]
        made["rows"] = rows
        made["host"] = shares.host[owner_of] + row * shares.pitch
        made["pitch"] = shares.pitch
        made["row"] = shares.row[owner_of] + row * shares.step
        made["step"] = shares.step
        made["token"], made["tokens"] = shares.token[owner_of], shares.tokens[owner_of]
        made["way"] = shares.way[owner_of]
        opens = fresh[starts]
        made["slice"] = number = opens.cumsum() - 1
        sizes = -(-rows * width[owner_of] // ALIGNMENT) * ALIGNMENT
        begins = sizes.cumsum() - sizes
        made["offset"] = begins - begins[opens][number]
        return made, owner_of

    def _places(self, shares: Shares) -> Array:
        return (shares.token % self.block_size + shares.tokens - 1) // self.block_size + 1

    def _alike(self, shares: Shares, width: Array) -> tuple[Array, int]:
        """Positions of rows, and how many make a slice, where every row has as many bytes."""
        rows, each, places = shares.rows, int(width[0]), int(self._places(shares).max())
        count = len(width) * rows
        fit = min(self.slot // (-(-rows * each // ALIGNMENT) * ALIGNMENT), MOST_SEGMENTS, MOST_BLOCKS // places)
        if fit:
            if self.layers:
                layer = int(np.count_nonzero(shares.layer == shares.layer[0]))
                fit = min(fit, max(layer, LEAST_SLICE // (rows * each), 1))
            return np.arange(count), fit * rows
        unit = max(1, self.slot // each if each % ALIGNMENT == 0 else (self.slot - ALIGNMENT) // each)
        position = np.arange(count)
        if 2 * places > MOST_BLOCKS:  # then a slice holds of one share only
            position = position // rows * (-(-rows // unit) * unit) + position % rows
        return position, unit

    def _unlike(self, shares: Shares, width: Array) -> tuple[Array, int]:
        """Positions of rows in bytes, and the bytes of a slice but for those of its last row, where rows differ."""
        places = self._places(shares)
        padding = MOST_SEGMENTS * ALIGNMENT if (width % ALIGNMENT).any() else 0
        unit = max(1, self.slot - int(width.max()) - padding)
        if self.layers:
            layer = int(width[shares.layer == shares.layer[0]].sum()) * shares.rows
            unit = min(unit, max(layer, LEAST_SLICE))
        # A row counts as much as the share that it has of what a launch takes, if that is more than its bytes.
        spare = MOST_BLOCKS - 3 * int(places.max())
        least = -(-unit // ((MOST_SEGMENTS - 2) * shares.rows))
        by_blocks = -(-unit * places // (spare * shares.rows)) if spare > 0 else np.full(len(width), unit)
        cost = np.repeat(np.maximum(np.maximum(width, least), by_blocks), shares.rows)
        return np.cumsum(cost) - cost, unit


def _fresh(values: Array) -> Array:
    """Of each value whether it is the first, or another one than that before it."""
    fresh = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=fresh[1:])
    return fresh
