"""Which transfer engine moves a worker's pages, and why not the others. Decides; opens nothing and logs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from maru_core.contracts import EngineProvision, TransferEngine
from maru_core.foreign import pass_interrupt, show
from maru_core.geometry import ObjectLayout, PagedLayout

AUTO: Final = "auto"

#: ``excluded`` and ``not asked for``: by configuration. ``unsupported``: it never moves such pages. ``unusable``: it
#: would, if what it needs were there. ``ranked lower``: it was not even looked at.
Cause = Literal["excluded", "not asked for", "unsupported", "unusable", "ranked lower"]


@frozen
class Pages:
    """What has to be moved: pages, the objects they become, and the type of device (``cpu``, ``cuda``) they are on."""

    paged: PagedLayout
    stored: ObjectLayout
    device: str


@frozen
class Passed:
    """An engine that was not taken. ``reason`` is for people, with the remedy where there is one."""

    name: str
    cause: Cause
    reason: str


@frozen
class Choice:
    """The outcome. ``chosen`` is ``None`` when no engine is left; ``passed`` is in order of preference.

    ``unknown``: names that were asked for or excluded and that no plugin offers.
    """

    wanted: str
    chosen: str | None
    passed: tuple[Passed, ...]
    unknown: tuple[str, ...] = ()

    @property
    def reasons(self) -> dict[str, str]:
        """Why each of the others was passed over, by name."""
        return {passed.name: passed.reason for passed in self.passed}

    @property
    def missed(self) -> tuple[Passed, ...]:
        """Engines that would have been better and for which something is missing."""
        return tuple(passed for passed in self.passed if passed.cause == "unusable")

    def refusal(self) -> str:
        """Why there is no engine, when ``chosen`` is ``None``."""
        if self.wanted in self.unknown:
            known = ", ".join(sorted(self.reasons)) or "none"
            return f"maru_transfer_engine={self.wanted}: no plugin offers it; there are: {known}"
        remedy = ""
        if self.passed and all(passed.cause == "excluded" for passed in self.passed):
            remedy = "; take a name out of maru_transfer_exclude"
        told = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items()) or "no plugin offers one"
        return f"maru_transfer_engine={self.wanted}: no engine can move these pages ({told}){remedy}"


def choose(
    offered: Mapping[str, EngineProvision],
    find: Callable[[str], TransferEngine],
    pages: Pages,
    *,
    wanted: str = AUTO,
    excluded: Sequence[str] = (),
) -> Choice:
    """The engine that is asked for by name, or with ``auto`` the first that can be used, by rank and then by name.

    ``find`` makes an engine by its name; it may raise, and so may the engine: that makes it unusable. Only engines that
    matter for the choice are made.
    """
    chosen: str | None = None
    passed: list[Passed] = []
    for name in sorted(offered, key=lambda name: (-offered[name].rank, name)):
        if name in excluded:
            passed.append(Passed(name, "excluded", "excluded by maru_transfer_exclude"))
        elif wanted not in (AUTO, name):
            passed.append(Passed(name, "not asked for", f"maru_transfer_engine={wanted}"))
        elif chosen is not None:
            reason = f"ranked after {chosen}; maru_transfer_engine={name} asks for it"
            passed.append(Passed(name, "ranked lower", reason))
        else:
            problem = _problem(name, find, pages)
            if problem is None:
                chosen = name
            else:
                passed.append(problem)
    asked = () if wanted == AUTO else (wanted,)
    unknown = tuple(name for name in (*asked, *excluded) if name not in offered)
    return Choice(wanted, chosen, tuple(passed), unknown)


def _problem(name: str, find: Callable[[str], TransferEngine], pages: Pages) -> Passed | None:
    """Why this engine cannot be taken."""
    try:
        engine = find(name)
        # First, because it needs nothing: what is missing matters only to who could use it.
        reason = engine.unsupported(pages.paged, pages.stored, pages.device)
        if reason is not None:
            return Passed(name, "unsupported", reason)
        if engine.is_available():
            return None
        return Passed(name, "unusable", engine.import_error() or "it does not say why")
    except BaseException as error:  # noqa: BLE001 - a plugin's code, see pass_interrupt
        pass_interrupt(error)
        return Passed(name, "unusable", show(error))
