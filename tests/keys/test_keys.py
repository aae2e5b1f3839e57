"""Chunk keys: what is in them, that they are incremental, and that unlike requests never share one."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.errors import MaruError
from maru_core.keys import KeyChain, cache_salt_field, layer_keys
from maru_core.namespace import Namespace

ROOT = Namespace.of({"model": "m"}).root

tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
values = st.binary(max_size=4) | st.sampled_from([b"\0", b"a", b"ab", b"cache_salt", b"\1\0\0\0\0\0\0\0a"])
extras = st.lists(st.tuples(st.sampled_from(["", "a", "ab", "lora", "cache_salt", "\0"]), values), max_size=3)


class SliceOnly:
    """A token list that counts what is read, as an engine's read-only list would be read."""

    def __init__(self, tokens):
        self._tokens = tokens
        self.read = 0

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, item):
        assert isinstance(item, slice), "tokens are read by slices only"
        self.read += len(self._tokens[item])
        return self._tokens[item]


def keys_of(tokens, chunk_tokens=4, root=ROOT, extra=()):
    chain = KeyChain(root, chunk_tokens, extra)
    chain.extend(tokens, len(tokens))
    return chain.keys


def test_a_key_is_the_hash_of_the_parent_and_the_tokens_as_little_endian_u32():
    chain = KeyChain(ROOT, 2)
    chain.extend([1, 2**32 - 1, 3, 4], 4)
    expected = []
    parent = chain.parent(0)
    for pair in ((1, 2**32 - 1), (3, 4)):
        parent = hashlib.blake2b(parent + struct.pack("<2I", *pair), digest_size=32, person=b"maru-chunk").digest()
        expected.append(parent)
    assert chain.keys == expected


def test_known_keys_do_not_change_between_versions():
    """Stored objects outlive a release: another key for the same tokens is a lost cache."""
    keys = keys_of(list(range(8)), 4, bytes(32), cache_salt_field("s"))
    assert [key.hex()[:16] for key in keys] == ["2a97c02a7c49bd9e", "c1d15ed53578b95d"]


@given(tokens_lists, st.integers(1, 7))
def test_only_whole_chunks_have_keys(tokens, chunk_tokens):
    keys = keys_of(tokens, chunk_tokens)
    assert len(keys) == len(tokens) // chunk_tokens
    assert all(len(key) == 32 for key in keys)


@given(tokens_lists, st.integers(1, 5), st.lists(st.integers(0, 40), max_size=5))
def test_extending_in_steps_gives_the_same_keys_and_reads_each_token_once(tokens, chunk_tokens, steps):
    chain = KeyChain(ROOT, chunk_tokens)
    source = SliceOnly(tokens)
    for step in [*sorted(step for step in steps if step <= len(tokens)), len(tokens)]:
        chain.extend(source, step)
        assert len(chain.keys) == step // chunk_tokens
    assert chain.keys == keys_of(tokens, chunk_tokens)
    assert source.read == len(chain.keys) * chunk_tokens
    assert [chain.parent(i) for i in range(1, len(chain.keys))] == chain.keys[:-1]


@given(tokens_lists, tokens_lists)
def test_prompts_share_keys_exactly_as_far_as_they_share_chunks(one, other):
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    first, second = keys_of(one), keys_of(other)
    assert first[: common // 4] == second[: common // 4]
    assert not set(first[common // 4 :]) & set(second[common // 4 :])


@given(extras, extras)
def test_different_extra_fields_never_share_a_key(one, other):
    """R067: fields are tagged and length-delimited, so no two different tuples of them hash alike."""
    same = keys_of([1, 2, 3, 4], extra=one) == keys_of([1, 2, 3, 4], extra=other)
    assert same == (one == other)


@given(st.text(max_size=3) | st.none(), st.text(max_size=3) | st.none())
def test_different_salts_never_share_a_key_and_no_salt_is_not_an_empty_one(one, other):
    first = keys_of([1, 2, 3, 4], extra=cache_salt_field(one))
    assert (first == keys_of([1, 2, 3, 4], extra=cache_salt_field(other))) == (one == other)


def test_a_lora_called_like_a_salt_is_another_key():
    assert keys_of([1, 2, 3, 4], extra=[("lora", b"X")]) != keys_of([1, 2, 3, 4], extra=cache_salt_field("X"))


def test_a_salt_of_any_text_has_a_key():
    assert cache_salt_field("\ud800") == (("cache_salt", b"\xed\xa0\x80"),)


def test_namespaces_share_no_key():
    other = Namespace.of({"model": "n"}).root
    assert not set(keys_of(list(range(16)))) & set(keys_of(list(range(16)), root=other))


def test_chunk_sizes_share_no_key_beyond_equal_prefixes():
    """The chunk size is a fact of the namespace; even without it a chain of another size diverges after one chunk."""
    assert keys_of(list(range(16)), 8)[0] != keys_of(list(range(16)), 4)[1]


@pytest.mark.parametrize(("bad", "shown"), [(-1, "-1"), (2**32, "4294967296"), (1.5, "1.5"), (None, "None")])
def test_a_token_that_is_no_u32_is_refused_by_position(bad, shown):
    chain = KeyChain(ROOT, 4)
    with pytest.raises(MaruError, match=rf"token {shown} at position 6 "):
        chain.extend([0, 1, 2, 3, 4, 5, bad, 7], 8)
    assert chain.keys == keys_of([0, 1, 2, 3])


def test_a_list_shorter_than_asked_for_is_refused():
    chain = KeyChain(ROOT, 4)
    with pytest.raises(MaruError, match=r"chunk 1 needs tokens 4\.\.7.*ends at 7"):
        chain.extend(list(range(7)), 8)


@pytest.mark.parametrize(("root", "chunk_tokens", "told"), [(b"short", 4, "5 bytes"), (ROOT, 0, "chunk_tokens=0")])
def test_a_chain_without_a_root_or_a_chunk_is_refused(root, chunk_tokens, told):
    with pytest.raises(MaruError, match=told):
        KeyChain(root, chunk_tokens)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5, unique=True), st.integers(1, 130))
def test_layers_of_chunks_have_keys_of_their_own_that_name_their_chunk(chunks, layers):
    found = layer_keys(chunks, layers)
    assert len(found) == len(chunks) * layers
    for place, key in enumerate(found):
        assert len(key) == 32
        assert key[:28] == chunks[place // layers][:28]
    for first in range(0, len(found), layers):
        tags = {key[28:] for key in found[first : first + layers]}
        assert len(tags) == layers, "two layers of a chunk share what the index finds them by"
    if len({chunk[:28] for chunk in chunks}) == len(chunks):
        assert len(set(found)) == len(found)


def test_known_layer_keys_do_not_change_between_versions():
    assert [key.hex()[-8:] for key in layer_keys([bytes(range(32))], 3)] == ["1c1d1e1f", "a5642981", "6eee7023"]


def test_layers_spread_over_the_shards_and_the_sample_as_hashes_do():
    """Their last byte picks a shard of the index and whether an object is given a checksum."""
    chunks = [hashlib.blake2b(bytes([number]), digest_size=32).digest() for number in range(250)]
    counts = Counter(key[-1] % 64 for key in layer_keys(chunks, 32))
    assert len(counts) == 64
    assert max(counts.values()) < 2 * 250 * 32 / 64
    assert len({key[28:] for key in layer_keys(chunks, 32)}) > 0.999 * 250 * 32


@pytest.mark.parametrize("objects", [1, 2, 5])
@given(tokens=st.lists(st.integers(0, 99), min_size=12, max_size=24))
def test_objects_of_a_request_are_one_chain(objects, tokens):
    chain = KeyChain(ROOT, 4, (), objects)
    chain.extend(tokens, len(tokens))
    chunks = len(tokens) // 4
    keys = chain.object_keys(0, chunks)
    assert len(keys) == chunks * objects
    assert keys[objects : 2 * objects] == chain.object_keys(1, 2)
    assert chain.objects(range(chunks)) == (keys, [chain.parent(0), *keys[:-1]])
    if objects == 1:
        assert keys == chain.keys


@given(objects=st.integers(1, 4), chosen=st.lists(st.integers(0, 9), unique=True))
def test_objects_of_some_chunks_are_those_that_all_of_them_have(objects, chosen):
    """Also of chunks that have others between them, and of none."""
    chain = KeyChain(ROOT, 4, (), objects)
    chain.extend(list(range(40)), 40)
    keys, parents = chain.objects(range(10))
    wanted = [chunk * objects + number for chunk in chosen for number in range(objects)]
    assert chain.objects(chosen) == ([keys[at] for at in wanted], [parents[at] for at in wanted])


def test_a_chunk_of_no_objects_is_refused():
    with pytest.raises(MaruError, match="objects_per_chunk=0"):
        KeyChain(ROOT, 4, (), 0)


def test_two_interpreters_with_different_hash_seeds_agree():
    """R123: nothing in a key may depend on Python's randomised string hash."""
    program = (
        "from maru_core.keys import KeyChain, cache_salt_field\n"
        "from maru_core.namespace import Namespace\n"
        "root = Namespace.of({'model': 'm', 'dtype': None, 'tp': 1}).root\n"
        "chain = KeyChain(root, 4, cache_salt_field('tenant'))\n"
        "chain.extend(list(range(64)), 64)\n"
        "print(b''.join(chain.keys).hex())\n"
    )
    outputs = set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop()) == 16 * 64 + 1
