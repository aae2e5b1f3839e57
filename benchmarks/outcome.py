"""What benchmarks have in common: options, a table, bounds, ``--json``, and the exit status."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bound:
    """A figure that must be at most ``limit``."""

    name: str
    figure: float
    limit: float

    @property
    def missed(self) -> bool:
        """Whether the figure is over the limit."""
        return not self.figure <= self.limit

    @property
    def wanted(self) -> str:
        """What the figure must be."""
        return f"at most {self.limit:g}"


@dataclass(frozen=True)
class Least(Bound):
    """A figure that must be at least ``limit``."""

    @property
    def missed(self) -> bool:
        """Whether the figure is below the limit."""
        return not self.figure >= self.limit

    @property
    def wanted(self) -> str:
        """What the figure must be."""
        return f"at least {self.limit:g}"


@dataclass(frozen=True)
class Outcome:
    """Figures of one run: for people as a table (first line: headings), for programs as they are."""

    table: Sequence[Sequence[str]]
    figures: dict[str, Any]
    bounds: Sequence[Bound]
    notes: Sequence[str] = field(default=())


def align(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of equal columns; the first is text, the others are figures."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def report(outcome: Outcome, target: Path | None) -> int:
    """Print, write, and return the exit status: 1 when a bound is missed."""
    print("\n".join([*align(outcome.table), *outcome.notes]))
    for bound in outcome.bounds:
        print(f"{bound.name}: {bound.figure:.6g}, {bound.wanted}: {'MISSED' if bound.missed else 'met'}")
    missed = [bound.name for bound in outcome.bounds if bound.missed]
    if target is not None:
        limits = {bound.name: {"figure": bound.figure, "limit": bound.limit} for bound in outcome.bounds}
        report = {"figures": outcome.figures, "bounds": limits, "missed": missed}
        target.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def main(
    description: str | None,
    measure: Callable[[argparse.Namespace], Outcome],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    arguments: Sequence[str] | None = None,
) -> int:
    """A benchmark's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    # Unwinds the stack, and with it ends what was started.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    return report(measure(options), options.json)
