"""Made-up loads of many shapes for :mod:`evict`: seeded, so that every run replays the same requests.

A load is a list of requests: when each comes, in seconds, and the parts of its prompt, each standing for 512 tokens.
What two prompts have in common at their heads, a pool may serve from the same objects. What is learned was not
fitted to them; the guard's share of what is at risk was chosen after a look at four, which docs/eviction.md names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from random import Random

Request = tuple[float, list[Hashable]]


def chats(
    seed: int,
    conversations: int,
    pause: float = 60.0,
    goes_on: float = 0.7,
    spread: float = 0.8,
    prompt: tuple[int, int] = (4, 24),
    systems: int = 1,
    system: int = 4,
    every: float = 1.0,
) -> list[Request]:
    """Conversations that begin every ``every`` seconds, each behind one of ``systems`` system prompts.

    After each turn the next follows with the chance ``goes_on``, about ``pause`` seconds later.
    """
    draw = Random(seed)
    requests: list[Request] = []
    for number in range(conversations):
        now = number * every
        # The first system prompt is the most popular by far.
        which = min(systems - 1, int(draw.paretovariate(1.1)) - 1)
        parts: list[Hashable] = [("system", seed, which, at) for at in range(system)]
        parts += [("prompt", seed, number, at) for at in range(draw.randint(*prompt))]
        while True:
            requests.append((now, list(parts)))
            if draw.random() >= goes_on:
                break
            now += pause * draw.lognormvariate(0.0, spread)
            parts += [("turn", seed, number, len(parts) + at) for at in range(draw.randint(1, 3))]
    return requests


def documents(
    seed: int, requests: int, many: int, power: float, lengths: tuple[int, int] = (4, 40), drift: float = 0.0
) -> list[Request]:
    """Questions about ``many`` documents whose popularity follows Zipf's law with the exponent ``power``.

    ``drift``: by how many ranks per request popularity moves on.
    """
    draw = Random(seed)
    sizes = [draw.randint(*lengths) for _ in range(many)]
    weights = list(accumulate((rank + 1) ** -power for rank in range(many)))
    found: list[Request] = []
    for number in range(requests):
        rank = draw.choices(range(many), cum_weights=weights)[0]
        document = (rank + int(number * drift)) % many
        parts: list[Hashable] = [("document", seed, document, at) for at in range(sizes[document])]
        found.append((number * 0.5, [*parts, ("question", seed, number)]))
    return found


def one_shots(seed: int, requests: int, every: float = 0.5, length: tuple[int, int] = (4, 20)) -> list[Request]:
    """Prompts that nobody sends twice."""
    draw = Random(seed)
    return [
        (number * every, [("once", seed, number, at) for at in range(draw.randint(*length))])
        for number in range(requests)
    ]


def loop(documents: int, rounds: int, length: int = 10, every: float = 0.5) -> list[Request]:
    """The same documents in the same order again and again."""
    return [
        (number * every, [("loop", number % documents, at) for at in range(length)])
        for number in range(rounds * documents)
    ]


def bursts(seed: int, every: float, requests: int, times: int) -> list[Request]:
    """``times`` bursts of prompts that nobody sends twice, ten a second."""
    found: list[Request] = []
    for burst in range(times):
        found += shifted(one_shots(seed + burst, requests, every=0.1), burst * every)
    return found


def agents(seed: int, sessions: int, pause: float = 5.0, away: float = 0.05, branches: float = 0.0) -> list[Request]:
    """Agents that call tools in quick succession, and now and then wait for a person who may not come back.

    ``branches``: the chance that a step starts a helper of its own behind what was said so far.
    """
    draw = Random(seed)
    found: list[Request] = []
    for number in range(sessions):
        now = draw.uniform(0, 3600)
        parts: list[Hashable] = [("tools", seed, at) for at in range(6)]
        parts += [("task", seed, number, at) for at in range(draw.randint(2, 20))]
        for step in range(draw.randint(4, 60)):
            found.append((now, list(parts)))
            if draw.random() < branches:
                helper = list(parts)
                for turn in range(draw.randint(1, 6)):
                    helper += [("helper", seed, number, step, turn, at) for at in range(2)]
                    found.append((now + 1.0 + turn, list(helper)))
            if draw.random() < away:
                if draw.random() < 0.4:
                    break
                now += draw.uniform(120, 900)
            now += pause * draw.uniform(0.3, 2.0)
            parts += [("step", seed, number, len(parts) + at) for at in range(draw.randint(1, 4))]
    return found


def retrieval(seed: int, requests: int, passages: int) -> list[Request]:
    """A system prompt and four passages out of many, in the order in which they were found."""
    draw = Random(seed)
    found: list[Request] = []
    for number in range(requests):
        parts: list[Hashable] = [("system", seed, at) for at in range(3)]
        for _ in range(4):
            passage = min(passages, int(draw.paretovariate(0.7)))
            parts += [("passage", seed, passage, at) for at in range(2)]
        found.append((number * 0.4, [*parts, ("question", seed, number)]))
    return found


def samples(seed: int, prompts: int, times: int) -> list[Request]:
    """Each prompt is sent ``times`` times within seconds, for several answers, and never again."""
    draw = Random(seed)
    found: list[Request] = []
    for number in range(prompts):
        parts: list[Hashable] = [("sampled", seed, number, at) for at in range(draw.randint(6, 30))]
        found += [(number * 1.5 + draw.uniform(0, 8), list(parts)) for _ in range(times)]
    return found


def periodic(seed: int, documents: int, period: float, times: int) -> list[Request]:
    """A job that reads the same documents once per period, in another order each time."""
    draw = Random(seed)
    found: list[Request] = []
    for turn in range(times):
        order = list(range(documents))
        draw.shuffle(order)
        found += [
            (turn * period + at * 0.2, [("job", seed, document, part) for part in range(12)])
            for at, document in enumerate(order)
        ]
    return found


def shifted(requests: Sequence[Request], seconds: float) -> list[Request]:
    """The same, later."""
    return [(now + seconds, parts) for now, parts in requests]


def reversed_in_time(requests: Sequence[Request]) -> list[Request]:
    """The last request first: what was learned about conversations is wrong there."""
    end = max(now for now, _ in requests)
    return [(end - now, parts) for now, parts in requests]


def one_after_the_other(*loads: Sequence[Request]) -> list[Request]:
    """Each load begins a second after the last request of the one before."""
    found: list[Request] = []
    end = 0.0
    for load in loads:
        found += shifted(load, end)
        end = max(now for now, _ in found) + 1.0
    return found


def _turncoat() -> list[Request]:
    """Who pauses comes back at first; later who pauses never does, and who is quick comes late."""
    return one_after_the_other(
        [request for request in chats(61, 900, 40.0, 0.9) if request[0] < 900],
        chats(62, 1500, 300.0, 0.3, spread=0.1),
    )


LOADS: dict[str, Callable[[], list[Request]]] = {
    "chat, pauses of a minute": lambda: chats(1, 1500, 60.0),
    "chat, pauses of ten seconds": lambda: chats(2, 1500, 10.0, 0.8),
    "chat, pauses of five minutes": lambda: chats(3, 1500, 300.0, 0.75),
    "chat, pauses of seconds to hours": lambda: chats(4, 1500, 60.0, 0.75, spread=2.0),
    "chat, long turns only": lambda: chats(5, 600, 45.0, 0.9, prompt=(20, 60)),
    "two hundred system prompts": lambda: chats(6, 3000, 60.0, 0.3, prompt=(1, 6), systems=200, system=12),
    "documents by Zipf's law, 0.7": lambda: documents(11, 5000, 1500, 0.7),
    "documents by Zipf's law, 1.0": lambda: documents(12, 5000, 1500, 1.0),
    "documents, uniform": lambda: documents(13, 5000, 600, 0.0),
    "documents, popularity drifts": lambda: documents(14, 5000, 1500, 1.0, drift=0.2),
    "one-shots": lambda: one_shots(21, 4000),
    "loop": lambda: loop(150, 30),
    "long loop": lambda: loop(1200, 4),
    "loop and one-shots": lambda: loop(80, 40) + one_shots(22, 3000),
    "chat and bursts of one-shots": lambda: chats(23, 1200, 60.0) + bursts(2300, 300.0, 400, 5),
    "agents": lambda: agents(31, 120),
    "agents that branch": lambda: agents(32, 80, branches=0.1),
    "retrieval": lambda: retrieval(41, 5000, 3000),
    "samples": lambda: samples(42, 900, 6),
    "nightly job": lambda: periodic(43, 400, 600.0, 8),
    "chat and a job": lambda: chats(44, 1200, 60.0) + periodic(45, 150, 240.0, 6),
    "chat, then one-shots": lambda: one_after_the_other(chats(51, 1000, 60.0), one_shots(52, 3000)),
    "one-shots, then a loop, then chat": lambda: one_after_the_other(
        one_shots(53, 2000), loop(150, 15), chats(54, 800)
    ),
    "agents, then chat, then agents": lambda: one_after_the_other(agents(55, 50), chats(56, 800, 90.0), agents(57, 50)),
    "chat whose pauses change meaning": _turncoat,
    "agents, reversed in time": lambda: reversed_in_time(agents(31, 120)),
    "chat, reversed in time": lambda: reversed_in_time(chats(1, 1500, 60.0)),
}
