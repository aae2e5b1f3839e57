"""The load whose turn comes next, planned while another one is copied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from attrs import frozen

from maru_core import logs
from maru_core.contracts import Transfer
from maru_core.foreign import show
from maru_integrations.vllm.loadqueue import LoadJob
from maru_integrations.vllm.moving import Link, LoadT, Planned
from maru_transfer.helpers import share

#: Plans what is left of a load.
Plan: TypeAlias = Callable[[Link, LoadJob], Planned[LoadT]]


@frozen(eq=False)
class _Ahead:
    """What is being planned: the load from behind its first ``good`` objects, for a transfer, in one of two ways."""

    job: LoadJob
    good: int
    transfer: Transfer
    plan: Plan[Any]
    planned: Future[Planned[Any]]

    def is_for(self, job: LoadJob) -> bool:
        """Whether it is that load, from where it is now."""
        return self.job is job and self.good == job.good


class NextLoad:
    """At most one plan, which holds buffers until it is taken or forgotten. Only the loader's thread uses this."""

    def __init__(self) -> None:
        self._log = logs.get_logger(__name__)
        self._ahead: _Ahead | None = None

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan that holds buffers, or will."""
        return self._ahead is not None

    def plan(self, job: LoadJob, link: Link, plan: Plan[Any], pool: ThreadPoolExecutor) -> None:
        """Have ``plan(link, job)`` made by a thread of the pool, in place of what was planned before."""
        self.forget()
        self._ahead = _Ahead(job, job.good, link.transfer, plan, share(pool, lambda: plan(link, job)))

    def take(self, job: LoadJob, link: Link, plan: Plan[LoadT]) -> Planned[LoadT]:
        """The load planned by ``plan`` for this link's transfer: ahead of its turn where that was done, else now.

        Raises what planning raises, such as Unavailable when the server's epoch is another one by now.
        """
        ahead = self._ahead
        if ahead is None or not (ahead.is_for(job) and ahead.transfer is link.transfer and ahead.plan == plan):
            self.forget()
            return plan(link, job)
        self._ahead = None
        planned: Planned[LoadT] = ahead.planned.result()
        try:
            # What was granted by a server that was replaced since then is not to be copied.
            link.handler.adopt(job.op.epoch, (), (), (), ())
        except BaseException:
            planned.load.close()
            raise
        return planned

    def forget(self, unless: LoadJob | None = None) -> None:
        """Let go of the plan, if there is one, ``unless`` it is for that load from where it is now."""
        ahead = self._ahead
        if ahead is None or (unless is not None and ahead.is_for(unless)):
            return
        self._ahead = None
        try:
            planned = ahead.planned.result()
        except BaseException:  # noqa: BLE001 - nothing is held; if the load is still wanted, it is planned again
            return
        try:
            planned.load.close()
        except BaseException as error:  # noqa: BLE001 - a plugin's; the loads that are still wanted go on
            self._log.warning(
                "maru.load_not_closed", engine=planned.engine, request=ahead.job.op.request_id, error=show(error)
            )
