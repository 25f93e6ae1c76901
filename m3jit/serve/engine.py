"""The scheduler of a server: one thread that runs all texts of a model together.

Requests wait in a bounded queue; at most `batch` texts are generated at once, a round (`m3jit.Batch.step`) moves each
of them by a token or by a chunk of its prompt, and texts join and leave between rounds.  What a text says does not
depend on the others.

Texts that begin with one prompt (the alternatives of a request) share a `Fork`: the first computes the prompt, the
others wait for it in the queue and begin behind it.  Where there is a prefix index, a text also waits while another one
computes a long beginning of its prompt, which the index then has.
"""
from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Callable, Sequence

import numpy as np

from m3jit.api.checkpoints import NOTHING, Checkpoint, thinned
from m3jit.api.generated import FinishReason, GeneratedText, Piece
from m3jit.api.generation import PENALISED, LanguageModel, Settings
from m3jit.api.prefixes import begin_behind
from m3jit.errors import Trap
from m3jit.models.prefix_index import common
from m3jit.models.program import CHUNK
from m3jit.serve.metrics import Metrics
from m3jit.vm.batch import Batch, Member

QUEUED, ACTIVE, ENDED = "queued", "active", "ended"
EDITED: FinishReason = "edited"                        # why a text ended that an edit took the place of
SHARED = 128                                           # tokens of two prompts for which one waits for the other
REMEMBERED = 16                                        # states of one text, for edits
INDEX_METRICS = (("searches", "Prompts looked up in the prefix index.", "counter"),
                 ("hits", "Prompts that began with known tokens.", "counter"),
                 ("dropped", "States that the prefix index dropped for their memory.", "counter"),
                 ("versions", "States in the prefix index.", "gauge"),
                 ("bytes", "Memory that states in the prefix index reach.", "gauge"))
Deliver = Callable[[list[Piece], "BaseException | None", bool], None]


class Busy(Exception):
    """The queue is full.  retry_after: seconds after which there may be room."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} requests are waiting already")
        self.waiting, self.retry_after = waiting, retry_after


class TooMany(Exception):
    """A request for more texts than there are places, however long it waited."""

    def __init__(self, count: int, batch: int, queue: int):
        super().__init__(f"{count} texts in one request, but this server has {batch + queue} places (--batch {batch} "
                         f"and --queue {queue}); ask for {batch + queue} at most")


class Stopping(Exception):
    """The engine takes no more texts."""


class Fork:
    """The point where texts with one prompt part.  known: the states there, when they are computed; computing: the text
    that does it."""

    def __init__(self) -> None:
        self.known: Checkpoint | None = None
        self.computing: Ticket | None = None

    def open_to(self, ticket: "Ticket") -> bool:
        """Whether a text need not wait for the one that computes the prompt."""
        return self.known is not None or self.computing in (None, ticket)


@dataclass(frozen=True)
class Job:
    """A text to generate.  deliver(pieces, error, ended) is called from the engine's thread.

    written: so many of the last ids are the beginning of the text itself; random: the random stream at its beginning
    and behind each of these.  known: states behind the first of the ids, in place of the model's index.  remember:
    collect the text's states in `Ticket.checkpoints`, from the text's beginning, behind those that are `remembered`
    already.  owner: states in the index serve texts of the same owner alone."""
    ids: Sequence[int]
    settings: Settings
    deliver: Deliver
    written: int = 0
    random: tuple[int, ...] = ()
    known: Checkpoint | None = None
    fork: Fork | None = None
    remember: bool = False
    remembered: tuple[Checkpoint, ...] = ()
    owner: str = ""


class Ticket:
    """A text's place in the engine, and what has come of it.

    tokens, random: what was generated, and the random stream behind each token.  reused: tokens of the prompt that were
    not computed.  done: set when it has ended.  stopped: it was ended for the sake of an edit.  relieved: memory was
    made for it."""

    def __init__(self, engine: "Engine", job: Job):
        self.engine, self.job = engine, job
        self.state, self.cancelled, self.stopped = QUEUED, False, False
        self.text: GeneratedText | None = None
        self.member: Member | None = None
        self.alone: Batch | None = None                # its own, since a round of the common one failed
        self.tokens: list[int] = []
        self.random: list[int] = []
        self.checkpoints: list[Checkpoint] = list(job.remembered)
        self.ids = np.array(job.ids, np.int64)
        self.reused, self.done, self.relieved = 0, threading.Event(), False
        self.finish_reason: FinishReason | None = None
        self.ended_at: int | None = None               # characters in front of the stop string that ended it
        self.arrived, self.latest = time.monotonic(), 0.0

    def cancel(self) -> None:
        """Nobody wants the text any more; from any thread, more than once."""
        self.engine.cancel(self)

    def stop(self) -> None:
        """End it where it is, with finish reason "edited"; from any thread, more than once."""
        self.engine.stop(self)

    @property
    def unwanted(self) -> bool:
        return self.cancelled or self.stopped

    def keep(self, tokens: Sequence[int], found: Checkpoint) -> None:
        """The text's states behind the first of its tokens (`m3jit.api.prefixes.Keeper`)."""
        job = self.job
        if job.fork is not None and found.rows == len(job.ids) and found.logits is not None:
            job.fork.known = job.fork.known or found
        if job.remember and found.rows >= len(job.ids) - job.written:
            self.checkpoints = thinned([*self.checkpoints, found], REMEMBERED)


class Places:
    """Places that an engine holds free for texts that are to come (`Engine.replace`)."""

    def __init__(self, engine: "Engine", count: int):
        self._engine, self.count = engine, count

    def free(self) -> None:
        """Others may have them; more than once."""
        with self._engine._lock:
            self._engine._promised -= self.count
            self.count = 0


class Engine:
    """Runs texts of one model.  batch: texts at once; queue: texts that may wait besides."""

    def __init__(self, model: LanguageModel, batch: int = 16, queue: int = 64, metrics: Metrics | None = None):
        self.model, self.limit, self.room, self.metrics = model, batch, queue, metrics or Metrics()
        self._batch = Batch()
        self._waiting: deque[Ticket] = deque()
        self._active: list[Ticket] = []
        self._lock = threading.Condition()
        self._promised = 0                             # places of texts that are to come
        self._closing = False
        self._warming = Batch()
        self._warmer: threading.Thread | None = None
        # What can make room when a text finds no memory; each gives the bytes it freed.
        self.spare: list[Callable[[], int]] = [] if model.prefixes is None else [model.prefixes.clear]
        self._seconds = 1.0                            # of a text, smoothed: for Retry-After
        self._show()
        self._thread = threading.Thread(target=self._run, name="m3jit engine", daemon=True)
        self._thread.start()

    def _show(self) -> None:
        """Put what is counted elsewhere into the metrics."""
        watch, index = self.metrics.watch, self.model.prefixes
        watch("m3jit_queue_length", "Texts that wait.", lambda: len(self._waiting))
        watch("m3jit_active_texts", "Texts that are being generated.", lambda: len(self._active))
        if index is not None:
            for name, text, kind in INDEX_METRICS:
                watch(f"m3jit_prefix_{name}" + "_total" * (kind == "counter"), text,
                      lambda name=name: index.stats[name], kind)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    def warm(self) -> None:
        """Compile in a thread of its own what texts need, so that the first ones do not wait for it, and none waits for
        one with a repetition penalty, which has a program of its own."""
        self._warmer = threading.Thread(target=self._warm, name="m3jit warm-up", daemon=True)
        self._warmer.start()

    def _warm(self) -> None:
        longest = min(self.model.limit or self.model.context, self.model.context)
        for penalty in (1.0, PENALISED):
            known: list[Checkpoint] = []
            # Two together are compiled once more; so are a last token alone behind chunks, one token alone, and a
            # prompt of which everything is known.
            for ids, texts in (([0, 1, 2], 2), ([0] * (CHUNK + 1), 1), ([0], 1), ([0, 1, 2], 1)):
                if longest < len(ids) + 3:
                    continue
                for seed in range(texts):
                    text = self.model.start(ids, Settings(max_tokens=3, seed=seed, repeat_penalty=penalty),
                                            known=NOTHING, keep=lambda _, found: known.append(found))
                    if texts == 1 and known and known[0].rows == len(ids):
                        begin_behind(text.vm, known[0], len(ids))
                    text.vm.set_sink("TOKENS", text.take_token)
                    with self._lock:
                        if self._closing:
                            return
                        self._warming.add(text.vm)
                self._warming.run()

    # -- from any thread --------------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job], places: Places | None = None) -> list[Ticket]:
        """Queue texts, all or none of them; places: those held free for them.  Raises Busy, TooMany or Stopping."""
        with self._lock:
            if self._closing:
                raise Stopping("the server is stopping")
            if places is not None and places.count >= len(jobs):
                places.free()
            else:
                self._check(len(jobs))
            tickets = [Ticket(self, job) for job in jobs]
            self._waiting.extend(tickets)
            self._lock.notify()
        return tickets

    def _check(self, count: int, leaving: int = 0) -> None:
        """Raise TooMany or Busy unless there are so many places, with those of texts that are leaving."""
        if count > self.limit + self.room:
            raise TooMany(count, self.limit, self.room)
        taken = len(self._waiting) + len(self._active) + self._promised - leaving
        if taken + count > self.limit + self.room:
            self.metrics.count("m3jit_rejected_total")
            rounds = (len(self._waiting) + self.limit) / self.limit
            raise Busy(len(self._waiting), min(60, max(1, round(rounds * self._seconds))))

    def replace(self, ticket: Ticket, count: int) -> Places:
        """Stop a text, if it has not ended, and hold places free for so many others; its own is one of them.  Raises
        Busy, TooMany or Stopping, and then the text goes on."""
        with self._lock:
            if self._closing:
                raise Stopping("the server is stopping")
            self._check(count, int(ticket.state != ENDED and not ticket.stopped))
            self._promised += count
            places = Places(self, count)
            waited = self._stop(ticket)
        if waited:
            self._say_stopped(ticket)
        return places

    def cancel(self, ticket: Ticket) -> None:
        """See `Ticket.cancel`."""
        with self._lock:
            if ticket.state == ENDED or ticket.cancelled:
                return
            ticket.cancelled = True
            if self._left_the_queue(ticket):
                self.metrics.count("m3jit_cancelled_total")

    def stop(self, ticket: Ticket) -> None:
        """See `Ticket.stop`."""
        with self._lock:
            waited = self._stop(ticket)
        if waited:
            self._say_stopped(ticket)

    def _stop(self, ticket: Ticket) -> bool:
        """Stop a text under the lock; whether it waited, so that its client is to be told."""
        if ticket.state == ENDED or ticket.stopped:
            return False
        ticket.stopped = True
        return self._left_the_queue(ticket)

    @staticmethod
    def _say_stopped(ticket: Ticket) -> None:
        ticket.job.deliver([Piece("", finish_reason=EDITED)], None, True)

    def _left_the_queue(self, ticket: Ticket) -> bool:
        """End a text that waits, or stop its machine; whether it waited."""
        if ticket.state == QUEUED:
            self._waiting.remove(ticket)
            ticket.state = ENDED
            ticket.done.set()
            return True
        if ticket.member is not None:
            ticket.member.cancel()
        return False

    def close(self, seconds: float = 0.0) -> None:
        """Take no more texts; wait so long for those that are there, then cancel them."""
        end = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            self._lock.notify()
        while (self._waiting or self._active) and time.monotonic() < end:
            time.sleep(0.01)
        with self._lock:
            waiting, left = list(self._waiting), [*self._active, *self._warming.members]
            self._waiting.clear()
            for ticket in waiting:
                ticket.state, ticket.cancelled = ENDED, True
        for ticket in waiting:
            self.metrics.count("m3jit_cancelled_total")
            ticket.done.set()
            ticket.job.deliver([], Stopping("the server is stopping"), True)
        for one in left:
            one.cancel()
        self._thread.join()
        if self._warmer is not None:
            self._warmer.join()

    # -- the engine's thread ----------------------------------------------------------------------------------------
    def _run(self) -> None:
        while self._admit():
            if not self._active:
                continue
            self.metrics.observe("m3jit_batch_size", len(self._active))
            ran = False
            for batch in (self._batch, *[t.alone for t in self._active if t.alone is not None]):
                try:
                    ran |= batch.step()
                except Exception as error:             # of the batch itself, not of a machine
                    self._fail(batch, error)
            if not ran:
                self._batch.wait(0.05)
            for ticket in list(self._active):
                self._hand_over(ticket)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """A round failed, and with it the machines of its texts.  Each begins again behind what it said, by itself: so
        one that is the cause fails alone, and the others go on."""
        common = batch is self._batch
        if common:
            self._batch = Batch()
        for ticket in [t for t in self._active if (t.alone is None if common else t.alone is batch)]:
            old = ticket.text
            if ticket.member is not None:
                ticket.member.cancel()
            if old is not None:
                self._hand_over(ticket)
            if ticket.state == ENDED or ticket.member is None or old is None:
                continue
            most = ticket.job.settings.max_tokens
            if ticket.unwanted:
                self._end(ticket, [Piece("", finish_reason=EDITED if ticket.stopped else "cancelled")], None)
            elif old.complete(most is not None and len(ticket.tokens) >= most):
                self._end(ticket, list(old.ready), None)
            elif not common:
                self._end(ticket, [], error)
            else:
                self.metrics.count("m3jit_restarted_total")
                ticket.text, ticket.member, ticket.alone = None, None, Batch()
                self._start(ticket, old)

    def _admit(self) -> bool:
        """Start texts while there is room, sleeping while there is nothing to do; False when the engine has ended."""
        with self._lock:
            while not self._waiting and not self._active:
                if self._closing:
                    return False
                self._lock.wait()
            new = []
            while len(self._active) < self.limit:
                ticket = next((t for t in self._waiting if self._ready(t)), None)
                if ticket is None:
                    break
                self._waiting.remove(ticket)
                if ticket.job.fork is not None and ticket.job.fork.known is None:
                    ticket.job.fork.computing = ticket
                ticket.state = ACTIVE
                self._active.append(ticket)
                new.append(ticket)
        for ticket in new:
            self._start(ticket)
        return True

    def _ready(self, ticket: Ticket) -> bool:
        """Whether a text need not wait for one that computes its prompt, or the beginning of it."""
        job, index = ticket.job, self.model.prefixes
        if job.fork is not None and (not job.fork.open_to(ticket) or job.fork.known is not None):
            return job.fork.known is not None
        if index is None or job.known is not None:
            return True
        shared = max((common(ticket.ids, other.ids) for other in self._active
                      if not other.tokens and other.job.owner == job.owner), default=0)
        return shared < SHARED or index.known(self.model.key_of(None, job.owner), job.ids) > shared - CHUNK

    def _start(self, ticket: Ticket, before: GeneratedText | None = None) -> None:
        """Give a text a machine.  before: what it was so far, when it begins again."""
        job, settings, known = ticket.job, ticket.job.settings, ticket.job.known
        if job.fork is not None and job.fork.known is not None:
            known = job.fork.known
        if ticket.tokens:
            left = None if settings.max_tokens is None else settings.max_tokens - len(ticket.tokens)
            settings = replace(settings, seed=ticket.random[-1], max_tokens=left)
        try:
            text = self.model.start([*job.ids, *ticket.tokens], settings, written=job.written + len(ticket.tokens),
                                    known=known, keep=ticket.keep, owner=job.owner)
        except BaseException as error:                 # of this text alone
            self._end(ticket, [], error)
            return
        if before is not None:
            text.go_on(before)
        else:
            self.metrics.observe("m3jit_queue_seconds", time.monotonic() - ticket.arrived)
            self.metrics.count("m3jit_prompt_tokens_total", len(job.ids))
            self.metrics.count("m3jit_prompt_tokens_reused_total", text.reused_tokens)
            ticket.reused = text.reused_tokens
        text.vm.set_sink("TOKENS", text.take_token)
        with self._lock:
            ticket.text = text                         # it is handed over when it ends, not when the round does
            ticket.member = (ticket.alone or self._batch).add(text.vm, lambda member: self._hand_over(ticket))
            if ticket.unwanted:                        # since it left the queue
                ticket.member.cancel()

    def _hand_over(self, ticket: Ticket) -> None:
        text, member = ticket.text, ticket.member
        if text is None or member is None:
            return
        ended = member.ended
        if ended:
            text.finish(member.error)
            ended = not self._makes_room(ticket, text.error)
        pieces = list(text.ready)
        text.ready.clear()
        if pieces:
            ticket.tokens += text.tokens[len(ticket.tokens) - text.said_before:]
            ticket.random += text.random[len(ticket.random) - text.said_before:]
            self._measure(ticket, sum(len(p.tokens) for p in pieces))
        if ended:
            if ticket.stopped and text.finish_reason == "cancelled":
                pieces[-1] = replace(pieces[-1], finish_reason=EDITED)
            ticket.ended_at = text.ended_at
            self._end(ticket, pieces, text.error)
        elif pieces and not ticket.unwanted:
            ticket.job.deliver(pieces, None, False)
        if member.ended and not ended:
            self.metrics.count("m3jit_restarted_total")
            ticket.text = ticket.member = None
            self._start(ticket, text)

    def _makes_room(self, ticket: Ticket, error: BaseException | None) -> bool:
        """Whether a text that found no memory is to begin again, once: states that are only kept made room."""
        if not isinstance(error, Trap) or not error.message.startswith("out of memory") or ticket.relieved:
            return False
        ticket.relieved = True
        return sum(free() for free in self.spare) > 0 and not ticket.unwanted

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
        job = ticket.job
        with self._lock:
            self._active.remove(ticket)
            ticket.state = ENDED
            ticket.text = ticket.member = ticket.alone = None          # the machine goes, with all it holds
            ticket.finish_reason = pieces[-1].finish_reason if pieces else None
            ticket.job = replace(job, known=None, fork=None, remembered=(), deliver=ignore)
            if job.fork is not None and job.fork.computing is ticket:
                job.fork.computing = None
            self._seconds += 0.2 * (seconds - self._seconds)
        self.metrics.count("m3jit_texts_total")
        self.metrics.observe("m3jit_request_seconds", seconds)
        if ticket.cancelled:
            self.metrics.count("m3jit_cancelled_total")
        ticket.done.set()
        job.deliver(pieces, error, True)

    @property
    def batch_stats(self) -> dict[str, Any]:
        """Counters of the batch: rounds, entries, shared entries."""
        return self._batch.stats


def ignore(pieces: list[Piece], error: BaseException | None, ended: bool) -> None:
    """The client of a text that has ended."""
