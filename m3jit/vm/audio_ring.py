"""Sound as it comes from a device: the newest seconds of it, which a program reads at its own pace.

The device's position is its own; a context's position is a root value.  A context's first read begins with the oldest
frame there is.  After a rollback the same window is read again, as long as the ring still has it; the host can move a
context to the oldest or the newest frames (`VM.skip_input`).
"""
from __future__ import annotations

from typing import Any, Callable

import numpy as np

from m3jit.errors import BeyondReach, StreamError, UserError
from m3jit.vm.commit import Store, attribute
from m3jit.vm.sources import END, NOTHING
from m3jit.vm.waiting import Blocked, Signal, Wait

RATE, SECONDS = 24_000, 2.0
MOST_BYTES = 1 << 30               # of a ring


class AudioRing:
    """The newest `seconds` of samples f32 [frames, channels] at `rate` Hz.  `push` may be called from any thread.

    A read of COUNT frames waits until they are there; COUNT 0 takes what is there, at least one frame."""

    def __init__(self, signal: Signal, name: str = "AUDIO_PCM", rate: int = RATE, seconds: float = SECONDS,
                 channels: int = 1, told: Callable[[], Any] = lambda: None):
        """told: called after every change."""
        frames = round(rate * seconds) if rate > 0 and 0 < seconds < MOST_BYTES else 0
        if frames < 1 or channels < 1 or 4 * frames * channels > MOST_BYTES:
            raise UserError(f"a ring of {seconds} s at {rate} Hz with {channels} channels; it holds 1 frame to "
                            f"{MOST_BYTES} bytes")
        self.name, self.signal, self.rate, self.channels = name, signal, rate, channels
        self.frames = frames
        self._samples = np.zeros((frames, channels), np.float32)
        self.base = self.end = 0                       # frames the ring has: base .. end - 1
        self.closed, self.told = False, told
        self.restored = False                          # it came from a version, and the host has not attached it yet

    def push(self, samples: Any) -> None:
        """Frames [n] or [n, channels], float or 16-bit integers; the oldest make room.  StreamError: another shape or
        type, or a closed ring."""
        a = np.asarray(samples)
        if a.dtype.kind not in "fi" or a.ndim not in (1, 2) or a.reshape(len(a), -1).shape[1:] != (self.channels,):
            raise StreamError(f"audio ring {self.name}: takes samples [n, {self.channels}], got {a.dtype} "
                              f"{list(a.shape)}")
        a = (a.astype(np.float32) / np.float32(32768.0) if a.dtype == np.int16 else a.astype(np.float32))
        a = a.reshape(len(a), self.channels)
        with self.signal:
            if self.closed:
                raise StreamError(f"audio ring {self.name} is closed; nothing can be pushed any more")
            end = self.end + len(a)
            self.base = max(self.base, end - self.frames)        # first: what is overwritten is not there any more
            kept = a[-self.frames:]
            at = (end - len(kept)) % self.frames
            first = min(len(kept), self.frames - at)
            self._samples[at:at + first], self._samples[:len(kept) - first] = kept[:first], kept[first:]
            self.end = end
            self.signal.notify()
        self.told()

    def close(self) -> None:
        """No more sound: what is there can be read, then the end."""
        with self.signal:
            self.closed = True
            self.signal.notify()
        self.told()

    def wait_for_frames(self, position: int | None, count: int) -> Wait:
        """What a reader waits for whose frames are not there yet."""
        return Wait(lambda: self.closed or self.end - (self.base if position is None else position) >= max(count, 1),
                    f"sound on {self.name}", True, self, terms=("sound", self.name, position, count))

    def kept(self) -> np.ndarray:
        """A copy of the frames there are [n, channels], the oldest first."""
        with self.signal:
            return self._samples[np.arange(self.base, self.end) % self.frames]

    def holding(self, base: int, samples: np.ndarray, closed: bool) -> list[Store]:
        """The stores (m3jit.vm.commit) that make it hold these frames from position `base` on, the newest that fit."""
        end = base + len(samples)
        first = max(base, end - self.frames)
        held = np.zeros_like(self._samples)
        held[np.arange(first, end) % self.frames] = samples[first - base:]
        return [attribute(self, "_samples", held), attribute(self, "base", first), attribute(self, "end", end),
                attribute(self, "closed", closed)]

    def span(self) -> tuple[int, int]:
        """(the oldest position there is, the one behind the newest)."""
        with self.signal:
            return self.base, self.end

    def read(self, position: int | None, count: int, blocking: bool) -> tuple[Any, int]:
        """(frames f32 [n, channels], next position); fewer than COUNT only at the end.  position None: from the oldest
        frame there is.  BeyondReach: the ring has the frame at `position` no more; StreamError: it never has so
        many."""
        if count > self.frames:
            raise StreamError(f"audio ring {self.name}: COUNT={count} frames are asked for, and it keeps {self.frames}"
                              "; read fewer at a time, or keep more seconds")
        with self.signal:
            at = self.base if position is None else position
            if at < self.base:
                raise BeyondReach(f"audio ring {self.name}: frame {at} is beyond its reach, {self.frames} frames "
                                  f"({self.frames / self.rate:g} s); the oldest it has is {self.base}.  Read sooner, "
                                  f"go back less far, keep more seconds, or skip what is gone (VM.skip_input)")
            if at > self.end:
                raise BeyondReach(f"audio ring {self.name}: frame {at} was never in it, it has had "
                                  f"{self.end}: it is not the ring that this context read from.  Attach it before a "
                                  f"version is restored, or skip to what there is (VM.skip_input)")
            there = self.end - at
            if there < max(count, 1) and not self.closed:
                if not blocking:
                    return NOTHING, at
                raise Blocked(self.wait_for_frames(position, count))
            if there < 1:
                return END, at
            n = min(there, count) if count else there
            start = at % self.frames
            first = min(n, self.frames - start)
            return np.concatenate([self._samples[start:start + first], self._samples[:n - first]]), at + n
