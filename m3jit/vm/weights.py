"""Weights in the layouts kernels read: repacked once, kept as mapped cache files keyed by content.

A layout file holds the packed bytes alone behind a 64-byte header (magic, length, checksum of the key text).  Files are
written to a temporary name and renamed, so that concurrent processes see a whole file or none; a file of the wrong
length or header is removed and made again.  When the cache directory cannot be written (not ours, a full disk), packed
weights live in memory: `WeightStore.in_memory` counts their bytes and `reason` says why (--stats shows both, `m3jit
doctor` tries the folder); no more files are written then by that store.

Weights are looked through for values and scales that are not finite when they are packed for the first time, and small
ones (norms, biases) whenever they are loaded: a `WeightWarning` names tensor and place.  `m3jit verify` looks at all.
"""
from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any, BinaryIO, Callable, Sequence

import numpy as np

from m3jit import cache_files
from m3jit.isa.cells import tiled
from m3jit.ir.region import Weight
from m3jit.ir.weight_check import warn_where_not_finite
from m3jit.isa.types import Tensor
from m3jit.kernels import layout
from m3jit.new_file import NewFile
from m3jit.paths import cache_root

MAGIC = b"m3jitR16\x01\x00\x00\x00\x00\x00\x00\x00"
HEADER = 64
LIMIT_BYTES = 16 << 30                      # of all layout files together; the oldest go first
CHECKED_BYTES = 1 << 20                     # weights used as they are that are looked through for NaN and infinities
PIECE_BYTES = 4 << 20                       # packed at a time: written, not mapped, so that they are not memory in use


class _Pieces:
    """Writes a file in pieces of PIECE_BYTES that begin at multiples of it.

    Linux then keeps it in pages of 2 MB and maps them as such where the file system can (ext4, XFS): a pass over the
    weights misses the address cache less (one token of a 1.1B Q4_K_M model, one thread: 18.4 ms with small pages,
    18.0)."""

    def __init__(self, handle: BinaryIO):
        self.handle, self.piece, self.filled = handle, memoryview(bytearray(PIECE_BYTES)), 0

    def write(self, data: bytes | np.ndarray) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            n = min(len(rest), PIECE_BYTES - self.filled)
            self.piece[self.filled:self.filled + n] = rest[:n]
            self.filled, rest = self.filled + n, rest[n:]
            if self.filled == PIECE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is there: a whole piece, or the last one."""
        self.handle.write(self.piece[:self.filled])
        self.filled = 0


def _in_large_pages(mapped: mmap.mmap) -> None:
    """Ask Linux to read what is not in memory yet in pages of 2 MB (a 1.1B Q4_K_M model read anew: 512 to 538 of 601 MB
    in such pages; 308 to 332 where the beginning of each file had been read in small ones, by its header)."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):       # a kernel without such pages; nothing but speed hangs on it
            mapped.madvise(mmap.MADV_HUGEPAGE)


class WeightStore:
    """Addresses of weights by (tensor, layout).  What it hands out lives as long as the tensor (of
    several: the first)."""

    def __init__(self, root: Path | None = None, progress: Callable[[str, int, int], None] | None = None):
        base = cache_root()
        self.root = root if root is not None else base / "weights" if base is not None else None
        self._held: weakref.WeakKeyDictionary[Tensor, dict[tuple, np.ndarray]] = weakref.WeakKeyDictionary()
        self.lock = threading.Lock()
        self.progress = progress
        self.reason = "" if self.root is not None else "M3JIT_CACHE_DIR is empty"     # why weights are kept in memory
        self._writes = True

    @property
    def mapped(self) -> int:
        """Bytes of packed weights that are mapped from files."""
        return sum(packed.nbytes for packed in self._all_packed() if isinstance(packed.base, np.memmap))

    @property
    def in_memory(self) -> int:
        """Bytes of packed weights that no file has."""
        return sum(packed.nbytes for packed in self._all_packed() if not isinstance(packed.base, np.memmap))

    def _all_packed(self) -> list[np.ndarray]:
        with self.lock:
            return [packed for layouts in self._held.values() for (how, *_), packed in layouts.items() if how == "R16"]

    def array(self, weight: Weight, how: str) -> np.ndarray:
        """The bytes of a weight in layout "raw", "R16" or "tilesN" (an A of SSM_SCAN with N runs, as h is stored)."""
        first, *others = weight if isinstance(weight, tuple) else (weight,)
        key = (how, *others)
        with self.lock:
            layouts = self._held.setdefault(first, {})
            if key not in layouts:
                layouts[key] = (self._packed(first, *others) if how == "R16" else self._raw(first) if how == "raw" else
                                self._tiles(first, int(how[5:])))
            return layouts[key]

    def pointer(self, weight: Weight, how: str) -> int:
        """The address of `array`, for whoever keeps the tensors."""
        return self.array(weight, how).__array_interface__["data"][0]

    def _raw(self, t: Tensor) -> np.ndarray:
        if t.nbytes <= CHECKED_BYTES:
            warn_where_not_finite(t)
        return np.ascontiguousarray(t.data)

    def _tiles(self, t: Tensor, runs: int) -> np.ndarray:
        return tiled(t.data.reshape(runs, -1, t.shape[1]))

    def _packed(self, *tensors: Tensor) -> np.ndarray:
        """Layout R16 of a tensor, or of several of one shape whose tiles alternate."""
        matrices, cols = [_Matrix(t) for t in tensors], tensors[0].shape[-1]
        rows = len(matrices[0].raw)
        name = hashlib.blake2b(f"{' '.join(m.key for m in matrices)} {rows}x{cols} R16 {layout.VERSION}".encode(),
                               digest_size=16).hexdigest()
        nbytes = sum(layout.packed_bytes(m.tensor.dtype, rows, cols) for m in matrices)
        head = MAGIC + nbytes.to_bytes(8, "little") + bytes.fromhex(name)
        head += bytes(HEADER - len(head))
        path = self.root / name[:2] / f"{name}.bin" if self.root is not None else None
        before = self.reason
        found = self._map(path, head, nbytes) if path is not None else None
        if found is not None:
            return found
        for t in tensors:
            warn_where_not_finite(t)
        if path is not None and self._writes:
            try:
                self._write(path, head, matrices)
            except OSError as e:
                self.reason, self._writes = f"{path.parent}: {e.strerror or e}", False
            else:
                found = self._map(path, head, nbytes)
                if found is not None:                  # it took the place of one that could not be used
                    self.reason = before
        if found is None:
            return _rows_packed(matrices, slice(None))
        if cache_files.look_now(name):
            self.trim()
        return found

    def _write(self, path: Path, head: bytes, matrices: Sequence[_Matrix]) -> None:
        """Make the file of a weight.  OSError."""
        rows = len(matrices[0].raw)
        path.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(path, prefix=".part", suffix="") as new:
            pieces = _Pieces(new.handle)
            pieces.write(head)
            row_bytes = sum(m.tensor.dtype.row_bytes(m.tensor.shape[-1]) for m in matrices)
            step = max(1, PIECE_BYTES // max(1, row_bytes) // layout.ROWS) * layout.ROWS
            for at in range(0, rows, step):
                pieces.write(_rows_packed(matrices, slice(at, at + step)))
            pieces.flush()
            new.handle.flush()
            os.fsync(new.handle.fileno())
            new.commit(mode=0o600)

    def _map(self, path: Path, head: bytes, nbytes: int) -> np.ndarray | None:
        """The bytes of a weight's file; None when there is none, or none that can be used (`reason`, or it is
        removed).  Files are renamed into place whole: one that somebody cuts while it is mapped ends the process."""
        try:
            with open(path, "rb") as f:
                if os.fstat(f.fileno()).st_size == HEADER + nbytes:
                    mapped = np.memmap(f, np.uint8, "r", shape=(HEADER + nbytes,))
                    _in_large_pages(mapped.base)
                    if mapped[:HEADER].tobytes() == head:        # not by `f`: that would read small pages
                        with contextlib.suppress(OSError):       # another user's: it is as good
                            os.utime(path)
                        return mapped[HEADER:].view(np.ndarray)
            path.unlink(missing_ok=True)
        except FileNotFoundError:                      # it is made then
            pass
        except OSError as e:
            self.reason = f"{path}: {e.strerror or e}"
        return None

    def trim(self, limit: int = LIMIT_BYTES) -> int:
        """Remove least recently used files if the directory holds more than `limit` bytes; the bytes removed."""
        if self.root is None:
            return 0
        return cache_files.trim(self.root, limit, ".bin")


class _Matrix:
    """A weight as rows: `raw` [rows, bytes]; experts [E, N, K]: their rows one after the other.  key: what it holds."""

    def __init__(self, t: Tensor):
        self.tensor, self.raw = t, t.data.reshape(math.prod(t.shape[:-1]), -1)
        self.key = f"{t.key or hashlib.blake2b(t.data.tobytes(), digest_size=16).hexdigest()} {t.dtype.name}"


def _rows_packed(matrices: Sequence[_Matrix], rows: slice) -> np.ndarray:
    """Layout R16 of some rows, whole tiles of them."""
    parts = [m.raw[rows] for m in matrices]
    count = len(parts[0])
    return layout.alternate([layout.repack(m.tensor.dtype, part, count, m.tensor.shape[-1])
                             for m, part in zip(matrices, parts)], count)
