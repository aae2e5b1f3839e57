"""A namespace: everything that must be equal before two engines may share bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import msgpack
from attrs import field, frozen

from maru_core.errors import ConfigError
from maru_core.pool_format import DIGEST_SIZE
from maru_core.protocol.messages import MAX_TEXT

Value = str | int | bool | None

#: The fact that holds an operator's ``maru_cache_namespace``; keys of clients are bound to its values.
OPERATOR_FACT: Final = "operator"


def digest_of(descriptor: bytes) -> bytes:
    """The 16 bytes that stand for a namespace's descriptor in every header; client and server compute it alike."""
    return hashlib.blake2b(descriptor, digest_size=DIGEST_SIZE, person=b"maru-namespace").digest()


def facts_of(descriptor: bytes) -> dict[str, Value] | None:
    """The facts in a descriptor from outside; ``None`` when it is not what :class:`Namespace` makes of them."""
    try:
        pairs = msgpack.unpackb(descriptor, max_ext_len=0)
        facts = {name: value for name, value in pairs if isinstance(name, str)}
        return facts if Namespace.of(facts).descriptor == descriptor else None
    except Exception:  # noqa: BLE001 - whatever damage makes msgpack or the packing of it trip over
        return None


def cache_namespace_of(descriptor: bytes) -> str | None:
    """The operator's ``maru_cache_namespace`` in a descriptor, ``None`` when it is not certain that there is one."""
    value = (facts_of(descriptor) or {}).get(OPERATOR_FACT)
    return value if isinstance(value, str) else None


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
