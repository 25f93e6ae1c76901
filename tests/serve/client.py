"""A server in this process for tests, plain HTTP to it, and a gate for its engine."""
from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import pytest

from m3jit.api.generation import LanguageModel, load_model
from m3jit.serve.app import Limits
from m3jit.serve.embeddings import Vectors
from m3jit.serve.server import Server

TEMPLATE = "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}" \
           "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
PROMPT = "She had been a friend and companion such as few possessed: intelligent, well-informed, useful, gentle"
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Emma", "Anne"]}}, "required": ["name"],
          "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find", "visit")]
SAMPLED = {"seed": 7, "temperature": 1.0, "repeat_penalty": 1.2}


def language_model() -> LanguageModel:
    """The embedded model with a chat template."""
    return load_model("default", threads=1, chat_template=TEMPLATE)


def openai_client(server: "Running", key: str = "any") -> Any:
    """OpenAI's client of a server, which asks for everything once."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    return openai.OpenAI(base_url=server.server.url + "/v1", api_key=key, max_retries=0, timeout=180)


def chat_body(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0,
            **more}


class Running:
    """A running server; every machine it makes is watched, to see that none stays."""

    def __init__(self, model: LanguageModel | None, **options: Any):
        self.model = model
        self.server = Server(model, Vectors("default", "auto", 1, 4), ["default"], port=0, **options)
        self.engine, self.port, self.kept = self.server.engine, self.server.port, self.server.kept
        self.machines: list[weakref.ref] = []
        self.stop = self.server.start()
        if model is None:
            return
        start = model.start

        def watched(ids: Any, settings: Any, **more: Any) -> Any:
            text = start(ids, settings, **more)
            self.machines.append(weakref.ref(text.vm))
            return text
        self.engine.model = _With(model, start=watched)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, data = self.request("POST", path, body, **headers)
        return status, json.loads(data)

    def text(self, **body: Any) -> str:
        """The text of a plain completion."""
        status, found = self.post(PLAIN, {"model": "default", "prompt": "She had been", "max_tokens": 16, **body})
        assert status == 200, found
        return found["choices"][0]["text"]

    def open_stream(self, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A streaming request; its first event has not been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
        return connection, connection.getresponse()

    def idle(self) -> bool:
        return self.engine.active == self.engine.waiting == 0

    def nothing_left(self) -> bool:
        """No text is generated or waits, and no machine is held by anybody."""
        if not self.idle():
            return False
        gc.collect()
        return not any(machine() is not None for machine in self.machines)

    @property
    def made(self) -> int:
        """Tokens generated so far."""
        return self.engine.metrics._counters["m3jit_generated_tokens_total"][1]

    def metric(self, name: str) -> float:
        """The value of a line of /metrics."""
        text = self.request("GET", "/metrics")[2].decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


class _With:
    """An object with some attributes replaced."""

    def __init__(self, inner: Any, **replaced: Any):
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def wait_for(condition: Callable[[], bool], seconds: float = 180.0) -> bool:
    """Whether it comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@contextmanager
def running(model: LanguageModel | None, *, keys: tuple[str, ...] = (), body: int = 1 << 20, drain: float = 30.0,
            limits: Limits | None = None, **options: Any) -> Iterator[Running]:
    found = Running(model, limits=limits or Limits(keys, body, drain), **options)
    try:
        yield found
    finally:
        if hasattr(found.engine, "gate"):
            found.engine.gate.release()
        found.stop()


class Gate:
    """Lets an engine make rounds only when told to; texts join and are handed over meanwhile."""

    def __init__(self, engine: Any):
        self.engine, self.permits, self.open = engine, threading.Semaphore(0), False
        step = engine._batch.step

        def gated() -> bool:
            return (self.open or self.permits.acquire(timeout=0.005)) and step()
        engine._batch.step = gated
        engine.gate = self

    def rounds(self, n: int) -> None:
        """Allow so many more."""
        self.permits.release(n)

    def one_more(self) -> None:
        """Allow one, unless one is allowed already."""
        if not self.permits._value:
            self.permits.release()

    def release(self) -> None:
        """Allow all."""
        self.open = True


def half_a_request(port: int) -> socket.socket:
    """A plain completion whose body stops in the middle."""
    found = socket.create_connection(("127.0.0.1", port), 180)
    found.sendall(f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    return found


def events(data: bytes) -> list[Any]:
    """What a stream said."""
    lines = [line for line in data.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else None for line in lines]


def ask(server: Running, **body: Any) -> Any:
    """A completion of PROMPT; `body` is added to what is asked for."""
    status, found = server.post(PLAIN, {"model": "default", "prompt": PROMPT, "max_tokens": 30, **SAMPLED, **body})
    assert status == 200, found
    return found
