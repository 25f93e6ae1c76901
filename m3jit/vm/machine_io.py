"""STREAM and SENSE: values to items and back, text and token streams, named sinks and sources."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np

from m3jit.errors import M3Error, OperandError, StreamError, brief, no_memory
from m3jit.isa.types import BF16, F32, FLOATS, I16, I64, INTS, U8, Tensor
from m3jit.vm.audio_ring import AudioRing
from m3jit.vm.commit import Store, attribute
from m3jit.vm.context import Context
from m3jit.vm.sources import END, NOTHING, QueueSource, RingSource, Source, open_file_source
from m3jit.vm.streams import CallbackSink, Item, NpySink, Ring, Sink, StandardSink, WavSink, open_file_sink
from m3jit.vm.text_stream import TextStream
from m3jit.vm.values import Handle, normalise, said
from m3jit.vm.waiting import Blocked

NO_TEXT = 2 ** 64 - 1              # word of an absent string operand
FIRST_READS = 4096                 # contexts of which the beginning of their sound is remembered, the newest


class StreamsView:
    """The part of `Machine` that reads and writes streams."""
    vm: Any
    ctx: Context
    stores: list[Store]
    _first_reads: dict[tuple[int, str, int], int]

    def text(self, word: int) -> str | None:
        """A string operand, None when absent."""
        if word == NO_TEXT:
            return None
        if self.vm.image.program is None:
            raise OperandError("a string operand needs a program with a DATA section")
        return self.vm.image.program.string(word)

    # -- output -----------------------------------------------------------------------------------------------------
    def stream(self, value: Any, sink: str, name: str | None, form: str, rate: int, line: bool, blocking: bool,
               model: Handle | None) -> None:
        """STREAM: write a value to a sink."""
        key = _key_of(sink, name)
        target = self.vm.sinks.get(key) or self.find_sink(sink, name)
        if form == "AUTO":
            form = _natural_form(value, target, model)
        if form == "TEXT":
            item, rest = self._text_item(value, target.name, line, model)
        else:
            item, rest = _plain_item(value, form, rate), None
        if item is not None:
            self._hand_out(target, key, item, blocking)
        if rest is not None:
            self.stores.append(attribute(self.ctx, "texts", {**self.ctx.texts, target.name: rest}))
        if self.vm.scheduler.waiting() or getattr(target, "host_reads", False):
            self.ctx.leave = True                      # another context, or the host, may wait for it

    def _hand_out(self, target: Sink, key: str, item: Item, blocking: bool) -> None:
        """Write an item; what leaves the machine goes through the record of the run."""
        recorder = self.vm.recorder
        if recorder.idle or target.__class__ is Ring and self.vm.rings.get(target.name) is target:
            _outside("sink", target, target.write, item, blocking)       # between contexts: a function of the program
        else:
            recorder.leave(self.ctx, key, item, lambda: _outside("sink", target, target.write, item, blocking))

    def find_sink(self, sink: str, name: str | None) -> Sink:
        """The sink of a STREAM's words."""
        key = _key_of(sink, name)
        found = self.vm.sinks.get(key)
        if found is not None:
            return found
        if name is None:
            raise OperandError(f"STREAM to {sink} needs NAME=\"...\"")
        if sink == "FILE":
            found = self.vm.recorder.attempt(self.ctx, lambda: open_file_sink(self.vm.file_path(name, "write")))
        elif sink == "RING":
            return self.ring(name)
        else:
            raise OperandError(f"no sink named {name!r}; the host attaches one with VM.set_sink({name!r}, ...)")
        self.vm.sinks[key] = found
        return found

    def ring(self, name: str) -> Ring:
        """The ring of that name, made on first use."""
        if name not in self.vm.rings:
            self.vm.rings[name] = Ring(name, self.vm.ring_capacity, self.vm.signal)
        return self.vm.rings[name]

    def _text_item(self, value: Any, sink: str, line: bool, model: Handle | None) -> tuple[Item | None, bytes | None]:
        """(text to write, bytes of an unfinished code point to keep, or None to leave them as they are)."""
        if model is None:
            data, rest = _printed(value), None
        else:
            data, rest, held = self._token_bytes(value, model), None, self.ctx.texts.get(sink)
            if held or not data.isascii():             # a part of a code point may be there, or come
                before = TextStream(held or b"")
                text, after = before.feed(data)
                data, rest = text.encode(), None if after is before else after.held
        if line:
            data += b"\n"
        return (Item("TEXT", data) if data else None), rest

    def _token_bytes(self, value: Any, handle: Handle) -> bytes:
        model = self.model_of(handle)                  # type: ignore[attr-defined]
        if value.__class__ is int:
            return _piece(model, value)
        if value.__class__ is Tensor and value.dtype in INTS:
            return b"".join(_piece(model, int(t)) for t in value.data.reshape(-1))
        raise OperandError(f"FORMAT=TEXT with a model takes token ids, got {said(value)}")

    def finish_texts(self, ctx: Context) -> None:
        """At the end of a context: an unfinished code point becomes U+FFFD."""
        for name, rest in ctx.texts.items():
            if rest:
                for key, sink in list(self.vm.sinks.items()):
                    if sink.name == name:
                        item = Item("TEXT", TextStream(rest).end().encode())
                        self.vm.recorder.leave(ctx, key, item, lambda: sink.write(item, True))
        ctx.texts = {}

    # -- input ------------------------------------------------------------------------------------------------------
    def sense(self, peripheral: str, name: str | None, form: str, count: int, blocking: bool,
              model: Handle | None) -> tuple[Any, int]:
        """SENSE: (value, status): status 1 a value, 0 nothing now, -1 the end."""
        if peripheral == "TIME":
            return self.wall_ns(), 1                   # type: ignore[attr-defined]
        if count < 0:
            raise OperandError(f"COUNT={count}; it cannot be negative")
        key = _source_key(peripheral, name)
        at = self.ctx.cursors.get(key, 0)

        def read() -> tuple[Any, int]:
            source = self.find_source(peripheral, name)
            if isinstance(source, AudioRing) and key not in self.ctx.cursors:
                return self._read_first(source, key, count, blocking)
            return _outside("source", source, source.read, at, count, blocking)
        inside = peripheral == "RING" and name is not None and self._is_own_ring(key, name)
        value, after = read() if inside else self.observe("sense", read)      # type: ignore[attr-defined]
        if after != at:
            self._input_was_read(key, after)
            self.stores.append(attribute(self.ctx, "cursors", {**self.ctx.cursors, key: after}))
        if self.vm.scheduler.waiting():
            self.ctx.leave = True                      # reading made space
        if value is END or value is NOTHING:
            return _empty(form, model), -1 if value is END else 0
        return self._sensed(value, form, model), 1

    def _read_first(self, ring: AudioRing, key: str, count: int, blocking: bool) -> tuple[Any, int]:
        """The first read of a context; after a rollback to before it, it begins where it began."""
        reader = self.ctx.id, key, id(ring)
        value, after = ring.read(self._first_reads.get(reader), count, blocking)
        if value is not END and value is not NOTHING:
            self._first_reads.setdefault(reader, after - len(value))
            while len(self._first_reads) > FIRST_READS:
                del self._first_reads[next(iter(self._first_reads))]
        return value, after

    def _input_was_read(self, key: str, position: int) -> None:
        """Input whose newest item has been read interrupts no longer, once the instruction is complete."""
        if self.ctx.interrupt and self.ctx.interrupt is not True:
            source = self.vm.sources.get(key)
            with self.vm.signal:
                if isinstance(source, QueueSource) and not source.has(position):
                    self.stores.append(attribute(self.ctx, "answered", self.ctx.raised))

    def find_source(self, peripheral: str, name: str | None) -> Source:
        """The source of a SENSE's words."""
        key = _source_key(peripheral, name)
        found = self.vm.sources.get(key)
        if found is not None:
            return found
        if peripheral == "FILE" and name is not None:
            found = open_file_source(self.vm.file_path(name, "read"))
        elif peripheral == "RING" and name is not None:
            found = RingSource(self.ring(name))
        elif peripheral in ("USER_INPUT", "TOKEN") and name is None:
            found = QueueSource(peripheral, self.vm.signal, waits=self.vm.wait_input)
        elif name is None and peripheral in ("FILE", "RING", "NAMED"):
            raise OperandError(f"SENSE of {peripheral} needs NAME=\"...\"")
        else:
            raise OperandError(f"no source {key!r} is attached; the host attaches one with VM.set_source({key!r}, ...)")
        self.vm.sources[key] = found
        return found

    def _is_own_ring(self, key: str, name: str) -> bool:
        """Is the source a ring that contexts of this machine write, none that the host attached?"""
        attached = self.vm.sources.get(key)
        return attached is None or isinstance(attached, RingSource) and attached.ring is self.vm.rings.get(name)

    def _sensed(self, value: Any, form: str, model: Handle | None) -> Any:
        """A source's value as a register holds it."""
        if isinstance(value, (str, bytes)):
            if form in ("AUTO", "TEXT") and model is not None:
                raw = text_bytes(value) if isinstance(value, str) else value
                text = raw.decode("utf-8", "replace")
                ids = self.model_of(model).encode(text)        # type: ignore[attr-defined]
                return Tensor(I64, (len(ids),), np.array(ids, np.int64))
            if form in ("AUDIO_PCM",):
                raise OperandError("the source gives text, not AUDIO_PCM")
            raw = text_bytes(value) if isinstance(value, str) else bytes(value)
            return Tensor(U8, (len(raw),), np.frombuffer(raw, np.uint8))
        if form == "AUDIO_PCM":
            return _as_pcm(value)
        if isinstance(value, np.ndarray):
            return Tensor.of(np.array(value))
        return normalise(value)


def _key_of(sink: str, name: str | None) -> str:
    """The key of a STREAM's words among the sinks of a machine."""
    if sink in ("OUTPUT", "ERROR"):
        return sink
    return name if sink == "SINK" else f"{sink}:{name}"                 # type: ignore[return-value]


def _source_key(peripheral: str, name: str | None) -> str:
    """The key of a SENSE's words among the sources of a machine, and of the context's position in it."""
    if peripheral == "NAMED":
        return name                                                     # type: ignore[return-value]
    return peripheral if name is None else f"{peripheral}:{name}"


def text_bytes(text: str) -> bytes:
    """A host's text as UTF-8; OperandError when it has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise OperandError(f"the text {brief(ascii(text))} has half a surrogate pair, which is not Unicode; give the "
                           "machine whole characters, or bytes") from None


def _piece(model: Any, token: int) -> bytes:
    """The bytes of a token."""
    try:
        return model.decode_bytes(token)
    except LookupError:
        raise OperandError(f"token {token} is outside the vocabulary of {model.name}") from None


def _outside(kind: str, whose: Any, action: Callable[..., Any], *arguments: Any) -> Any:
    """Call the host's code, of a sink or source; what it raises is a StreamError, not an error of m3jit."""
    try:
        return action(*arguments)
    except (M3Error, Blocked):
        raise
    except Exception as e:
        if no_memory(e):
            raise
        raise StreamError(f"{kind} {whose.name} raised {type(e).__name__}: {e}") from e


def _natural_form(value: Any, sink: Any, model: Handle | None) -> str:
    """AUTO: what the sink stores (.wav, .npy), else text for numbers and U8 vectors, else the tensor's bytes."""
    if isinstance(sink, WavSink):
        return "AUDIO_PCM"
    if isinstance(sink, NpySink):
        return "TENSOR"
    if model is not None or value.__class__ is not Tensor or value.dtype is U8 and value.rank == 1:
        return "TEXT"
    return "TENSOR" if isinstance(sink, (Ring, CallbackSink)) else "TEXT" if isinstance(sink, StandardSink) else "RAW"


def _printed(value: Any) -> bytes:
    """A value as text: numbers in their shortest exact form, U8 vectors as UTF-8, other tensors as nested lists."""
    if value.__class__ is Tensor:
        if value.dtype is U8 and value.rank == 1:
            return value.data.tobytes()
        if value.dtype.is_block:
            raise OperandError(f"a {value.dtype.name} tensor has no text form; DEQUANT it first")
        data = value.data
        if value.dtype is BF16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return _nested(data).encode()
    return (repr(value) if value.__class__ is float else str(value)).encode()


def _nested(a: np.ndarray) -> str:
    if a.ndim:
        return "[" + ", ".join(_nested(row) for row in a) + "]"
    if a.dtype.kind != "f":
        return str(a.item())
    return np.format_float_positional(a, unique=True, trim="0") if 1e-5 <= abs(float(a)) < 1e16 else str(a)


def _plain_item(value: Any, form: str, rate: int) -> Item:
    if form == "AUDIO_PCM":
        return Item("AUDIO_PCM", _pcm_frames(value), rate)
    if value.__class__ is not Tensor:
        value = Tensor.of(np.array(value, np.float32 if value.__class__ is float else np.int64)) \
            if form == "TENSOR" else value
        if form == "RAW":
            data = np.array(value, "<f8" if value.__class__ is float else "<i8").tobytes()
            return Item("RAW", data)
    return Item("RAW", value.tobytes()) if form == "RAW" else Item("TENSOR", value)


def _pcm_frames(value: Any) -> np.ndarray:
    """Frames [n, channels] of a F32, F16 or I16 tensor [n] or [n, channels]."""
    if value.__class__ is not Tensor or value.rank not in (1, 2) or value.dtype not in (*FLOATS, I16) or \
            value.dtype is BF16:
        raise OperandError(f"AUDIO_PCM takes F32, F16 or I16 samples of shape [n] or [n, channels], got {said(value)}")
    data = value.data if value.dtype is I16 else value.data.astype(np.float32)
    return data.reshape(value.shape[0], -1) if value.rank == 2 else data[:, None]


def _as_pcm(value: Any) -> Tensor:
    """Samples as F32: one channel [n], several [n, channels]."""
    a = np.asarray(value)
    if a.dtype.kind not in "fiu" or a.ndim not in (1, 2):
        raise OperandError(f"the source gives {a.dtype} of shape {list(a.shape)}, not AUDIO_PCM")
    x = a.astype(np.float32) / np.float32(32768.0) if a.dtype == np.int16 else a.astype(np.float32)
    return Tensor(F32, x.shape if x.ndim == 1 or x.shape[1] > 1 else (len(x),),
                  np.ascontiguousarray(x if x.ndim == 1 or x.shape[1] > 1 else x[:, 0]))


def _empty(form: str, model: Handle | None) -> Tensor:
    dtype = I64 if model is not None else F32 if form in ("AUDIO_PCM", "TENSOR") else U8
    return Tensor(dtype, (0,), np.empty(0, dtype.numpy))


def resolve_file(base: Path | None, name: str, action: str, folder: bool = False) -> Path:
    """A program's file name inside the directory it may use.  StreamError when it is refused."""
    said = brief(repr(name))
    if base is None:
        raise StreamError(f"the program wants to {action} {said}; this machine gives it no files "
                          f"(VM(files=\"directory\") does)")
    try:
        path, root = (base / name).resolve(), base.resolve()
        inside = path.is_relative_to(root)
        missing = inside and (not name or (path == root if folder else path.is_dir()))
    except (OSError, ValueError, RuntimeError) as e:       # a NUL in it, a loop of links
        raise StreamError(f"the program wants to {action} {said}, which cannot be a file name: "
                          f"{getattr(e, 'strerror', None) or e}") from None
    if not inside:
        raise StreamError(f"the program wants to {action} {said}, outside the directory {root} it may use; "
                          f"VM(files=...) names another")
    if missing:
        raise StreamError(f"the program wants to {action} {said}, which is {'a directory' if name else 'no name'}; "
                          f"give the name of a file in {root}")
    return path
