"""Opens the sessions of a handler: what HELLO says about it, and what follows before a session is ready."""

from __future__ import annotations

import threading
from contextlib import suppress

from maru_core import logs
from maru_core.client.columns import single_number
from maru_core.client.link import Link
from maru_core.client.notices import PoolNotices
from maru_core.client.regions import Regions
from maru_core.client.session import Requester, Session, open_session
from maru_core.config import MaruConfig
from maru_core.contracts import PoolRegistrar
from maru_core.errors import BackendError, ProtocolError
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.protocol import Op
from maru_core.protocol.messages import PoolDescriptor


class SessionOpener:
    """Opens sessions for a link: what HELLO says about this handler, and what follows a new session."""

    def __init__(
        self,
        config: MaruConfig,
        namespace: Namespace,
        host: PluginHost,
        role: str,
        name: str,
        dma: bool,
        registrar: PoolRegistrar | None,
        object_bytes: int | None,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._host = host
        self._role = role
        self._name = name
        self._dma = dma
        self._registrar = registrar
        self._log = logs.get_logger(__name__)
        self._notices = PoolNotices(config, object_bytes)

    def __call__(self, link: Link, request: Requester, previous: Session | None) -> Session:
        """A session, ready to use; raises MaruError. It is ``previous`` if the server can go on with that."""
        session = open_session(
            request,
            link.guard,
            self._regions,
            role=self._role,
            name=self._name,
            descriptor=self._namespace.descriptor,
            dma=self._dma,
            previous=previous,
            held=link.holdings.seal(),
            # Not only when somebody else started the server: the server sees no limit in what is not below its pool.
            quota=self._config.quota_wish(),
        )
        resumed = previous is not None and previous.id == session.id
        try:
            self._catch_up(link, request, session)
            self._notices.tell(session, previous, link.url)
            if self._config.eager_map and self._role != "scheduler" and (not resumed or session.regions.was_let_go):
                self._map(session)
            self._host.session_opened(self._name, self._role)
        except BaseException:
            if not resumed:
                link.guard.close(session.proof)
                session.regions.close()
            raise
        return session

    def _regions(self, pools: tuple[PoolDescriptor, ...]) -> Regions:
        return Regions(pools, self._host, self._namespace.digest, self._registrar)

    def _catch_up(self, link: Link, request: Requester, session: Session) -> None:
        """Keep the weights epoch over a restart of the server, which starts again at 0.

        Without this, engines that have seen new weights would share with others that have not.
        """
        current = session.weights_epoch
        if link.weights_epoch is None:
            link.weights_epoch = current
        while current < link.weights_epoch:
            _, results = request(Op.RESET, session.epoch, session.id, [current])
            reached = single_number(results)
            if reached <= current:
                raise ProtocolError(f"the server answered RESET of weights epoch {current} with {reached}")
            current = reached

    def _map(self, session: Session) -> None:
        try:
            session.regions.map_all()
        except BackendError as error:
            self._log.warning("pool not mapped; the first use tries again", reason=str(error))
            return
        if self._registrar is None:  # which populates what it registers
            # Not on the link's own thread, which must go on pinging.
            with suppress(RuntimeError):  # this process gets no more threads: whoever uses a page first populates it
                threading.Thread(target=session.regions.populate, name="maru-populate", daemon=True).start()
