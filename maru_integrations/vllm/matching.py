"""Longest stored prefix of a request, asked from the server without ever blocking the scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from types import MappingProxyType

from maru_core import logs
from maru_core.client import Lease, MaruHandler
from maru_core.errors import MaruError
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol import Presence
from maru_integrations.vllm.breaker import Breaker
from maru_integrations.vllm.questions import Question
from maru_integrations.vllm.requests import Hit, Lookup, RequestState
from maru_integrations.vllm.shareline import ShareLine
from maru_integrations.vllm.waits import Wait

#: How long all look-ups of one step together may wait for answers that are usually there after a fifth of it, in
#: seconds. Each look-up waits once for each of its slices; after that an answer is taken when it is there.
POLL = 0.001
#: The same while the engine has nothing else to do: asking in a loop would only keep the server off the processor.
IDLE_POLL = 0.01
#: The key of no object: asking for it leases nothing, however late the answer comes.
_NOBODYS = hashlib.blake2b(digest_size=KEY_SIZE, person=b"maru-probe").digest()


class Matcher:
    """Turns a request's tokens into a leased run of chunks.

    A match is a promise: the lease is taken with the answer and kept, however often vLLM asks, until the load that uses
    it has ended or the request is gone. Whole chunks only, the last one clipped so that at least one token is left to
    compute and the hit ends on a block boundary.

    BUSY says that a chunk is there and this engine leases all that it may, nothing else. So a request that is answered
    so waits while there is something that this engine will give back, in a line (:class:`ShareLine`) that nobody who is
    asked for later overtakes, without a lease, and asks again; in the end it takes what there is. Who misses does not
    wait.
    """

    def __init__(
        self,
        handler: MaruHandler,
        *,
        chunk_tokens: int,
        block_size: int,
        objects_per_chunk: int = 1,
        lookup_timeout: float,
        clock: Callable[[], float],
        breaker: Breaker | None = None,
        count: Callable[[str], None] = lambda name: None,
        line: ShareLine | None = None,
        loads: Sized = (),
        load_timeout: float = 0.0,
        states: Mapping[str, RequestState] = MappingProxyType({}),
    ) -> None:
        """``loads`` under way and live requests (``states``): what they have leased is given back in time.

        ``load_timeout``: seconds that a load may take; 0: any number.
        """
        self._handler = handler
        self._chunk = chunk_tokens
        self._block = block_size
        self._objects = objects_per_chunk
        self._timeout = lookup_timeout
        self._clock = clock
        self._breaker = Breaker(clock) if breaker is None else breaker
        self._count = count
        self._loads = loads
        self._load_timeout = load_timeout
        self._states = states
        self._line = ShareLine() if line is None else line
        self._idle = False
        self._patience = POLL
        self._probe: Lookup | None = None
        self._log = logs.get_logger(__name__)
        #: (key, entry, generation) of objects that could not be loaded; never promised again.
        self._bad: dict[tuple[bytes, int, int], None] = {}

    def new_step(self, *, idle: bool) -> None:
        """Waiting is allowed anew. ``idle``: no request would be delayed by it."""
        self._idle = idle
        self._patience = IDLE_POLL if idle else POLL
        if self._breaker.is_open:
            # Not only when there is somebody to look up for: what is computed may be stored again as soon.
            self._is_back()

    def match(self, state: RequestState, num_tokens: int, local: int) -> int | None:
        """Tokens beyond ``local`` that the pool holds, in ``[0, num_tokens - 1 - local]``; ``None``: ask again.

        ``num_tokens`` counts the request's tokens, generated ones included when it is resumed.
        """
        cap = (num_tokens - 1) // self._block * self._block
        if state.chain is None or state.failed or local >= cap:
            self._line.leave(_id_of(state))
            return 0
        if state.lookup is not None and local // self._chunk < state.lookup.first_chunk:
            # vLLM's own prefix has become shorter since: the answer would leave a gap.
            self._take_back(state)
        hit = state.hit
        if hit is not None and (local // self._chunk < hit.first_chunk or not self._alive(hit.lease)):
            self._take_back(state)
            hit = None
        if hit is None:
            if state.asked:
                return 0
            hit = self._look_up(state, num_tokens, local, cap)
            if hit is None:
                return None if state.lookup is not None or self.waits(state) else 0
        hit.local = local
        hit.tokens = max(0, min((hit.first_chunk + hit.chunks) * self._chunk, cap) - local)
        return hit.tokens

    def ask(self, state: RequestState, num_tokens: int, local: int) -> bool | None:
        """Send the question that :meth:`match` will look for the answer to; whether it was sent.

        ``None``: there is nothing to ask for. That holds only as long as vLLM's own prefix is not shorter.
        """
        cap = (num_tokens - 1) // self._block * self._block
        if state.chain is None or not self._chunks(num_tokens, local, cap):
            return None
        if state.asked or self._breaker.is_open or self._line.places:
            # What it would be leased is for those who wait for it.
            return False
        try:
            return self._ask(state, num_tokens, local, cap)
        except MaruError as error:
            self._log.debug("maru.lookup_failed", request=state.request.request_id, reason=str(error))
            return False

    def drop(self, state: RequestState) -> None:
        """Give back what a request has asked for and not used; it waits for nothing."""
        self._take_back(state)
        self._line.leave(_id_of(state))

    def _take_back(self, state: RequestState) -> None:
        if state.lookup is not None:
            state.lookup.pending.cancel()
            state.lookup = None
            self._line.gave_back(self._clock())
        if state.hit is not None:
            self.give_back(state.hit.lease)
            state.hit = None

    def give_back(self, lease: Lease) -> None:
        """End a lease that was made here: others wait for that."""
        self._handler.release(lease)
        self._line.gave_back(self._clock())

    def waits(self, state: RequestState) -> bool:
        """Whether the request waits for what this engine will give back."""
        return _id_of(state) in self._line.places

    def remember_bad(self, key: bytes, entry: int, generation: int) -> None:
        """This object failed to load: the same bytes must not be promised to anybody again."""
        self._bad[(key, entry, generation)] = None
        while len(self._bad) > 4096:
            self._bad.pop(next(iter(self._bad)))

    def _look_up(self, state: RequestState, num_tokens: int, local: int, cap: int) -> Hit | None:
        """Advance the question, which ``state.lookup`` is as long as it is open."""
        if self._breaker.is_open and not self._is_back():
            # Nobody waits for a server that is late already.
            self.drop(state)
            if not state.passed_over:
                state.passed_over = True
                self._count("lookups_skipped")
            return None
        if state.lookup is None and self.waits(state) and not self._may_ask(state):
            return None
        # Asked when the request arrived: now it is looked for first.
        early = state.lookup is not None and not state.lookup.polled
        try:
            if state.lookup is None and not self._ask(state, num_tokens, local, cap):
                self._line.leave(_id_of(state))
                return None
            lookup = state.lookup
            assert lookup is not None
            lease = self._poll(lookup)
        except MaruError as error:
            self._log.debug("maru.lookup_failed", request=state.request.request_id, reason=str(error))
            state.lookup = None
            if early:
                # A server that restarted while the request stood in line has kept what it had.
                return self._look_up(state, num_tokens, local, cap)
            self._line.leave(_id_of(state))
            state.asked = True
            return None
        if lease is None:
            if early and lookup.pending.slices > 1:
                # It did answer. The time in line is not to be taken from the other slices.
                lookup.wait = self._new_wait()
            if not lookup.wait.is_over(self._clock()):
                return None
            # Of a long prompt the server may have answered a part in time.
            lease = lookup.pending.end()
        state.lookup = None
        if lease is None:
            self._line.leave(_id_of(state))
            state.asked = True
            self._breaker.failed()
            self._count("lookups_late")
            self._log.warning("maru.lookup_late", request=state.request.request_id, seconds=self._timeout)
            return None
        is_busy = Presence.BUSY in lease.statuses
        if early and is_busy and self._line.is_first(_id_of(state)):
            # There, but this session had leased its share for those before it, who may have given it back.
            self._handler.release(lease)
            return self._look_up(state, num_tokens, local, cap)
        chunks = self._usable(lease)
        overtakes = chunks > 0 and not lookup.in_order and not self._line.is_first(_id_of(state))
        if (is_busy or overtakes) and self._wait_in_line(state, lease):
            return None
        self._line.leave(_id_of(state))
        state.asked = True
        if chunks == 0:
            self._handler.release(lease)
            return None
        state.hit = Hit(lease, lookup.first_chunk, chunks)
        return state.hit

    def _wait_in_line(self, state: RequestState, lease: Lease) -> bool:
        """Have a request wait, without its lease; False when it is to take what there is."""
        request_id, now = _id_of(state), self._clock()
        is_new = self._line.join(request_id, now)
        if self._is_over(state, now):
            return False
        if is_new:
            self._count("lookups_busy")
        self._handler.release(lease)
        if self._line.is_first(request_id):
            self._line.refuse(now)
        else:
            # It may have been leased what the first of the line lacks. That does not count as given back: those who
            # keep coming would keep the first from finding that nothing else will be.
            self._line.ask_soon()
        return True

    def _may_ask(self, state: RequestState) -> bool:
        """Whether a request that waits in line asks again now."""
        now = self._clock()
        return self._is_over(state, now) or self._line.may_ask(_id_of(state), now)

    def _is_over(self, state: RequestState, now: float) -> bool:
        """Whether a request that waits in line has no time left to look again.

        For loads it may wait as long as one may take. What was only promised, or asked for, may wait for blocks until
        others have finished, so that is waited for as long as for an answer.
        """
        request_id = _id_of(state)
        if len(self._loads) or not self._line.is_settled(now):
            seconds = self._load_timeout or self._timeout
        elif not self._line.is_first(request_id) or self._is_leased_for_others():
            # If there is nothing to wait for, it is the first who finds that out, and may take it all.
            seconds = self._timeout
        else:
            seconds = 0.0
        return self._line.is_over(request_id, now, seconds)

    def _is_leased_for_others(self) -> bool:
        return any(state.hit or state.lookup for state in self._states.values())

    def _poll(self, lookup: Lookup) -> Lease | None:
        while True:
            slices = lookup.pending.slices
            wait = 0.0 if lookup.polled == slices and not self._idle else max(0.0, self._patience)
            lookup.polled = slices
            start = self._clock()
            lease = lookup.pending.poll(wait)
            self._patience -= self._clock() - start
            if lease is not None or lookup.pending.slices == slices or self._patience <= 0:
                return lease

    def _is_back(self) -> bool:
        """Find out now and then whether the server answers in time again, with a question that no request waits for."""
        probe, lease = self._probe, None
        if probe is not None and self._clock() >= probe.wait.deadline:
            probe.pending.cancel()  # also if it was answered: nobody knows when
            probe = None
        try:
            if probe is None and self._handler.is_up and self._breaker.take_probe():
                probe = self._submit(lambda first, end: [_NOBODYS], 0, 1)
                lease = self._poll(probe)
            elif probe is not None:
                lease = probe.pending.poll(0.0)
        except MaruError:
            probe = None
        if lease is None:
            self._probe = probe
            return False
        self._probe = None
        self._breaker.answered()
        self._log.info("maru.server_answers_again")
        return True

    def _ask(self, state: RequestState, num_tokens: int, local: int, cap: int) -> bool:
        """Send the question; False when there is nobody to ask, or no whole chunk that could help."""
        chain = state.chain
        assert chain is not None
        if not self._handler.is_up:
            return False
        chunks = self._chunks(num_tokens, local, cap)
        if not chunks:
            return False

        def keys(first: int, end: int) -> Sequence[bytes]:
            chain.extend(state.request.all_token_ids, end * self._chunk)
            return chain.object_keys(first, end)

        state.lookup = self._submit(keys, chunks.start, chunks.stop)
        state.lookup.in_order = self._line.is_first(_id_of(state))
        return True

    def _chunks(self, num_tokens: int, local: int, cap: int) -> range:
        """Whole chunks that could help."""
        if local >= cap:
            return range(0)
        return range(local // self._chunk, min(num_tokens // self._chunk, -(-cap // self._chunk)))

    def _submit(self, keys: Callable[[int, int], Sequence[bytes]], first: int, end: int) -> Lookup:
        wait = self._new_wait()
        question = Question(self._handler, keys, first, end, self._objects, self._clock)
        self._count("lookups")
        return Lookup(question, first, wait)

    def _new_wait(self) -> Wait:
        now = self._clock()
        return Wait(now + self._timeout, now)

    def _alive(self, lease: Lease) -> bool:
        return self._handler.holds(lease.epoch)

    def _usable(self, lease: Lease) -> int:
        """Chunks from the front all of whose objects are there and have not failed before."""
        count = lease.leading
        if self._bad:
            items = zip(lease.keys[:count], lease.entries, lease.generations, strict=False)
            count = next((index for index, item in enumerate(items) if item in self._bad), count)
        return count // self._objects


def _id_of(state: RequestState) -> str:
    return str(state.request.request_id)
