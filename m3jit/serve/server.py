"""Runs the application: a socket, uvicorn, and an end in good order."""
from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any, Callable, Sequence

from m3jit.api.generation import LanguageModel
from m3jit.errors import UnsupportedError, UserError, no_memory
from m3jit.serve.embeddings import Vectors
from m3jit.serve.engine import Engine
from m3jit.serve.kept import Kept
from m3jit.serve.metrics import Metrics

BACKLOG = 2048
LAST_WORDS = 2.0                                       # seconds in which clients of cancelled texts are told


def needs_libraries() -> None:
    """UnsupportedError when the extra `serve` is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        if no_memory(error):
            raise
        raise UnsupportedError(f"m3jit serve needs {error.name}: pip install 'm3jit[serve]'") from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0: a free one.  UserError: the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
        return found
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}; give another --host or --port"
                        ) from None


def _uvicorn_server(config: Any, engine: Engine | None, drain: float) -> Any:
    """uvicorn's server, but texts that are not done `drain` seconds after its end began are cancelled while their
    clients can still be told: uvicorn itself only cuts the connections."""
    import uvicorn

    class Ending(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if engine is None:
                return await super().shutdown(sockets)
            ending = asyncio.create_task(asyncio.to_thread(engine.close, drain))
            await super().shutdown(sockets)
            await asyncio.to_thread(engine.close)      # a second Ctrl-C does not wait for the texts
            await ending
    return Ending(config)


class Server:
    """A server that runs until it is stopped: by a signal when it runs in the main thread, or by `stop`."""

    def __init__(self, model: LanguageModel | None, vectors: Vectors, names: Sequence[str], *, host: str = "127.0.0.1",
                 port: int = 8080, batch: int = 16, queue: int = 64, limits: Any = None):
        needs_libraries()
        import uvicorn
        from m3jit.serve.app import Limits, application
        limits, metrics = limits or Limits(), Metrics()
        self.socket = listen(host, port)
        self.host, self.port = self.socket.getsockname()[:2]
        self.engine = Engine(model, batch, queue, metrics) if model is not None else None
        self.vectors = vectors
        self.kept = Kept(limits.kept, limits.kept_bytes)
        if self.engine is not None:
            self.engine.spare.append(self.kept.clear)
        app = application(self.engine, vectors, names, limits, metrics, self.kept)
        self._uvicorn = _uvicorn_server(uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="on", server_header=False, backlog=BACKLOG,
            timeout_graceful_shutdown=round(limits.drain + LAST_WORDS)), self.engine, limits.drain)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def run(self) -> None:
        """Serve; returns when it was stopped and every text has ended or was cancelled."""
        try:
            self._uvicorn.run(sockets=[self.socket])
        finally:
            if self.engine is not None:
                self.engine.close()
            self.socket.close()

    def start(self) -> Callable[[], None]:
        """Serve in a thread of its own; what is returned stops it and waits for its end."""
        thread = threading.Thread(target=self.run, name="m3jit server", daemon=True)
        thread.start()

        def stop() -> None:
            self._uvicorn.should_exit = True
            thread.join()
        return stop
