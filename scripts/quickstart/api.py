"""The part of vLLM's HTTP interface that the quickstart uses."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Seconds for one request; a cold prompt on a slow and busy processor included.
_TIMEOUT = 600.0
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})? (?P<value>\S+)$", re.MULTILINE)


class ApiError(Exception):
    """The engine refused a request, or is gone."""


@dataclass(frozen=True)
class Reply:
    """A streamed answer. ``ttft`` and ``total`` in seconds."""

    text: str
    ttft: float
    total: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Engine:
    """An OpenAI-compatible vLLM server on this host."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        try:
            self._request("GET", "/health", timeout=5)
        except ApiError:
            return False
        return True

    def token_ids(self, prompt: str) -> list[int]:
        """The tokens that :meth:`chat` has the engine compute."""
        body = {"model": self._model, "messages": _messages(prompt)}
        tokens: list[int] = json.loads(self._request("POST", "/tokenize", body))["tokens"]
        return tokens

    def chat(self, prompt: str, max_tokens: int) -> Reply:
        """Ask, greedily, and read the answer as it comes."""
        body = {
            "model": self._model,
            "messages": _messages(prompt),
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT)
        try:
            start = time.perf_counter()
            response = self._send(connection, "POST", "/v1/chat/completions", body)
            text, ttft, usage = "", None, None
            for event in _events(response):
                if "error" in event:
                    raise ApiError(f"/v1/chat/completions: {event['error']}")
                usage = event.get("usage") or usage
                piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if piece and ttft is None:
                    ttft = time.perf_counter() - start
                text += piece
            total = time.perf_counter() - start
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"/v1/chat/completions: {error!r}") from error
        finally:
            connection.close()
        if ttft is None or usage is None:
            raise ApiError("/v1/chat/completions: the stream ended without a token or without usage")
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            text=text,
            ttft=ttft,
            total=total,
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )

    def forget(self) -> None:
        """Empty the engine's own prefix cache; what a connector holds stays."""
        for _ in range(50):
            if json.loads(self._request("POST", "/reset_prefix_cache")).get("success"):
                return
            # The last request's blocks are given back a moment after its answer.
            time.sleep(0.1)
        raise ApiError("/reset_prefix_cache: the engine did not empty its own cache within 5 s")

    def metric(self, name: str) -> float:
        """Sum of a Prometheus counter or gauge over its labels; raises ApiError when there is none."""
        values = [float(found["value"]) for found in _SAMPLE.finditer(self._request("GET", "/metrics").decode())
                  if found["name"] == name]  # fmt: skip
        if not values:
            raise ApiError(f"/metrics has no {name}")
        return sum(values)

    def _request(self, method: str, path: str, body: object = None, timeout: float = _TIMEOUT) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            return self._send(connection, method, path, body).read()
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{path}: {error!r}") from error
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        if response.status != 200:
            raise ApiError(f"{path}: status {response.status}: {response.read(500).decode(errors='replace')}")
        return response


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.decode().strip()
        if data == "data: [DONE]":
            return
        if data.startswith("data: "):
            yield json.loads(data.removeprefix("data: "))
    raise ApiError("/v1/chat/completions: the stream broke off")
