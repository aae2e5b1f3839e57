"""Tells, once, which transfer engine a worker uses and why not a better one."""

from __future__ import annotations

from attrs import define

from maru_core import logs
from maru_core.config import MaruConfig
from maru_core.contracts import TransferEngine
from maru_core.errors import Unavailable
from maru_core.host import PluginHost
from maru_transfer.selection import Choice, Pages, choose


class NoEngine(Unavailable):
    """By its settings this engine has nothing that moves its pages; to try again is of no use."""


@define
class EngineChooser:
    """Chooses for one worker, as often as it connects; speaks again only when the outcome is another one."""

    _told: Choice | None = None

    def choose(self, host: PluginHost, config: MaruConfig, pages: Pages) -> TransferEngine:
        """The engine that is to move ``pages``. Raises NoEngine with every reason when there is none."""
        choice = choose(
            host.engines(), host.engine, pages, wanted=config.transfer_engine, excluded=config.transfer_exclude
        )
        if choice != self._told:
            self._told = choice
            _tell(choice, sorted(host.engines()))
        if choice.chosen is None:
            raise NoEngine(choice.refusal())
        return host.engine(choice.chosen)


def _tell(choice: Choice, known: list[str]) -> None:
    log = logs.get_logger(__name__)
    excluded = [name for name in choice.unknown if name != choice.wanted]
    if excluded:
        log.warning("maru.unknown_engine", setting="maru_transfer_exclude", unknown=excluded, known=known)
    if choice.chosen is None:
        return
    log.info("maru.transfer_engine", chosen=choice.chosen, asked=choice.wanted, passed_over=choice.reasons)
    if choice.missed:
        log.warning(
            "maru.better_engine_missed",
            used=choice.chosen,
            missed={passed.name: passed.reason for passed in choice.missed},
            otherwise=f"maru_transfer_exclude={','.join(passed.name for passed in choice.missed)} if that is intended",
        )
