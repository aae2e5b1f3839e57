"""Sizes mean powers of 1024, and what is no size is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4G", 4 << 30),
        ("500M", 500 << 20),
        ("4GiB", 4 << 30),
        ("4gb", 4 << 30),
        (" 1.5 K ", 1536),
        ("2T", 2 << 40),
        ("17", 17),
        ("17B", 17),
        (4096, 4096),
        ("0", 0),
        ("0.0", 0),
        ("0.5K", 512),
        ("0.000", 0),
        ("0.3G", 322122547),
        ("0.0009765625K", 1),
        ("9" * 400, int("9" * 400)),
        ("9" * 400 + ".5", int("9" * 400)),
    ],
)
def test_sizes_are_powers_of_1024(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "4X", "4 G B", "-1", "1e9", "0x10", "4Gi b", None, True, 1.5, [], b"4G", -1, "0.0001", "0.0001K"]
)
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(0, 2**60))
def test_whole_numbers_of_any_length_are_exact(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(f"{size}K") == size * 1024


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB")])
def test_sizes_are_shown_with_their_unit(size: int, text: str) -> None:
    assert format_size(size) == text
