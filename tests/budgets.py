"""How many examples the properties try.

A property states what it tries in full, ``settings(max_examples=examples(300))``. That many are tried with
``--hypothesis-profile=full``, as by scripts/test.sh. Without it pytest tries a quarter, to be quick enough for a run
after each change.
"""

from __future__ import annotations

try:
    from hypothesis import settings
except ImportError:  # a machine for some tests alone, none of which searches
    settings = None  # type: ignore[assignment, misc]

#: Examples of a property that does not say how many, by profile; the others are in proportion.
PROFILES = {"quick": 25, "full": 100}


def register() -> None:
    """Make the profiles known and choose the quick one; the command line chooses later.

    None has a deadline: how long an example takes is the machine's business. A failure says how it is seen again.
    """
    if settings is not None:
        for name, count in PROFILES.items():
            settings.register_profile(name, max_examples=count, deadline=None, print_blob=True)
        settings.load_profile("quick")


def examples(full: int) -> int:
    """How many to try of ``full``, at least one."""
    return max(1, full * settings().max_examples // PROFILES["full"])
