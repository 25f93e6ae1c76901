"""The host's side of streams: pushing input, attaching sinks and sources, iterating over output."""
from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, AsyncIterator, Callable, Iterable, Iterator

import numpy as np

from m3jit.errors import UserError
from m3jit.vm.audio_ring import RATE, SECONDS, AudioRing
from m3jit.vm.machine_io import resolve_file
from m3jit.vm.sources import ArraySource, QueueSource, RingSource, Source
from m3jit.vm.context import ByInput, Context
from m3jit.vm.entering import is_free, take
from m3jit.vm.stopping import ATTENTION, interruptible
from m3jit.vm.streams import CallbackSink, Ring, Sink, open_file_sink
from m3jit.vm.waiting import Wait

_NO_ITEM = object()


class HostStreams:
    """The part of `VM` that connects a program with the host."""

    def push_input(self, value: Any, source: str = "USER_INPUT", interrupt: bool | None = None) -> None:
        """Give a source of the program its next item: text, bytes, a number or an array (copied).

        interrupt: it interrupts the contexts that read this source (the main one where none has), until it is read;
        None: when it is USER_INPUT and another thread, or a batch, runs the program.  A context that waits for the item
        in SENSE just gets it."""
        if interrupt is None:
            running = self.batch is not None or self._runner not in (None, threading.get_ident())
            interrupt = running and source == "USER_INPUT"
        self.hand_over(self._queue(source), np.array(value) if isinstance(value, np.ndarray) else value, interrupt)

    def hand_over(self, queue: QueueSource, item: Any, interrupt: bool) -> None:
        """Put an item into a source; interrupt: as `push_input` says."""
        with self.signal:                              # who reads the item sees the interrupt, and ends it
            queue.push(item)
            urged = [c for c in self._readers(queue.name) if self._mark(c, queue)] if interrupt else []
        for ctx in urged:
            self._urge(ctx)
        if not urged:
            self.stop_word.set(ATTENTION)

    def _readers(self, source: str) -> list[Context]:
        """The contexts that have read from a source; the main one when none has."""
        return [c for c in list(self.scheduler.contexts.values()) if source in c.cursors] or [self.main]

    @staticmethod
    def _mark(ctx: Context, queue: QueueSource) -> bool:
        """Make input an interrupt of a context; whether it is to be brought out of what it does."""
        wait = ctx.waiting_for
        pending = ctx.interrupt
        if pending is True or not pending and wait is not None and wait.source is queue:
            return False
        ctx.interrupt = ByInput()                      # a SENSE that is about to answer the one before leaves this one
        return not pending and ctx.retired >= ctx.quiet_until

    def audio_input(self, name: str = "AUDIO_PCM", rate: int = RATE, seconds: float = SECONDS,
                    channels: int = 1) -> AudioRing:
        """Attach a source of sound that keeps the newest seconds; give it frames with `push`.

        Where a version that was restored had one of that name it is that, and goes on.  UserError: of another kind."""
        before = self.sources.get(name)
        if isinstance(before, AudioRing) and before.restored:
            here = (before.rate, before.channels, before.frames)
            if here != (rate, channels, round(rate * seconds)):
                raise UserError(f"audio_input({name!r}): the version that was restored has this sound with {here[1]} "
                                f"channels at {here[0]} Hz and {here[2] / here[0]:g} seconds of it, not {channels} at "
                                f"{rate} Hz and {seconds:g}; attach the same, or one of another length before "
                                f"you restore")
            before.restored = before.closed = False
            return before
        ring = self.sources[name] = AudioRing(self.signal, name, rate, seconds, channels, self.wake_for_sound)
        return ring

    def wake_for_sound(self) -> None:
        """Let a context look whether the sound it waits for is there."""
        self.stop_word.set(ATTENTION)

    def skip_input(self, source: str, to: str = "newest", keep: int = 0, context: Context | None = None) -> None:
        """Move a context (the main one) in a source: SENSE then reads the oldest items or frames there are, or those
        behind the newest `keep`.  The position is part of its state, and goes back with it.

        UserError: no such source, another place, or a source without one (a file)."""
        found = self.sources.get(source)
        if to not in ("oldest", "newest") or isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise UserError(f"skip_input({source!r}, {to!r}, keep={keep!r}): \"oldest\" or \"newest\" is expected, and "
                            f"a whole number from 0")
        if not isinstance(found, (AudioRing, QueueSource)):
            what = f"reads from {type(found).__name__}" if found is not None else "is no source of this machine"
            raise UserError(f"skip_input: {source} {what}; sound (audio_input) and pushed input can be skipped")
        with self._entered(), self.signal:             # type: ignore[attr-defined]
            ctx = context or self.main
            oldest, end = found.span()
            at = oldest if to == "oldest" else max(oldest, end - keep)
            ctx.cursors = {**ctx.cursors, source: at}
            wait = ctx.waiting_for
            if wait is not None and wait.source is found:       # it looks again, from there
                ctx.waiting_for = Wait(lambda: True, wait.what, True, found)

    def close_input(self, source: str = "USER_INPUT") -> None:
        """Nothing more will be pushed."""
        self._queue(source).close()
        self.stop_word.set(ATTENTION)

    def _queue(self, name: str) -> QueueSource:
        with self.signal:
            found = self.sources.get(name)
            if found is None:
                found = self.sources[name] = QueueSource(name, self.signal, waits=self.wait_input)
        if not isinstance(found, QueueSource):
            raise UserError(f"source {name} reads from {type(found).__name__}; items can be pushed to queues only")
        return found

    def set_sink(self, name: str, sink: Sink | Callable[[Any], Any] | str | Path) -> None:
        """Attach a sink: an object with `write`, a function of one item, or a file name.  OUTPUT and ERROR replace
        standard output and error."""
        if isinstance(sink, (str, Path)):
            sink = open_file_sink(Path(sink))
        elif not hasattr(sink, "write"):
            sink = CallbackSink(name, sink)
        self.sinks[name] = sink

    def set_source(self, name: str, source: Source | Iterable[Any] | np.ndarray) -> None:
        """Attach a source: an object with `read`, an array (its rows), or an iterable of items."""
        if isinstance(source, Ring):
            source = RingSource(source)
        elif isinstance(source, np.ndarray):
            source = ArraySource(name, source)
        elif not hasattr(source, "read"):
            source = QueueSource(name, self.signal, source)
        self.sources[name] = source

    def output(self, name: str = "OUTPUT", capacity: int | None = None) -> Iterator[Any]:
        """The items the program streams to a sink, as they come (str, bytes or NumPy arrays).

        When no other thread runs the program, the iterator does: it runs until the next item is there.  A program that
        gets `capacity` items ahead waits (BLOCKING) or drops them (DROP)."""
        ring = self._output_ring(name, capacity)

        def items() -> Iterator[Any]:
            while True:
                item = ring.pop()
                if item is not None:
                    yield item.native()
                elif self._ended():
                    if self.error is not None:
                        raise self.error               # also when another thread ran the program
                    return
                else:
                    self._advance(ring)
        return items()

    async def output_async(self, name: str = "OUTPUT", capacity: int | None = None) -> AsyncIterator[Any]:
        """`output` for asyncio."""
        import asyncio

        source = self.output(name, capacity)
        while (item := await asyncio.to_thread(next, source, _NO_ITEM)) is not _NO_ITEM:
            yield item

    def _output_ring(self, name: str, capacity: int | None) -> Ring:
        key = name if name in self.sinks or not name.startswith("RING:") else name[5:]
        found = self.sinks.get(key)
        if not isinstance(found, Ring):
            found = Ring(name, capacity or self.ring_capacity, self.signal)
            self.sinks[key] = found
        found.host_reads = True
        return found

    def _ended(self) -> bool:
        return self.finished and is_free(self._lock)

    def _advance(self, ring: Ring) -> None:
        """Run the program until the ring has an item; when another thread or a batch runs it, wait for that."""
        held: list[Any] = []
        try:
            if self.batch is None:
                take(self._lock, held, blocking=False)
            if held:
                self._run_until(lambda: ring.end > ring.taken)
        finally:
            for lock in held:
                self._runner = None
                lock.release()
        if not held:
            with self.signal:
                if ring.end == ring.taken and not ring.closed:
                    self.signal.wait(0.05)

    def _run_until(self, there: Callable[[], bool]) -> None:
        """Run the program until something is there, or to its end."""
        try:
            self._runner = threading.get_ident()
            with interruptible(self.stop_word):
                self._loop(there)
            if self.finished and self._first_trap is not None:
                raise self._first_trap
        except BaseException as e:
            self._fail(e)
            raise
        if self.finished:
            self.close(complete=True)

    def file_path(self, name: str, action: str, folder: bool = False) -> Path:
        """A program's file name as a path; StreamError when the program may not use it.  folder: it is one."""
        return resolve_file(self.files, name, action, folder)
