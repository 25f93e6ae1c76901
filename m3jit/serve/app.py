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
from m3jit.api.generation import LanguageModel
from m3jit.errors import M3Error, UserError
from m3jit.serve import editing, embeddings, requests
from m3jit.serve.engine import Busy, Engine, Fork, Job, Places, Stopping, Ticket, TooMany, ignore
from m3jit.serve.errors import ApiError
from m3jit.serve.kept import COUNT, MEMORY, Given, Kept
from m3jit.serve.metrics import Metrics
from m3jit.serve.replies import DONE, ChatReply, CompletionReply, Reply, event

GONE_STATUS = 499                                      # nginx's number for a client that went away; only counted


@dataclass(frozen=True)
class Limits:
    """keys: of clients, none lets everybody in.  body: bytes of a request.  drain: seconds a stop waits for texts.
    body_seconds: in which a request's body has to arrive.  kept, kept_bytes: responses that can be edited after they
    have ended, and the memory they may reach.  ending: seconds in which a text that an edit stopped has to end."""
    keys: tuple[str, ...] = ()
    body: int = 4 << 20
    drain: float = 10.0
    body_seconds: float = 30.0
    kept: int = COUNT
    kept_bytes: int = MEMORY
    ending: float = 30.0


class ClientGone(Exception):
    """The client closed its connection."""


async def _until_gone(receive: Receive, then: Callable[[], None]) -> None:
    """Wait for the client to close its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    then()


class Texts:
    """The texts of one request, from the queue to their end."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], receive: Receive, ended: Callable[[], None],
                 places: Places | None = None):
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._left, self._ended = len(jobs), ended

        def deliver(index: int) -> Callable[..., None]:
            def put(*found: Any) -> None:
                if found[-1]:
                    ended()                            # before the client knows
                try:
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, *found))
                except RuntimeError:                   # the loop has ended: nobody reads any more
                    pass
            return put
        self.tickets = engine.submit([replace(job, deliver=deliver(i)) for i, job in enumerate(jobs)], places)
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
        for ticket in self.tickets:
            ticket.cancel()
        self._ended()                                  # those that waited say nothing more


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
        except (ApiError, M3Error, Stopping) as error:  # the status is sent already: say it in the stream
            last = event(as_api_error(error).body)
        await send({"type": "http.response.body", "body": last, "more_body": True})


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(429, f"the server is busy: {error}; try again in {error.retry_after} s", "queue_full", None,
                        {"Retry-After": str(error.retry_after)})
    if isinstance(error, TooMany):
        return ApiError(400, f"n: {error}", "invalid_value", "n")
    if isinstance(error, Stopping):
        return ApiError(503, f"{error}; ask another one", "server_stopping", None, {"Retry-After": "5"})
    if isinstance(error, UserError) and error.exit_code in (1, 2):
        return ApiError(400, str(error), "invalid_value")
    return ApiError(500, f"{type(error).__name__}: {error}", "internal_error")


class Service:
    """The endpoints of one model.  engine None: the model gives vectors only."""

    def __init__(self, engine: Engine | None, vectors: embeddings.Vectors, names: Sequence[str], limits: Limits,
                 metrics: Metrics, kept: Kept):
        self._engine, self.vectors, self.metrics = engine, vectors, metrics
        self.names, self.limits, self.kept = tuple(names), limits, kept
        metrics.watch("m3jit_kept_responses", "Responses that can be edited.", lambda: len(self.kept))
        metrics.watch("m3jit_kept_bytes", "Memory that those of them that have ended reach.", lambda: self.kept.bytes)

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
                                      "messages", asked.text)
        jobs = self._jobs([ids], asked.text, request.state.owner)
        reply = ChatReply(self.names[0], _seeds(jobs), len(ids), asked.names)
        return await self._answer(request, jobs, reply, asked.text.stream, asked.text.usage)

    async def complete(self, request: Request) -> Response:
        asked = requests.completion_request(requests.parse(await self._body(request)))
        requests.same_model(asked.text.model, self.names)
        prompts = [await run_in_threadpool(self._prepare, lambda p=p: self.model.prompt_tokens(p), "prompt", asked.text)
                   for p in asked.prompts]
        jobs = self._jobs(prompts, asked.text, request.state.owner)
        echoes = [(p if isinstance(p, str) else self.model.decode(p)) if asked.echo else "" for p in asked.prompts
                  for _ in range(asked.text.choices)]
        reply = CompletionReply(self.names[0], _seeds(jobs), sum(map(len, prompts)), echoes)
        try:
            return await self._answer(request, jobs, reply, asked.text.stream, asked.text.usage)
        except TooMany as error:
            field = "n" if asked.text.choices > 1 else "prompt"
            raise ApiError(400, f"{field}: {error}", "invalid_value", field) from None

    async def edit_chat(self, request: Request) -> Response:
        return await self._edit(request, ChatReply.kind)

    async def edit_completion(self, request: Request) -> Response:
        return await self._edit(request, CompletionReply.kind)

    async def _edit(self, request: Request, kind: str) -> Response:
        """Go back to a place in a response, and on behind what is put there (m3jit.serve.editing)."""
        asked = editing.edit_request(requests.parse(await self._body(request)))
        if asked.model is not None:
            requests.same_model(asked.model, self.names)
        given = self.kept.find(request.path_params["name"], kind, request.state.owner)
        if asked.choice >= len(given.texts):
            raise ApiError(400, f"choice: {asked.choice}, but the response has {len(given.texts)}; they count from 0",
                           "invalid_value", "choice")
        original = given.texts[asked.choice]
        edit = await run_in_threadpool(editing.plan, self.model, original, asked)
        places = self.engine.replace(original, asked.alternatives)     # now that nothing can be wrong any more
        try:
            await self._until_ended(original, given.id)
            jobs = await run_in_threadpool(edit.jobs, self.model, original, asked.alternatives)
            count, seeds = len(jobs[0].ids), _seeds(jobs)
            reply = ChatReply(self.names[0], seeds, count, given.names) if kind == ChatReply.kind else \
                CompletionReply(self.names[0], seeds, count, [""] * len(jobs))
            reply.edited = {**edit.facts(self.model, given.id, asked.choice), "seeds": seeds}
            self.metrics.count("m3jit_edits_total")
            return await self._answer(request, jobs, reply, asked.stream, asked.usage, places)
        finally:
            places.free()

    async def _until_ended(self, original: Ticket, name: str) -> None:
        """Wait for a text that was stopped.  ApiError 503: it did not end in time."""
        if not await run_in_threadpool(original.done.wait, self.limits.ending):
            raise ApiError(503, f"response {name!r} was stopped for the edit, but has not ended after "
                                f"{self.limits.ending:g} s; send the same edit again in 5 s", "response_not_ended",
                           "id", {"Retry-After": "5"})

    def _prepare(self, tokens: Callable[[], list[int]], field: str, asked: requests.TextRequest) -> list[int]:
        """The token ids of a field's prompt; whatever is wrong with the request is said before it waits."""
        with requests.about(field):
            ids = tokens()
            self.model.check(len(ids), replace(asked.settings, grammar=None))
        with requests.about(asked.guide, f"{asked.guide}: "):
            self.model.check(0, asked.settings)
        return ids

    def _jobs(self, prompts: Sequence[list[int]], asked: requests.TextRequest, owner: str) -> list[Job]:
        """Every text has a seed of its own; a request without one gets one by chance, and is told it.  Texts of one
        prompt go on from one point."""
        first, n = asked.settings.seed if asked.settings.seed is not None else secrets.randbits(53), asked.choices
        seeds = [(first + i) % 2 ** 64 for i in range(n)]
        forks = [Fork() if n > 1 else None for _ in prompts]
        return [Job(ids, replace(asked.settings, seed=seed), ignore, random=(seed,), fork=fork,
                    remember=self.kept.count > 0, owner=owner) for ids, fork in zip(prompts, forks) for seed in seeds]

    async def _answer(self, request: Request, jobs: Sequence[Job], reply: Reply, stream: bool, usage: bool,
                      places: Places | None = None) -> Response:
        """What the client gets of these texts.  places: those held free for them."""
        given = Given(reply.id, reply.kind, request.state.owner, getattr(reply, "names", ()))
        texts = Texts(self.engine, jobs, request.receive, lambda: self.kept.settle(given), places)
        given.texts = texts.tickets
        reply.cached = lambda: _cached(texts.tickets)
        self.kept.add(given)
        if stream:
            return EventStream(texts, reply, usage)
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
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > self.limits.body:
                        raise ApiError(413, f"the body has more than {self.limits.body} bytes, the most this server "
                                            "takes", "body_too_large")
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body was not here {self.limits.body_seconds:g} s after the request's beginning "
                                f"({size} bytes were); send it faster", "request_timeout", None,
                           {"Connection": "close"}) from None
        return b"".join(parts)

    def check_key(self, request: Request) -> None:
        """ApiError 401 unless the request has one of the keys; /health needs none.  What is kept of texts is theirs
        alone who have the same key: `request.state.owner` says which it was."""
        request.state.owner = ""
        if not self.limits.keys or request.url.path == "/health":
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.limits.keys]
        if scheme.lower() == "bearer" and any(same):
            request.state.owner = str(same.index(True))
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


def _seeds(jobs: Sequence[Job]) -> list[int]:
    return [job.settings.seed or 0 for job in jobs]


def _cached(tickets: Sequence[Ticket]) -> int:
    """Prompt tokens that were not computed, each prompt once."""
    prompts: dict[tuple[int, ...], int] = {}
    for ticket in tickets:
        prompts.setdefault(tuple(ticket.job.ids), ticket.reused)
    return sum(prompts.values())


def application(engine: Engine | None, vectors: embeddings.Vectors, names: Sequence[str], limits: Limits,
                metrics: Metrics, kept: Kept) -> Starlette:
    """The ASGI application of a model; its end closes the engine."""
    service = Service(engine, vectors, names, limits, metrics, kept)

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
        route("/v1/chat/completions/{name}/edit", service.edit_chat, "POST"),
        route("/v1/completions/{name}/edit", service.edit_completion, "POST"),
        route("/v1/embeddings", service.embed, "POST"), route("/v1/models", service.models, "GET"),
        route("/v1/models/{name:path}", service.models, "GET"), route("/health", service.health, "GET"),
        route("/metrics", service.show_metrics, "GET")],
        exception_handlers={404: missing, 405: missing}, lifespan=lifespan)
