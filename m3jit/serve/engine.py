"""The scheduler of a server: one thread that runs all texts of a model together.

Requests wait in a bounded queue; at most `batch` texts are generated at once, a round (`m3jit.Batch.step`) moves each
of them by a token or by a chunk of its prompt, and texts join and leave between rounds.  What a text says does not
depend on the others.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Callable, Sequence

from m3jit.api.generated import GeneratedText, Piece
from m3jit.api.generation import LanguageModel, Settings
from m3jit.serve.metrics import Metrics
from m3jit.vm.batch import Batch, Member

QUEUED, ACTIVE, ENDED = "queued", "active", "ended"
Deliver = Callable[[list[Piece], "BaseException | None", bool], None]


class Busy(Exception):
    """The queue is full.  retry_after: seconds after which there may be room."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already")
        self.waiting, self.retry_after = waiting, retry_after


class Stopping(Exception):
    """The engine takes no more texts."""


class Ticket:
    """A text's place in the engine.  `deliver(pieces, error, ended)` is called from the engine's thread."""

    def __init__(self, engine: "Engine", ids: Sequence[int], settings: Settings, deliver: Deliver):
        self.engine, self.ids, self.settings, self.deliver = engine, ids, settings, deliver
        self.state, self.cancelled = QUEUED, False
        self.text: GeneratedText | None = None
        self.member: Member | None = None
        self.arrived, self.latest = time.monotonic(), 0.0

    def cancel(self) -> None:
        """Nobody wants the text any more; from any thread, more than once."""
        self.engine.cancel(self)


class Engine:
    """Runs texts of one model.  batch: texts at once; queue: texts that may wait besides."""

    def __init__(self, model: LanguageModel, batch: int = 16, queue: int = 64, metrics: Metrics | None = None):
        self.model, self.limit, self.room, self.metrics = model, batch, queue, metrics or Metrics()
        self._batch = Batch()
        self._waiting: deque[Ticket] = deque()
        self._active: list[Ticket] = []
        self._lock = threading.Condition()
        self._closing = False
        self._seconds = 1.0                            # of a text, smoothed: for Retry-After
        self.metrics.gauge("m3jit_queue_length", "Texts that wait.", lambda: len(self._waiting))
        self.metrics.gauge("m3jit_active_texts", "Texts that are being generated.", lambda: len(self._active))
        self._thread = threading.Thread(target=self._run, name="m3jit engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    # -- from any thread --------------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[tuple[Sequence[int], Settings, Deliver]]) -> list[Ticket]:
        """Queue texts, all or none of them.  Raises Busy or Stopping."""
        with self._lock:
            if self._closing:
                raise Stopping("the server is stopping")
            free = self.limit - len(self._active)
            if len(self._waiting) + len(jobs) > self.room + max(0, free):
                self.metrics.count("m3jit_rejected_total")
                rounds = (len(self._waiting) + self.limit) / self.limit
                raise Busy(len(self._waiting), min(60, max(1, round(rounds * self._seconds))))
            tickets = [Ticket(self, *job) for job in jobs]
            self._waiting.extend(tickets)
            self._lock.notify()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """See `Ticket.cancel`."""
        with self._lock:
            if ticket.state == ENDED or ticket.cancelled:
                return
            ticket.cancelled = True
            if ticket.state == QUEUED:
                self._waiting.remove(ticket)
                ticket.state = ENDED
                self.metrics.count("m3jit_cancelled_total")
            elif ticket.member is not None:
                ticket.member.cancel()

    def close(self, seconds: float = 0.0) -> None:
        """Take no more texts; wait so long for those that are there, then cancel them."""
        end = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            self._lock.notify()
        while (self._waiting or self._active) and time.monotonic() < end:
            time.sleep(0.01)
        with self._lock:
            left = [*self._waiting, *self._active]
        for ticket in left:
            ticket.cancel()
        self._thread.join()

    # -- the engine's thread ----------------------------------------------------------------------------------------
    def _run(self) -> None:
        while self._admit():
            if not self._active:
                continue
            self.metrics.observe("m3jit_batch_size", len(self._active))
            try:
                if not self._batch.step():
                    self._batch.wait(0.05)
            except Exception as error:                 # of the batch itself: its texts are lost, the server goes on
                self._fail(error)
            for ticket in list(self._active):
                self._hand_over(ticket)

    def _fail(self, error: Exception) -> None:
        """End all texts with an error and begin with an empty batch."""
        for ticket in list(self._active):
            if ticket.member is not None:
                ticket.member.cancel()
            self._end(ticket, [], error)
        self._batch = Batch()

    def _admit(self) -> bool:
        """Start texts while there is room, sleeping while there is nothing to do; False when the engine has ended."""
        with self._lock:
            while not self._waiting and not self._active:
                if self._closing:
                    return False
                self._lock.wait()
            new = []
            while self._waiting and len(self._active) < self.limit:
                ticket = self._waiting.popleft()
                ticket.state = ACTIVE
                self._active.append(ticket)
                new.append(ticket)
        for ticket in new:
            self._start(ticket)
        return True

    def _start(self, ticket: Ticket) -> None:
        try:
            text = self.model.start(ticket.ids, ticket.settings)
        except BaseException as error:                 # of this text alone
            self._end(ticket, [], error)
            return
        text.vm.set_sink("TOKENS", text.take_token)
        self.metrics.observe("m3jit_queue_seconds", time.monotonic() - ticket.arrived)
        self.metrics.count("m3jit_prompt_tokens_total", len(ticket.ids))
        with self._lock:
            ticket.text, ticket.member = text, self._batch.add(text.vm)
            if ticket.cancelled:                       # since it left the queue
                ticket.member.cancel()

    def _hand_over(self, ticket: Ticket) -> None:
        text, member = ticket.text, ticket.member
        if text is None or member is None:
            return
        ended = member.ended
        if ended:
            text.finish(member.error)
        pieces = list(text.ready)
        text.ready.clear()
        if pieces:
            self._measure(ticket, sum(len(p.tokens) for p in pieces))
        if ended:
            self._end(ticket, pieces, text.error)
        elif pieces and not ticket.cancelled:
            ticket.deliver(pieces, None, False)

    def _measure(self, ticket: Ticket, tokens: int) -> None:
        now = time.monotonic()
        if not tokens:
            return
        self.metrics.count("m3jit_generated_tokens_total", tokens)
        if not ticket.latest:
            self.metrics.observe("m3jit_first_token_seconds", now - ticket.arrived)
        else:
            self.metrics.observe("m3jit_token_seconds", now - ticket.latest)
        ticket.latest = now

    def _end(self, ticket: Ticket, pieces: list[Piece], error: BaseException | None) -> None:
        seconds = time.monotonic() - ticket.arrived
        with self._lock:
            self._active.remove(ticket)
            ticket.state = ENDED
            ticket.text = ticket.member = None         # the machine goes, with all it holds
            self._seconds += 0.2 * (seconds - self._seconds)
        self.metrics.count("m3jit_texts_total")
        self.metrics.observe("m3jit_request_seconds", seconds)
        if ticket.cancelled:
            self.metrics.count("m3jit_cancelled_total")
        ticket.deliver(pieces, error, True)

    @property
    def batch_stats(self) -> dict[str, Any]:
        """Counters of the batch: rounds, entries, shared entries."""
        return self._batch.stats
