"""What the benchmarks of serving engines compute from answers, without an engine."""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import no_reuse_overhead, serve_gpu, slow_server
from benchmarks.decode_interference import ASYNC, LOADED, NOT_LOADED, SYNC, gaps_of, judge
from benchmarks.delayed import delayed
from benchmarks.gpu_engines import H200, SMALL
from benchmarks.online import Answer, Ask, Run
from tests.waiting import NEVER, quickest


def answer(sent: float, *times: float, cached: int = 0, tokens: tuple[int, ...] | None = None) -> Answer:
    return Answer(sent, times, tokens or tuple(range(len(times))), cached)


def test_gaps_count_from_when_the_other_request_came_until_its_first_token() -> None:
    steady = [number * 0.01 for number in range(30)]
    stalled = [*steady, steady[-1] + 0.5, steady[-1] + 0.51, steady[-1] + 1.5]
    hit = answer(steady[-1] + 0.001, steady[-1] + 0.505)
    found = gaps_of(Run([answer(0.0, *stalled), hit], 2.0))
    assert found["longest"] == pytest.approx(500)
    assert found["steady"] == pytest.approx(10)
    assert len(found["during"]) == 2
    assert found["ttft"] == pytest.approx(504)
    assert found["stretch"] == pytest.approx(50)


def test_a_load_between_steps_has_to_stretch_gaps_less_than_one_inside() -> None:
    def bad(inside: float, between: float, nothing: float) -> list[bool]:
        def trials(stretch: float) -> list[dict[str, float]]:
            return [{"steady": steady, "longest": steady * stretch, "stretch": stretch, "ttft": 1} for steady in (1, 9)]

        found = {
            SYNC: {LOADED: trials(inside), NOT_LOADED: trials(1.5)},
            ASYNC: {LOADED: trials(between), NOT_LOADED: trials(nothing)},
        }
        return [bound.missed for bound in judge(found).bounds]

    assert bad(3.0, 1.8, 1.5) == [False, False]
    assert bad(3.0, 3.1, 3.0) == [True, False]
    assert bad(3.0, 2.0, 1.5) == [False, True]


def gpu_run(ttft: float, *, gap: float = 0.005, cached: int = H200.hit, first: int = 7) -> Run:
    times = [ttft + gap * number for number in range(32)]
    answers = [answer(0.0, *times, cached=cached, tokens=(first, *range(31))) for _ in range(8)]
    return Run(answers, 8 * times[-1])


def gpu_runs() -> dict[tuple[str, int, str], list[Run]]:
    """All within the bounds, with little to spare."""
    runs: dict[tuple[str, int, str], list[Run]] = {("none", 1, "cold"): [gpu_run(0.5, cached=0)] * 2}
    for clients, share in serve_gpu.TTFT.items():
        runs["maru", clients, "cold"] = [gpu_run(0.505, cached=0)] * 2
        runs["maru", clients, "warm"] = [gpu_run(0.1 * share - 0.001, gap=0.0050)] * 4
        runs["offload256", clients, "warm"] = [gpu_run(0.1, gap=0.0060)] * 4
        runs["lmcache-mp", clients, "warm"] = [gpu_run(0.11, gap=0.0051)] * 4
    runs["maru-b", 1, "warm"] = runs["maru", 1, "warm"]
    return runs


SEEN = {"maru": {"stored": 128, "stored_wrong": 0, "loaded": 128, "loaded_wrong": 0}}


def missed(runs: dict[tuple[str, int, str], list[Run]], seen: dict[str, dict[str, int]] | None = None) -> list[str]:
    outcome = serve_gpu.judge(runs, seen or SEEN, H200)
    return [bound.name for bound in outcome.bounds if bound.missed]


def test_a_run_within_all_bounds_misses_none() -> None:
    assert missed(gpu_runs()) == []


@pytest.mark.parametrize(
    ("engine", "clients", "phase", "run", "expected"),
    [
        ("maru", 1, "warm", gpu_run(0.081), "maru, 1 clients: TTFT / best peer"),
        ("maru", 8, "warm", gpu_run(0.061, gap=0.016), "maru, 8 clients: longest gap between tokens, s"),
        ("maru", 4, "warm", gpu_run(0.201), "maru, 4 clients: 95th percentile of TTFT, s"),
        ("maru", 4, "warm", gpu_run(0.06, cached=16), "maru, 4 clients: repeated requests that were not cached"),
        ("maru", 1, "cold", gpu_run(0.511, cached=0), "maru, 1 clients: first sending / without"),
        ("maru", 1, "warm", gpu_run(0.07, first=9), "maru, 1 clients, warm: answers other than without"),
        ("maru", 1, "cold", gpu_run(0.5, cached=0, first=9), "maru, 1 clients, cold: answers other than without"),
        ("maru-b", 1, "warm", gpu_run(0.07, first=9), "maru-b, 1 clients, warm: answers other than without"),
        ("lmcache-mp", 1, "warm", gpu_run(0.1, gap=0.0049), "maru, 1 clients: time per token / best peer"),
        ("offload256", 4, "warm", gpu_run(0.1, gap=0.003), "maru, 4 clients: tokens/s / best peer"),
    ],
)
def test_every_bound_is_missed_by_what_breaks_it(
    engine: str, clients: int, phase: str, run: Run, expected: str
) -> None:
    runs = gpu_runs()
    runs[engine, clients, phase] = [run] * len(runs[engine, clients, phase])
    assert expected in missed(runs)


def test_who_is_served_before_an_earlier_one_is_counted() -> None:
    order = [answer(0.0, first, first + 0.1) for first in (0.06, 0.14, 0.10, 0.18, 0.01)]
    assert serve_gpu.overtaken([Run(order, 1.0)] * 2, clients=4) == 2
    assert serve_gpu.overtaken([Run(order, 1.0)], clients=2) == 0
    assert serve_gpu.overtaken([Run([order[1], answer(0.0, 0.13)], 1.0)], clients=2) == 0


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"stored_wrong": 1}, "maru: objects stored that differ from pages"),
        ({"loaded_wrong": 1}, "maru: objects loaded that differ from pages"),
        ({"loaded": 0}, "maru: objects loaded and compared"),
    ],
)
def test_bytes_that_differ_or_were_not_compared_are_missed(counts: dict[str, int], expected: str) -> None:
    assert missed(gpu_runs(), {"maru": {**SEEN["maru"], **counts}}) == [expected]


def test_the_rehearsal_has_the_same_proportions() -> None:
    assert H200.kv_bytes(1) == 128 << 10
    assert set(SMALL) == set(H200.model)


def test_a_slow_server_is_judged_by_pairs_and_by_the_longest_wait() -> None:
    plain = {"tpot_ms": 10.0, "median_gap_ms": 8.0, "prompts_ms": 500.0, "ttft": [0.2, 0.3], "cached": [0, 0]}
    slow = {**plain, "tpot_ms": 10.4, "ttft": [0.2, 0.75], "resumed": 1.0}

    def bad(**more: object) -> list[str]:
        found = {slow_server.PLAIN: [plain] * 3, slow_server.SLOW: [slow, slow, {**slow, **more}]}
        return [bound.name for bound in slow_server.judge(found, 3).bounds if bound.missed]

    assert bad() == []
    assert bad(tpot_ms=30.0) == []
    assert bad(ttft=[0.2, 0.85]) == ["longest TTFT, slow server less without, s"]
    assert bad(resumed=2.1) == ["until there are hits again, s"]


def test_a_slow_server_is_compared_only_while_both_engines_compute_the_same() -> None:
    """Prompts that were cached, or computed when the other request had ended, are something else."""
    decoding = answer(0.0, *(0.1 * number for number in range(1, 21)))
    late, early = answer(0.5, 2.5), answer(0.5, 0.9)
    found = slow_server.figures_of(Run([decoding, early], 2.0))
    assert found["tpot_ms"] == pytest.approx(100.0)
    assert found["prompts_ms"] == pytest.approx(100.0)
    for others in ([early, late], [early, replace(early, cached=512)]):
        with pytest.raises(SystemExit):
            slow_server.figures_of(Run([decoding, *others], 3.0))


def test_overhead_is_judged_by_pairs_and_by_the_slowest_of_all() -> None:
    def judged(rate: float, slowest: float, long: float) -> list[bool]:
        windows = {
            no_reuse_overhead.PLAIN: [{"tokens_per_second": 100.0, "ttft": [1.0] * 20}] * 5,
            no_reuse_overhead.MARU: [{"tokens_per_second": rate, "ttft": [1.0] * 18 + [slowest] * 2}] * 5,
        }
        singles = {no_reuse_overhead.PLAIN: [2.0] * 3, no_reuse_overhead.MARU: [long] * 3}
        return [bound.missed for bound in no_reuse_overhead.judge(windows, singles).bounds]

    assert judged(97.5, 1.04, 2.03) == [False, False, False]
    assert judged(96.5, 1.06, 2.05) == [True, True, True]


def test_slow_moments_that_both_of_a_pair_meet_do_not_count() -> None:
    assert no_reuse_overhead.of_pairs([3.0, 2.0, 10.0], [2.0, 2.0, 10.0]) == 1.0


def test_requests_of_a_window_arrive_at_the_same_times_for_both_engines() -> None:
    at = no_reuse_overhead.arrivals(3, 4.0)
    assert at == no_reuse_overhead.arrivals(3, 4.0) != no_reuse_overhead.arrivals(4, 4.0)
    assert len(at) == no_reuse_overhead.REQUESTS
    assert at[0] == 0.0
    assert at == sorted(at)
    mean = sum(no_reuse_overhead.arrivals(seed, 4.0)[-1] for seed in range(200)) / 200
    assert mean == pytest.approx((no_reuse_overhead.REQUESTS - 1) / 4.0, rel=0.1)


class NoEngine:
    """Answers at once and notes when it was asked for what."""

    def __init__(self) -> None:
        self.windows: list[tuple[list[float], int | None]] = []
        self.prompts: list[tuple[int, ...]] = []

    def resume(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def run(self, asked: Sequence[Ask], clients: int | None) -> Run:
        self.windows.append(([one.at for one in asked], clients))
        self.prompts += [tuple(one.prompt) for one in asked]
        return Run([Answer(one.at, [one.at + 0.5], [1], 0) for one in asked], 4.0)

    def ask(self, prompt: Sequence[int]) -> Answer:
        self.prompts.append(tuple(prompt))
        return Answer(0.0, [1.5], [1], 0)


@pytest.mark.parametrize("clients", [None, 3])
def test_both_engines_are_asked_the_same_way_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, clients: int | None
) -> None:
    engines = {no_reuse_overhead.PLAIN: NoEngine(), no_reuse_overhead.MARU: NoEngine()}
    monkeypatch.setattr(no_reuse_overhead, "prepared_model", lambda: Path("model"))
    monkeypatch.setattr(no_reuse_overhead, "maru_server", lambda *_: nullcontext({"kv_connector_extra_config": {}}))
    monkeypatch.setattr(no_reuse_overhead, "engines_in_turn", lambda *_: nullcontext(engines))
    options = argparse.Namespace(pairs=3, prompts=2, clients=clients, settings={}, eager=True)
    outcome = no_reuse_overhead.measure(options)
    plain, maru = engines.values()
    assert plain.windows == maru.windows
    assert [count for _, count in plain.windows] == [no_reuse_overhead.CLIENTS] + [clients] * 3
    rate = no_reuse_overhead.OVERLOAD * no_reuse_overhead.REQUESTS / 4.0
    expected = [
        [0.0] * no_reuse_overhead.REQUESTS if clients else no_reuse_overhead.arrivals(n, rate) for n in (1, 2, 3)
    ]
    assert [at for at, _ in plain.windows[1:]] == expected
    prompts = plain.prompts + maru.prompts
    assert len(prompts) == len(set(prompts)) == 2 * (4 * no_reuse_overhead.REQUESTS + 3)
    assert [len(found) for found in outcome.figures["windows"].values()] == [3, 3]
    assert [len(found) for found in outcome.figures["singles"].values()] == [2, 2]


@contextmanager
def echo(path: Path) -> Iterator[None]:
    """Sends back what it gets, for one connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener.accept()[0] as peer, suppress(OSError):
            while part := peer.recv(100):
                peer.sendall(part)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(NEVER)
        listener.close()
        assert not thread.is_alive()


def test_answers_are_late_in_order_and_as_they_were(tmp_path: Path) -> None:
    with (
        echo(tmp_path / "there"),
        delayed(tmp_path / "late", tmp_path / "there") as way,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(str(tmp_path / "late"))
        client.settimeout(NEVER)

        def ask() -> None:
            client.sendall(b"one")
            assert client.recv(100) == b"one"

        for delay in (0.0, 0.3, 0.0):
            way.delay = delay
            assert (quickest(ask, 3) >= 0.3) is (delay == 0.3)
        # What is on its way is not overtaken.
        way.delay = 0.3
        client.sendall(b"first")
        time.sleep(0.1)
        way.delay = 0.0
        client.sendall(b"second")
        got = b""
        while len(got) < 11:
            got += client.recv(100)
        assert got == b"firstsecond"
        # Nor is anything quick before that has arrived.
        way.delay = 0.3
        began = time.monotonic()
        client.sendall(b"last")
        time.sleep(0.1)
        way.delay = 0.0
        way.settle()
        assert time.monotonic() - began >= 0.3
        assert client.recv(100) == b"last"


def test_without_a_server_the_connection_is_closed(tmp_path: Path) -> None:
    with delayed(tmp_path / "late", tmp_path / "nobody"), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(tmp_path / "late"))
        assert client.recv(100) == b""


def test_tokens_per_second_and_gaps_of_an_answer() -> None:
    one = answer(1.0, 2.0, 2.5, 4.0)
    assert one.ttft == 1.0
    assert one.gaps == [later - earlier for earlier, later in pairwise(one.times)]
    assert one.tpot == 1.0
    assert one.gaps_between(2.5, 3.0) == [1.5]
