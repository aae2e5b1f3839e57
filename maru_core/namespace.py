"""A namespace: everything that must be equal before two engines may share bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgpack
from attrs import field, frozen

from maru_core.errors import ConfigError
from maru_core.pool_format import DIGEST_SIZE
from maru_core.protocol.messages import MAX_TEXT

Value = str | int | bool | None


def digest_of(descriptor: bytes) -> bytes:
    """The 16 bytes that stand for a namespace's descriptor in every header; client and server compute it alike."""
    return hashlib.blake2b(descriptor, digest_size=DIGEST_SIZE, person=b"maru-namespace").digest()


@frozen
class Namespace:
    """Named facts that bind stored bytes: model identity, KV dtype, geometry, chunk size, format, rank, tenant.

    The order of ``facts`` does not matter. ``descriptor`` is what the server stores beside the objects and ``digest``
    (16 bytes) what every header carries; chunk keys start their hash chain from ``root``.
    """

    facts: tuple[tuple[str, Value], ...]
    descriptor: bytes = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        ordered = sorted(self.facts)
        names = [name for name, _ in ordered]
        if len(set(names)) != len(names):
            raise ConfigError(f"a namespace names a fact twice: {names}")
        descriptor: bytes = msgpack.packb([list(fact) for fact in ordered], use_bin_type=True)
        if len(descriptor) > MAX_TEXT:
            raise ConfigError(f"a namespace of {len(descriptor)} bytes is over the limit of {MAX_TEXT}")
        object.__setattr__(self, "descriptor", descriptor)
        object.__setattr__(self, "digest", digest_of(descriptor))

    @classmethod
    def of(cls, facts: Mapping[str, Value]) -> Namespace:
        """Build from a mapping."""
        return cls(tuple(sorted(facts.items())))

    @property
    def root(self) -> bytes:
        """32 bytes from which the chain of chunk keys starts."""
        return hashlib.blake2b(self.descriptor, digest_size=32, person=b"maru-root").digest()
