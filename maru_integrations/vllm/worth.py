"""Is a hit worth loading, or is it quicker to compute it again? Measured, never assumed. No I/O, the clock is given."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

#: Steps with fewer prompt tokens than this say little about the speed of prefill.
MIN_TOKENS = 64
#: How much a new measurement counts against what was measured before.
WEIGHT = 0.25
#: A speed that has not been measured for so long may have changed: then a hit is loaded, which measures it. In seconds.
STALE = 30.0
#: A load must be expected to take so many times as long as computing before it is skipped: near to equal it still
#: leaves the engine free for others.
MARGIN = 1.25


@define
class Speed:
    """A rate per second as it was measured lately, weighted towards the newest measurements."""

    clock: Callable[[], float]
    rate: float = field(default=0.0, init=False)
    _measured: float = field(default=float("-inf"), init=False)

    def measure(self, amount: float, seconds: float) -> None:
        """``amount`` took ``seconds``; ignored unless both are positive."""
        if amount <= 0 or seconds <= 0:
            return
        rate = amount / seconds
        self.rate = rate if self.is_stale else self.rate + WEIGHT * (rate - self.rate)
        self._measured = self.clock()

    @property
    def is_stale(self) -> bool:
        """Whether nothing has been measured for STALE seconds."""
        return self.clock() - self._measured > STALE


@define
class Worth:
    """Load or compute, from the speed of loads, the loads that are ahead, and the speed of prefill.

    ``token_bytes``: stored bytes of one token.
    """

    clock: Callable[[], float]
    token_bytes: int
    link: Speed = field(init=False)
    prefill: Speed = field(init=False)
    _step: tuple[int, float] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.link, self.prefill = Speed(self.clock), Speed(self.clock)

    def step_began(self, prompt_tokens: int, other_tokens: int) -> None:
        """A step was handed out that computes so many tokens of prompts and so many others."""
        counts = prompt_tokens >= MIN_TOKENS and prompt_tokens > other_tokens
        if self._step is None:
            self._step = (prompt_tokens if counts else 0, self.clock())
        else:
            # The one before is still under way: both are done at the same time, so count them as one.
            tokens, start = self._step
            self._step = (tokens + prompt_tokens if counts and tokens else 0, start)

    def step_ended(self) -> None:
        """What was handed out has been computed."""
        if self._step is not None:
            tokens, start = self._step
            self._step = None
            self.prefill.measure(tokens, self.clock() - start)

    def reason_to_compute(self, tokens: int, tokens_ahead: int) -> str | None:
        """Why ``tokens`` should not be loaded while ``tokens_ahead`` are to be loaded before; ``None``: load them.

        ``slow_link``: the load alone would take longer than computing; ``long_queue``: it would with those ahead.
        """
        if self.link.is_stale or self.prefill.is_stale:
            return None
        compute = tokens / self.prefill.rate * MARGIN
        if tokens * self.token_bytes / self.link.rate > compute:
            return "slow_link"
        if (tokens + tokens_ahead) * self.token_bytes / self.link.rate > compute:
            return "long_queue"
        return None
