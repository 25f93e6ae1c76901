"""Sources: where SENSE reads.  Queues filled by the host, files, arrays, Python iterators, rings, the clock.

A context's position in a source is a root value (`Context.cursors`): after a rollback the same items are read again, as
long as the source still has them; beyond that is a StreamError.
"""
from __future__ import annotations

import wave
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any, Iterable, Iterator, Protocol

import numpy as np

from m3jit.errors import BeyondReach, M3Error, StreamError, no_memory
from m3jit.frontend.npy import read_npy
from m3jit.vm.streams import Ring
from m3jit.vm.waiting import Blocked, Signal, Wait

DEFAULT_REACH = 1024


class End:
    """Nothing will come any more."""


class Nothing:
    """Nothing is there now."""


END, NOTHING = End(), Nothing()


class Source(Protocol):
    """What SENSE needs of a source."""
    name: str

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        """(value, next position).  value: str, bytes, NumPy array, number, END or NOTHING.  count: how many frames,
        bytes or rows for sources that have them (0: an item, or all there is).  May raise `Blocked`."""


class QueueSource:
    """Items pushed by the host (`VM.push_input`) or drawn from an iterator; the newest `reach` read items are kept.

    waits: an empty queue blocks until something is pushed or the queue is closed; otherwise it is at its end."""
    goes_on = False                                # a machine that is restored gets what was stored of it, too

    def __init__(self, name: str, signal: Signal, items: Iterable[Any] = (), waits: bool = False,
                 reach: int = DEFAULT_REACH):
        self.name, self.signal, self.waits, self.reach = name, signal, waits, reach
        self.items: deque[Any] = deque()
        self.base = 0                              # position of items[0]
        self.taken = 0
        self.closed = False
        self.draws = not isinstance(items, tuple) or bool(items)         # from an iterator
        self.more: Iterator[Any] = iter(items)

    def push(self, item: Any) -> None:
        with self.signal:
            if self.closed:
                raise StreamError(f"input {self.name} is closed; nothing can be pushed any more")
            self.items.append(item)
            self.signal.notify()

    def close(self) -> None:
        """No more input: reading past the last item gives the end."""
        with self.signal:
            self.closed = True
            self.signal.notify()

    def has(self, position: int) -> bool:
        """Was the item at `position` pushed?"""
        return self._has(position)

    def wait_for_item(self, position: int) -> Wait:
        """What a reader waits for whose item is not there yet."""
        return Wait(lambda: self._has(position) or self.closed, f"input on {self.name}", True, self,
                    terms=("input", self.name, position))

    def _has(self, position: int) -> bool:
        return position < self.base + len(self.items)

    def span(self) -> tuple[int, int]:
        """(the oldest position there is, the one behind the newest)."""
        with self.signal:
            return self.base, self.base + len(self.items)

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        with self.signal:
            if position < self.base:
                raise BeyondReach(f"input {self.name}: item {position} is beyond its reach (the oldest kept is "
                                  f"{self.base}); a rollback went back further than {self.reach} items")
            if not self._has(position):
                # In one step: an interrupt loses no item.  Several after a restore: it is drawn from its beginning.
                self.items.extend(islice(self.more, position + 1 - self.base - len(self.items)))
            if not self._has(position):
                if not self.waits or self.closed:
                    return (NOTHING if not blocking and not self.closed else END), position
                elif not blocking:
                    return NOTHING, position
                else:
                    raise Blocked(self.wait_for_item(position))
            value = self.items[position - self.base]
            self.taken = max(self.taken, position + 1)
            while self.taken - self.base > self.reach:
                self.items.popleft()
                self.base += 1
            return value, position + 1


class ArraySource:
    """Rows of an array in order (samples of a recording, rows of a .npy file); count 0 gives all the rest."""

    def __init__(self, name: str, rows: np.ndarray):
        if rows.ndim == 0:
            raise StreamError(f"{name}: a single number has no rows to read; use FORMAT=TENSOR")
        self.name, self.rows = name, rows

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        n = len(self.rows) - position
        if n <= 0:
            return END, position
        n = min(n, count) if count else n
        return self.rows[position:position + n], position + n


class BytesSource:
    """The bytes of a file; count 0 gives all the rest."""

    def __init__(self, name: str, data: bytes):
        self.name, self.data = name, data

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        if position >= len(self.data):
            return END, position
        end = min(len(self.data), position + count) if count else len(self.data)
        return self.data[position:end], end


class RingSource:
    """A ring that another context, or the host, writes."""

    def __init__(self, ring: Ring):
        self.ring, self.name = ring, ring.name

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        with self.ring.signal:
            item = self.ring.read(position)
            if item is not None:
                return item.native(), position + 1
            if self.ring.closed:
                return END, position
            if not blocking:
                return NOTHING, position
            raise Blocked(self.ring.wait_for_item(position))


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """(frames float32 [n, channels] in -1..1, sample rate) of a PCM WAV file of 8, 16, 24 or 32 bits."""
    try:
        with wave.open(str(path), "rb") as w:
            raw, width = w.readframes(w.getnframes()), w.getsampwidth()
            channels, rate = w.getnchannels(), w.getframerate()
    except (wave.Error, EOFError) as e:
        raise StreamError(f"{path} is not a PCM WAV file: {e or 'it ends early'}") from None
    except OSError as e:
        raise StreamError(f"cannot read {path}: {e.strerror or e}") from e
    b = np.frombuffer(raw[:len(raw) // (width * channels) * width * channels], np.uint8)
    if width == 1:
        x = (b.astype(np.int32) - 128) * 256
        scale = 32768.0
    elif width == 2:
        x, scale = b.view("<i2").astype(np.int32), 32768.0
    elif width == 3:
        t = b.reshape(-1, 3).astype(np.int32)
        x = (t[:, 0] | t[:, 1] << 8 | t[:, 2] << 16) << 8 >> 8
        scale = 8388608.0
    elif width == 4:
        x, scale = b.view("<i4"), 2147483648.0
    else:
        raise StreamError(f"{path}: {8 * width}-bit samples; 8, 16, 24 and 32 are read")
    return (x.astype(np.float64) / scale).astype(np.float32).reshape(-1, channels), rate


def open_file_source(path: Path) -> Source:
    """The source for a file name: .wav (frames), .npy (rows), anything else as bytes."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".wav":
            return ArraySource(str(path), read_wav(path)[0])
        if suffix == ".npy":
            return ArraySource(str(path), read_npy(path))
        return BytesSource(str(path), path.read_bytes())
    except M3Error:
        raise
    except OSError as e:
        raise StreamError(f"cannot read {path}: {e.strerror or e}") from e
    except Exception as e:                             # a damaged file: the readers raise many kinds
        if no_memory(e):
            raise
        raise StreamError(f"cannot read {path}: {e}") from None
