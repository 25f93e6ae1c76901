"""The ASGI application: routes, limits, keys, and what happens when a client goes away."""
from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, AsyncIterator, Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from m3jit.api.generated import Piece
from m3jit.api.generation import LanguageModel, Settings
from m3jit.errors import M3Error, UserError
from m3jit.serve import embeddings, requests
from m3jit.serve.engine import Busy, Engine, Stopping
from m3jit.serve.errors import ApiError
from m3jit.serve.metrics import Metrics
from m3jit.serve.replies import DONE, ChatReply, CompletionReply, Reply, event

GONE_STATUS = 499                                      # nginx's number for a client that went away; only counted


@dataclass(frozen=True)
class Limits:
    """keys: of clients, none lets everybody in.  body: bytes of a request.  drain: seconds a stop waits for texts."""
    keys: tuple[str, ...] = ()
    body: int = 4 << 20
    drain: float = 10.0


class ClientGone(Exception):
    """The client closed its connection."""


async def _until_gone(receive: Receive, then: Callable[[], None]) -> None:
    """Wait for the client to close its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


class Texts:
    """The texts of one request, from the queue to their end."""

    def __init__(self, engine: Engine, jobs: Sequence[tuple[list[int], Settings]], receive: Receive):
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._left = len(jobs)

        def deliver(index: int) -> Callable[..., None]:
            def put(*found: Any) -> None:
                try:
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, *found))
                except RuntimeError:                   # the loop has ended: nobody reads any more
                    pass
            return put
        self._tickets = engine.submit([(ids, settings, deliver(i)) for i, (ids, settings) in enumerate(jobs)])
        self._watch = loop.create_task(_until_gone(receive, lambda: self._events.put_nowait(None)))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(text, piece) as they come.  Raises ClientGone, or what ended a text."""
        while self._left:
            found = await self._events.get()
            if found is None:
                raise ClientGone
            index, pieces, error, ended = found
            if error is not None:
                raise error
            self._left -= ended
            for piece in pieces:
                yield index, piece

    def close(self) -> None:
        """Cancel what has not ended."""
        self._watch.cancel()
        for ticket in self._tickets:
            ticket.cancel()


class EventStream(Response):
    """An answer as server-sent events; the texts are cancelled as soon as the client goes away."""

    def __init__(self, texts: Texts, reply: Reply, usage: bool):
        self.texts, self.reply, self.usage = texts, reply, usage
        super().__init__(status_code=200, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._body(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError, asyncio.CancelledError):  # the last: the server ends, and the client reads nothing
            pass
        finally:
            self.texts.close()

    async def _body(self, send: Send) -> None:
        try:
            async for index, piece in self.texts.pieces():
                data = b"".join(map(event, self.reply.take(index, piece)))
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = (event(self.reply.usage_chunk()) if self.usage else b"") + DONE
        except (ApiError, M3Error) as error:           # the status is sent already: say it in the stream
            last = event(as_api_error(error).body)
        await send({"type": "http.response.body", "body": last, "more_body": True})


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, f"the server is busy: {error}; try again in {error.retry_after} s", "queue_full", None,
                        {"Retry-After": str(error.retry_after)})
    if isinstance(error, Stopping):
        return ApiError(503, f"{error}; ask another one", "server_stopping", None, {"Retry-After": "5"})
    if isinstance(error, UserError) and error.exit_code in (1, 2):
        return ApiError(400, str(error), "invalid_value")
    return ApiError(500, f"{type(error).__name__}: {error}", "internal_error")


class Service:
    """The endpoints of one model.  engine None: the model gives vectors only."""

    def __init__(self, engine: Engine | None, vectors: embeddings.Vectors, names: Sequence[str], limits: Limits,
                 metrics: Metrics):
        self._engine, self.vectors, self.metrics = engine, vectors, metrics
        self.names, self.limits = tuple(names), limits

    @property
    def engine(self) -> Engine:
        """The scheduler of texts.  ApiError 400 when the model writes none."""
        if self._engine is None:
            raise ApiError(400, f"model {self.names[0]!r} gives vectors, not text; ask /v1/embeddings",
                           "unsupported_model", "model")
        return self._engine

    @property
    def model(self) -> LanguageModel:
        return self.engine.model

    # -- generating -------------------------------------------------------------------------------------------------
    async def chat(self, request: Request) -> Response:
        asked = requests.chat_request(requests.parse(await self._body(request)))
        requests.same_model(asked.text.model, self.names)
        ids = await run_in_threadpool(self._prepare, lambda: self.model.chat_tokens(asked.messages, tools=asked.tools),
                                      asked.text.settings)
        jobs = self._jobs([ids], asked.text)
        reply = ChatReply(self.names[0], [s.seed for _, s in jobs], len(ids), asked.names)
        return await self._answer(request, jobs, reply, asked.text)

    async def complete(self, request: Request) -> Response:
        asked = requests.completion_request(requests.parse(await self._body(request)))
        requests.same_model(asked.text.model, self.names)
        prompts = [await run_in_threadpool(self._prepare, lambda p=p: self.model.prompt_tokens(p), asked.text.settings)
                   for p in asked.prompts]
        jobs = self._jobs(prompts, asked.text)
        echoes = [(p if isinstance(p, str) else self.model.decode(p)) if asked.echo else "" for p in asked.prompts
                  for _ in range(asked.text.choices)]
        reply = CompletionReply(self.names[0], [s.seed for _, s in jobs], sum(map(len, prompts)), echoes)
        return await self._answer(request, jobs, reply, asked.text)

    def _prepare(self, tokens: Callable[[], list[int]], settings: Settings) -> list[int]:
        """The prompt's token ids; whatever is wrong with the request is said before it waits."""
        ids = tokens()
        self.model.check(len(ids), settings)
        return ids

    def _jobs(self, prompts: Sequence[list[int]], asked: requests.TextRequest) -> list[tuple[list[int], Settings]]:
        """Every text has a seed of its own; a request without one gets one by chance, and is told it."""
        seed = asked.settings.seed if asked.settings.seed is not None else secrets.randbits(53)
        return [(ids, replace(asked.settings, seed=(seed + i) % 2 ** 64))
                for ids in prompts for i in range(asked.choices)]

    async def _answer(self, request: Request, jobs: Any, reply: Reply, asked: requests.TextRequest) -> Response:
        texts = Texts(self.engine, jobs, request.receive)
        if asked.stream:
            return EventStream(texts, reply, asked.usage)
        try:
            async for index, piece in texts.pieces():
                for _ in reply.take(index, piece):
                    pass
        finally:
            texts.close()
        return JSONResponse(reply.result())

    # -- vectors ----------------------------------------------------------------------------------------------------
    async def embed(self, request: Request) -> Response:
        asked = embeddings.embedding_request(requests.parse(await self._body(request)))
        requests.same_model(asked.model, self.names)
        gone = threading.Event()
        watch = asyncio.create_task(_until_gone(request.receive, gone.set))
        try:
            found = await run_in_threadpool(self.vectors.answer, asked, self.names[0], gone)
        finally:
            watch.cancel()
        if gone.is_set():
            raise ClientGone
        return JSONResponse(found)

    # -- the rest ---------------------------------------------------------------------------------------------------
    async def models(self, request: Request) -> Response:
        more = {"context_length": self._engine.model.context} if self._engine is not None else {}
        facts = [{"id": name, "object": "model", "created": 0, "owned_by": "m3jit", **more} for name in self.names]
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": facts})
        requests.same_model(name, self.names)
        return JSONResponse(facts[self.names.index(name)])

    async def health(self, request: Request) -> Response:
        active, waiting = (self._engine.active, self._engine.waiting) if self._engine is not None else (0, 0)
        return JSONResponse({"status": "ok", "active": active, "waiting": waiting})

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(self, request: Request) -> bytes:
        """The body, up to the limit."""
        size, parts = 0, []
        async for part in request.stream():
            size += len(part)
            if size > self.limits.body:
                raise ApiError(413, f"the body has more than {self.limits.body} bytes, the most this server takes",
                               "body_too_large")
            parts.append(part)
        return b"".join(parts)

    def check_key(self, request: Request) -> None:
        """ApiError 401 unless the request has one of the keys; /health needs none."""
        if not self.limits.keys or request.url.path == "/health":
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and any(hmac.compare_digest(given.strip().encode(), key.encode())
                                              for key in self.limits.keys):
            return
        what = "is not one this server knows" if given else "is missing"
        raise ApiError(401, f"the API key {what}; send it as `Authorization: Bearer KEY`", "invalid_api_key", None,
                       {"WWW-Authenticate": "Bearer"})

    def endpoint(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A handler with its key checked, its errors answered and its requests counted."""
        async def handle(request: Request) -> Response:
            try:
                self.check_key(request)
                response = await handler(request)
            except (ClientGone, ClientDisconnect):     # the second: before the whole request was here
                response = Response(status_code=GONE_STATUS)
            except asyncio.CancelledError:             # the server ends before the request was here, or its vectors
                found = as_api_error(Stopping("the server is stopping"))
                response = JSONResponse(found.body, found.status, found.headers)
            except Exception as error:
                found = as_api_error(error)
                response = JSONResponse(found.body, found.status, found.headers)
            route = request.scope.get("route")
            self.metrics.request(getattr(route, "path", request.url.path), response.status_code)
            return response
        return handle


def application(engine: Engine | None, vectors: embeddings.Vectors, names: Sequence[str], limits: Limits,
                metrics: Metrics) -> Starlette:
    """The ASGI application of a model; its end closes the engine."""
    service = Service(engine, vectors, names, limits, metrics)

    def route(path: str, handler: Callable[[Request], Any], method: str) -> Route:
        return Route(path, service.endpoint(handler), methods=[method])

    async def missing(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = "no such path" if status == 404 else f"{request.method} is not what this path takes"
        code = "not_found" if status == 404 else "method_not_allowed"
        return JSONResponse(ApiError(status, f"{request.method} {request.url.path}: {what}", code).body, status)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        if engine is not None:
            await run_in_threadpool(engine.close, limits.drain)
    return Starlette(routes=[
        route("/v1/chat/completions", service.chat, "POST"), route("/v1/completions", service.complete, "POST"),
        route("/v1/embeddings", service.embed, "POST"), route("/v1/models", service.models, "GET"),
        route("/v1/models/{name:path}", service.models, "GET"), route("/health", service.health, "GET"),
        route("/metrics", service.show_metrics, "GET")],
        exception_handlers={404: missing, 405: missing}, lifespan=lifespan)
