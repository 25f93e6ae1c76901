"""Sinks: where STREAM writes.  Standard output, files that appear only when they are complete, callbacks, rings.

STREAM hands a sink one `Item`: text or raw bytes, PCM frames, or a tensor.  A sink takes the forms it can store and
names those it cannot.  A file is written under a temporary name in its own directory and renamed at the end of a
successful run; a failed run leaves nothing.
"""
from __future__ import annotations

import io
import struct
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Protocol

import numpy as np

from m3jit.errors import SinkClosed, StreamError
from m3jit.isa.types import BF16, Tensor
from m3jit.new_file import NewFile
from m3jit.vm.waiting import Blocked, Signal, Wait

DEFAULT_CAPACITY = 64


@dataclass(frozen=True)
class Item:
    """One STREAM.  form: "TEXT" or "RAW" (bytes), "AUDIO_PCM" (float32 or int16 [frames, channels]) or "TENSOR"."""
    form: str
    data: Any
    rate: int = 0

    def native(self) -> Any:
        """As Python code gets it: str, bytes, or a NumPy array."""
        if self.form == "TEXT":
            return self.data.decode("utf-8", "replace")
        return self.data.numpy() if isinstance(self.data, Tensor) else self.data


def pcm16(frames: np.ndarray) -> np.ndarray:
    """Samples as 16-bit integers: x * 32767 to nearest even, saturated; NaN is silence; integers pass."""
    if frames.dtype == np.int16:
        return frames
    scaled = np.rint(np.nan_to_num(frames.astype(np.float64), nan=0.0, posinf=1.0, neginf=-1.0) * 32767.0)
    return np.clip(scaled, -32768, 32767).astype("<i2")


def npy_bytes(tensor: Tensor) -> bytes:
    """The tensor as a .npy file.  StreamError for types .npy has none for."""
    out = io.BytesIO()
    np.lib.format.write_array(out, _npy_array(tensor), allow_pickle=False)
    return out.getvalue()


def _npy_array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype.is_block or tensor.dtype is BF16:
        raise StreamError(f".npy has no {tensor.dtype.name}; CAST or DEQUANT it to F32 first")
    return tensor.data


class Sink(Protocol):
    """What STREAM needs of a sink."""
    name: str

    def write(self, item: Item, blocking: bool) -> bool:
        """Take the item (True), drop it (False), or raise `waiting.Blocked` when it must wait."""

    def flush(self) -> None: ...
    def close(self, complete: bool) -> None: ...


class ByteSink:
    """Items as bytes: text and raw bytes as they are, PCM as 16-bit little-endian samples, tensors as .npy blocks."""

    def __init__(self, name: str, stream: BinaryIO, owned: bool = False):
        self.name, self.stream, self.owned = name, stream, owned

    def write(self, item: Item, blocking: bool) -> bool:
        data = item.data if item.form in ("TEXT", "RAW") else \
            pcm16(item.data).tobytes() if item.form == "AUDIO_PCM" else npy_bytes(item.data)
        self._guard(lambda: self.stream.write(data))
        return True

    def flush(self) -> None:
        self._guard(self.stream.flush)

    def close(self, complete: bool) -> None:
        self.flush()
        if self.owned:
            self._guard(self.stream.close)

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except BrokenPipeError:
            raise SinkClosed(f"{self.name} was closed by its reader; the rest of the output is lost") from None
        except (OSError, ValueError) as e:
            raise StreamError(f"cannot write to {self.name}: {getattr(e, 'strerror', None) or e}") from e


class StandardSink(ByteSink):
    """Standard output or error, looked up when it is written, so that redirections by the host are seen."""

    def __init__(self, name: str, attribute: str):
        self.name, self.attribute, self.owned = name, attribute, False

    @property
    def stream(self) -> BinaryIO:                  # type: ignore[override]
        text = getattr(sys, self.attribute)
        return getattr(text, "buffer", None) or _Encoded(text)

    def write(self, item: Item, blocking: bool) -> bool:
        text = getattr(sys, self.attribute)
        self._guard(text.flush)                    # what the host printed before comes first
        super().write(item, blocking)
        if item.form == "TEXT":
            self.flush()                           # generated text is seen as it appears
        return True


class _Encoded:
    """A text stream without a byte buffer (a notebook, io.StringIO) as a byte stream."""

    def __init__(self, text: Any):
        self.text = text

    def write(self, data: bytes) -> None:
        self.text.write(data.decode("utf-8", "replace"))

    def flush(self) -> None:
        self.text.flush()


class _AtomicFile:
    """A file under a temporary name that takes its real one when it is complete."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = NewFile(path)
        except OSError as e:
            raise StreamError(f"cannot write {path}: {e.strerror or e}") from e
        self.handle = self.file.handle

    def prepare(self) -> None:
        """Write out everything; only the name is missing then.  StreamError when that fails."""
        try:
            self.handle.close()
        except OSError as e:
            raise StreamError(f"cannot complete {self.path}: {e.strerror or e}") from e

    def finish(self, complete: bool) -> None:
        """Give the file its name, or remove it.  StreamError when it cannot be completed; it is removed then."""
        if not complete:
            self.file.discard()
            return
        try:
            self.file.commit()
        except OSError as e:
            raise StreamError(f"cannot complete {self.path}: {e.strerror or e}") from e

    def failed(self, error: Exception) -> StreamError:
        return StreamError(f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}")


class FileSink:
    """Bytes to a file (text, raw bytes, 16-bit PCM, .npy blocks)."""

    def __init__(self, path: Path):
        self.file, self.name = _AtomicFile(path), str(path)
        self.bytes = ByteSink(self.name, self.file.handle)       # type: ignore[arg-type]

    def write(self, item: Item, blocking: bool) -> bool:
        return self.bytes.write(item, blocking)

    def flush(self) -> None:
        self.bytes.flush()

    def prepare(self) -> None:
        """Everything but the name."""
        self.file.prepare()

    def close(self, complete: bool) -> None:
        self.file.finish(complete)


class WavSink:
    """AUDIO_PCM to a 16-bit WAV file; the first item fixes rate and channels."""

    HEADER = 44                                    # bytes kept free for the header, whose lengths are known at the end

    def __init__(self, path: Path):
        self.file, self.name = _AtomicFile(path), str(path)
        self.format: tuple[int, int] | None = None
        self.bytes = 0                             # of samples

    def write(self, item: Item, blocking: bool) -> bool:
        if item.form != "AUDIO_PCM":
            raise StreamError(f"{self.name} takes FORMAT=AUDIO_PCM, not {item.form}")
        found = (item.rate, item.data.shape[1])
        if self.format is not None and found != self.format:
            raise StreamError(f"{self.name} has {self.format[1]} channels at {self.format[0]} Hz; this item has "
                              f"{found[1]} at {found[0]} Hz")
        samples = pcm16(item.data).tobytes()
        try:
            if self.format is None:
                self.file.handle.write(bytes(self.HEADER))
            self.file.handle.write(samples)
        except OSError as e:
            raise self.file.failed(e) from e
        self.format = found
        self.bytes += len(samples)
        return True

    def flush(self) -> None:
        """Nothing: the header is completed at the end."""

    def prepare(self) -> None:
        """Everything but the name: the header's lengths, and what is still held."""
        if self.format is not None and not self.file.handle.closed:
            rate, channels = self.format
            try:
                head = struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", self.bytes + self.HEADER - 8, b"WAVEfmt ", 16, 1,
                                   channels, rate, rate * channels * 2, channels * 2, 16, b"data", self.bytes)
                self.file.handle.seek(0)
                self.file.handle.write(head)
            except (OSError, struct.error) as e:           # struct.error: over 4 GB
                raise self.file.failed(e) from e
        self.file.prepare()

    def close(self, complete: bool) -> None:
        try:
            if complete:
                self.prepare()
        except StreamError:
            self.file.finish(False)
            raise
        self.file.finish(complete)


class NpySink:
    """Tensors to one .npy file: a single tensor as it is; several of one dtype and row shape along axis 0."""

    HEADER = 256                                   # bytes kept free for the header, which is known at the end

    def __init__(self, path: Path):
        self.file, self.name = _AtomicFile(path), str(path)
        self.first: np.ndarray | None = None
        self.rows = 0
        self.count = 0

    def write(self, item: Item, blocking: bool) -> bool:
        if item.form not in ("TENSOR", "AUDIO_PCM"):
            raise StreamError(f"{self.name} takes FORMAT=TENSOR, not {item.form}")
        array = _npy_array(item.data) if isinstance(item.data, Tensor) else item.data
        try:
            if self.first is None:
                self.first = array[:0] if array.ndim else array
                self.shape = array.shape
                self.file.handle.write(bytes(self.HEADER))
            elif not array.ndim or array.dtype != self.first.dtype or array.shape[1:] != self.shape[1:] or \
                    not self.shape:
                raise StreamError(f"{self.name} holds {self.first.dtype} rows of shape {list(self.shape[1:])}; this "
                                  f"tensor is {array.dtype} {list(array.shape)}")
            self.file.handle.write(np.ascontiguousarray(array).tobytes())
        except OSError as e:
            raise self.file.failed(e) from e
        self.rows += array.shape[0] if array.ndim else 1
        self.count += 1
        return True

    def flush(self) -> None:
        """Nothing: the header is completed at the end."""

    def prepare(self) -> None:
        """Everything but the name: the header is known now."""
        if self.first is not None and not self.file.handle.closed:
            shape = self.shape if self.count == 1 else (self.rows, *self.shape[1:])
            header = str({"descr": np.lib.format.dtype_to_descr(self.first.dtype), "fortran_order": False,
                          "shape": tuple(int(d) for d in shape)})
            head = b"\x93NUMPY\x01\x00" + (self.HEADER - 10).to_bytes(2, "little") + \
                header.encode().ljust(self.HEADER - 11) + b"\n"
            try:
                self.file.handle.seek(0)
                self.file.handle.write(head)
            except OSError as e:
                raise self.file.failed(e) from e
        self.file.prepare()

    def close(self, complete: bool) -> None:
        try:
            if complete:
                self.prepare()
        except StreamError:
            self.file.finish(False)
            raise
        self.file.finish(complete and self.first is not None)


class CallbackSink:
    """A Python function called with each item (str, bytes or NumPy array)."""

    def __init__(self, name: str, function: Callable[[Any], Any]):
        self.name, self.function = name, function

    def write(self, item: Item, blocking: bool) -> bool:
        self.function(item.native())
        return True

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self, complete: bool) -> None:
        """The function needs no end."""


class Ring:
    """A bounded queue between contexts, or between a context and the host.

    Items have absolute positions.  `capacity` unread items fit: a writer that finds it full waits (BLOCKING) or its
    item is dropped and counted (DROP).  The newest `capacity` read items stay for contexts that roll back; reading
    before them is an error.
    """

    def __init__(self, name: str, capacity: int = DEFAULT_CAPACITY, signal: Signal | None = None):
        if capacity < 1:
            raise StreamError(f"ring {name}: capacity {capacity}; at least 1")
        self.name, self.capacity = name, capacity
        self.signal = signal or Signal()
        self.items: deque[Item] = deque()
        self.base = 0                              # position of items[0]
        self.taken = 0                             # positions below are read
        self.dropped = 0
        self.closed = False
        self.host_reads = False                    # a host iterator empties it

    @property
    def end(self) -> int:
        return self.base + len(self.items)

    @property
    def full(self) -> bool:
        return self.end - self.taken >= self.capacity

    def write(self, item: Item, blocking: bool) -> bool:
        with self.signal:
            if self.closed:
                raise SinkClosed(f"ring {self.name} was closed by its reader")
            if self.full:
                if blocking:
                    raise Blocked(self.wait_for_space())
                self.dropped += 1
                return False
            self.items.append(item)
            self._trim()
            self.signal.notify()
        return True

    def read(self, position: int) -> Item | None:
        """The item at an absolute position; None when it is not there yet.  StreamError when it is gone."""
        with self.signal:
            if position < self.base:
                raise StreamError(f"ring {self.name}: item {position} is beyond its reach (the oldest kept is "
                                  f"{self.base}); a rollback went back further than the ring's {self.capacity} items")
            if position >= self.end:
                return None
            if position >= self.taken:
                self.taken = position + 1
                self._trim()
                self.signal.notify()
            return self.items[position - self.base]

    def wait_for_space(self) -> Wait:
        """What a writer waits for that finds it full."""
        return Wait(lambda: not self.full or self.closed, f"space in ring {self.name}", self.host_reads,
                    terms=("space", self.name))

    def wait_for_item(self, position: int) -> Wait:
        """What a reader waits for whose item is not there yet."""
        return Wait(lambda: position < self.end or self.closed, f"an item in ring {self.name}", False,
                    terms=("item", self.name, position))

    def pop(self) -> Item | None:
        """The oldest unread item, for the host; None when there is none."""
        with self.signal:
            return self.read(self.taken)

    def _trim(self) -> None:
        while self.taken - self.base > self.capacity:
            self.items.popleft()
            self.base += 1

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self, complete: bool) -> None:
        with self.signal:
            self.closed = True
            self.signal.notify()


def open_file_sink(path: Path) -> Sink:
    """The sink for a file name: .wav, .npy, anything else as bytes."""
    kind = {".wav": WavSink, ".npy": NpySink}.get(path.suffix.lower(), FileSink)
    return kind(path)
