"""The run itself, step by step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.quickstart import document, engines
from scripts.quickstart.api import ApiError, Engine, Reply
from scripts.quickstart.engines import CHUNK_TOKENS, Place
from scripts.quickstart.processes import Child, Processes
from scripts.quickstart.progress import Failed, Progress
from scripts.quickstart.report import Check, Reuse, Row, check_answer, check_reuse, check_speed

CHUNKS = 12
#: Most tokens that may follow the last shared chunk: B has to compute these.
MOST_AFTER = 64
MAX_TOKENS = 20
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
_TAIL_LINES = 25
_SETUP_TIMEOUT = 3600.0
_START_TIMEOUT = 900.0
#: Seconds to wait at most until nobody uses the processors.
_IDLE_TIMEOUT = 10.0


class Run:
    """One quickstart. Raises Failed with what to look at."""

    def __init__(self, place: Place, processes: Processes, progress: Progress) -> None:
        self._place = place
        self._processes = processes
        self._progress = progress
        self._environment = engines.base_environment(place)

    # -- preparing -----------------------------------------------------------------------------------------------

    def environment(self, interpreter: str) -> None:
        """Make ``.venv`` unless it is up to date."""
        self._progress.step("environment: .venv with Maru and vLLM's CPU engine (minutes, the first time)")
        command = [str(self._place.root / "scripts/setup-env.sh")]
        self._finish("setup", command, dict(os.environ) | {"PYTHON": interpreter})

    def model(self) -> str:
        """Make the model unless it is there; returns its folder."""
        self._progress.step("model: SmolLM2-135M-Instruct (download and conversion, the first time)")
        output = self._finish(
            "model", [self._place.python, str(self._place.root / "scripts/prepare_model.py")], os.environ
        )
        return output.strip().splitlines()[-1]

    # -- the servers ---------------------------------------------------------------------------------------------

    def start(self, model: str) -> tuple[dict[str, Engine], dict[str, Child]]:
        """A Maru server; engines A and B on its pool and one without Maru, all serving."""
        self._progress.step("starting `maru serve` on a private folder, and vLLM without Maru, vLLM A and vLLM B")
        server = self._start("maru-serve", engines.server_command(self._place), self._environment, service=True)
        socket = self._place.runtime / "server.json"
        self._wait([server], socket.exists, 60)
        api: dict[str, Engine] = {}
        children = {"server": server}
        for name in ("plain", "A", "B"):
            port = engines.free_port()
            transfer = None if name == "plain" else engines.connector(self._place)
            command = engines.engine_command(self._place, model, port, transfer)
            child = self._start(f"vllm-{name}", command, engines.engine_environment(self._place))
            api[name], children[name] = Engine(port, engines.MODEL_NAME), child
        for name, engine in api.items():
            self._wait(list(children.values()), engine.is_ready, _START_TIMEOUT)
            self._progress.note(f"{children[name].name} serves")
        self._processes.remember_segments()
        for engine in api.values():
            # The first request of an engine pays for things that have nothing to do with its prompt.
            engine.chat("Say hello.", 4)
        return api, children

    def fit(self, plain: Engine) -> document.Prompts:
        """The document, cut for this model's tokens."""
        try:
            prompts = document.fit(plain.token_ids, CHUNK_TOKENS, CHUNKS, MOST_AFTER)
        except ValueError as error:
            raise Failed(f"the document does not fit: {error}") from error
        self._progress.note(
            f"document: {prompts.first_tokens} and {prompts.second_tokens} tokens with the questions, "
            f"{prompts.shared_tokens} of them in {CHUNKS} shared chunks"
        )
        return prompts

    # -- the requests --------------------------------------------------------------------------------------------

    def reference(self, plain: Engine, prompts: document.Prompts) -> dict[str, Reply]:
        """Answers without Maru: computed from the first token, and on vLLM's own prefix cache."""
        self._progress.step("the same requests without Maru, for comparison")
        warm_up(plain)
        replies = {"first": plain.chat(prompts.first, MAX_TOKENS)}
        replies["second, own cache"] = plain.chat(prompts.second, MAX_TOKENS)
        plain.forget()
        replies["second"] = plain.chat(prompts.second, MAX_TOKENS)
        replies["first, own cache"] = plain.chat(prompts.first, MAX_TOKENS)
        for name in ("first", "second"):
            if replies[name].cached_tokens:
                raise Failed(f"the reference for {name} took {replies[name].cached_tokens} tokens from a cache")
        return replies

    def measure(
        self, api: Mapping[str, Engine], prompts: document.Prompts, reference: Mapping[str, Reply]
    ) -> tuple[list[Row], Row, list[Check]]:
        """All rows, A's cold one, and what has to hold."""
        self._progress.step("asking A, then B")
        for name in ("A", "B"):
            warm_up(api[name])
        cold, _ = self._ask("document + question 1", "A, cold", api["A"], prompts.first, 0)
        other, other_reuse = self._ask(
            "document + question 2", "B, document from A", api["B"], prompts.second, prompts.shared_tokens
        )
        # Otherwise B's own cache, which has the document by now, would serve it and Maru would not be asked.
        api["B"].forget()
        again, again_reuse = self._ask(
            "document + question 1", "B, as asked of A", api["B"], prompts.first, prompts.shared_tokens
        )
        plain = [
            _row("document + question 1", "no Maru, cold", reference["first"], 0),
            _row("document + question 2", "no Maru, cold", reference["second"], 0),
            _row("document + question 2", "no Maru, own cache", reference["second, own cache"], 0),
        ]
        checks = [
            check_answer(cold, reference["first"].text, reference["first, own cache"].text),
            check_answer(other, reference["second"].text, reference["second, own cache"].text),
            check_answer(again, reference["first"].text, reference["first, own cache"].text),
            check_reuse(other_reuse, CHUNK_TOKENS),
            check_reuse(again_reuse, CHUNK_TOKENS),
            check_speed(other, cold),
            check_speed(again, cold),
        ]
        return [*plain, cold, other, again], cold, checks

    def _ask(self, request: str, name: str, engine: Engine, prompt: str, expected: int) -> tuple[Row, Reuse]:
        chunks_before, metric_before = self._server_hits(), engine.metric(_EXTERNAL_HITS)
        self._wait_until_idle()
        reply = engine.chat(prompt, MAX_TOKENS)
        deadline = time.monotonic() + 3
        # vLLM publishes its counters a moment after the answer.
        while (metric := int(engine.metric(_EXTERNAL_HITS) - metric_before)) != expected:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        row = _row(request, name, reply, metric)
        self._progress.note(f"{name}: {reply.ttft * 1e3:.0f} ms to the first token, {metric} tokens from Maru")
        label = f"{request} on {name}"
        return row, Reuse(label, expected, metric, self._server_hits() - chunks_before, reply.cached_tokens)

    def _wait_until_idle(self) -> None:
        """Have the processors to the engine that is asked next.

        Workers of vLLM poll for their next step, at full speed, for a second after the last one: an engine that has
        just answered takes half a core from another that is bound to the same ones.
        """
        deadline = time.monotonic() + _IDLE_TIMEOUT
        while not self._processes.are_idle():
            if time.monotonic() > deadline:
                self._progress.note("the engines keep the processors busy; the next request is measured beside that")
                return
            self._progress.tick()

    def _server_hits(self) -> int:
        status = json.loads(self._finish("maru-status", engines.status_command(self._place), self._environment))
        hits: int = status["counters"]["hits"]
        return hits

    # -- children ------------------------------------------------------------------------------------------------

    def guarded(self, children: Mapping[str, Child], call: Callable[..., Any], *arguments: Any) -> Any:
        """A call that talks to engines; an error is told with the log of the child that ended, if one did."""
        try:
            return call(*arguments)
        except ApiError as error:
            time.sleep(0.5)
            ended = next((child for child in children.values() if child.returncode() is not None), None)
            if ended is not None:
                raise self._ended(ended) from error
            raise Failed(f"{error}\nLogs: {self._place.logs}") from error

    def stop(self, child: Child) -> None:
        """End one child before the others."""
        self._processes.end(child)

    def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, service: bool = False
    ) -> Child:
        return self._processes.start(name, command, self._place.logs / f"{name}.log", environment, service=service)

    def _finish(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Run a command to its end; returns what it wrote, raises Failed when it fails."""
        log = self._place.logs / f"{name}.log"
        before = log.stat().st_size if log.exists() else 0
        child = self._start(name, command, environment)
        deadline = time.monotonic() + _SETUP_TIMEOUT
        while child.returncode() is None:
            if time.monotonic() > deadline:
                raise Failed(f"{name} did not end within {_SETUP_TIMEOUT:.0f} s\n{tail(log)}")
            self._progress.tick()
            time.sleep(0.05)
        self._processes.end(child)
        if child.returncode():
            raise self._ended(child)
        return log.read_bytes()[before:].decode(errors="replace")

    def _wait(self, children: Sequence[Child], ready: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            for child in children:
                if child.returncode() is not None:
                    raise self._ended(child)
            if time.monotonic() > deadline:
                logs = "\n".join(tail(child.log) for child in children)
                raise Failed(f"not ready within {timeout:.0f} s\n{logs}")
            self._progress.tick()
            time.sleep(0.2)

    def _ended(self, child: Child) -> Failed:
        return Failed(f"{child.name} ended with exit code {child.returncode()}\n{tail(child.log)}")


def tail(log: Path) -> str:
    """The last lines of a log, under its path."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"-- last lines of {log}", *(f"   {line}" for line in lines)])


def warm_up(engine: Engine) -> None:
    """A short question about something else: what an engine does once, at its first request, is not measured."""
    engine.chat("How many legs has a spider?", 8)


def _row(request: str, engine: str, reply: Reply, maru_tokens: int) -> Row:
    own = reply.cached_tokens - maru_tokens
    return Row(request, engine, reply.prompt_tokens, maru_tokens, own, reply.ttft, reply.text)


def about(place: Place, prompts: document.Prompts) -> dict[str, Any]:
    """Under what circumstances the figures came about."""
    facts = asdict(prompts)
    del facts["first"], facts["second"]
    return {**facts, "chunk_tokens": CHUNK_TOKENS, "max_tokens": MAX_TOKENS, "cpus": place.cpus}
