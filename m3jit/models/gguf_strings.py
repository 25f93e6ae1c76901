"""Arrays of strings inside a mapped GGUF file, indexed without being materialised.

On disk a string is a u64 length and that many bytes, so element i is found only by walking i lengths. A vocabulary
has 10^5 of them; `index_strings` walks them with NumPy, some 20 ns each, and `StringArray` decodes on demand.
"""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from m3jit.models.model_error import ModelFileError

_HEADER = 8  # bytes of a length
_FIRST_WINDOW, _LAST_WINDOW = 1 << 16, 1 << 20
_WORTHWHILE = 64  # fewer strings than this found by one window count as a failure of the fast path


class StringArray(Sequence[str]):
    """An immutable sequence of strings living in a mapped file.

    `starts[i]` is the byte offset of string i's first byte; its length is the distance to the next header.
    Strings must be UTF-8: a bad one raises ModelFileError when it is read, naming its index. `bytes_at` never decodes.
    """

    def __init__(self, path: str, key: str, data: np.ndarray, starts: np.ndarray, end: int) -> None:
        self._path, self._key, self._data, self._starts, self._end = path, key, data, starts, end

    def __len__(self) -> int:
        return len(self._starts)

    def _span(self, index: int) -> tuple[int, int]:
        count = len(self._starts)
        if not -count <= index < count:
            raise IndexError(f"{self._key}: index {index} outside an array of {count}")
        index %= count
        stop = int(self._starts[index + 1]) - _HEADER if index + 1 < count else self._end
        return int(self._starts[index]), stop

    def bytes_at(self, index: int) -> bytes:
        """String `index` as its bytes, undecoded."""
        start, stop = self._span(index)
        return self._data[start:stop].tobytes()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        raw = self.bytes_at(index)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._bad_text(index % len(self), error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (StringArray, list, tuple)):
            return len(self) == len(other) and self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<StringArray {self._key!r} of {len(self)}>"

    def _bad_text(self, index: int, error: UnicodeDecodeError) -> ModelFileError:
        return ModelFileError(
            self._path, f"is not valid UTF-8 ({error.reason})", offset=self._span(index)[0] + error.start,
            item=f"{self._key}[{index}]", remedy="The file is damaged: obtain or convert it again.")

    def tolist(self) -> list[str]:
        """All strings. Faster than indexing: the headers are cut out and the rest is decoded and split in one go."""
        count = len(self)
        if count == 0:
            return []
        base = int(self._starts[0]) - _HEADER
        region = self._data[base:self._end]
        headers = self._starts - (_HEADER + base)
        keep = np.ones(len(region), bool)
        for byte in range(_HEADER - 1):
            keep[headers + byte] = False
        # A length is below 2^56, so the last byte of its header is 0 and serves as the separator.
        joined = region[keep].tobytes()
        if joined.count(0) == count:
            try:
                return joined.decode().split("\0")[1:]
            except UnicodeDecodeError:
                pass  # the slow way below finds which string it is
        return [self[i] for i in range(count)]


def index_strings(path: str, key: str, data: np.ndarray, pos: int, count: int) -> tuple[np.ndarray, int]:
    """Walk `count` strings whose first header is at `pos`; return the offsets of their first bytes, and the end.

    Fast path: when strings hold no zero byte and are 1 to 255 long, headers are exactly the places where a non-zero
    byte is followed by seven zeros. Candidates found so are accepted only while each stands where its predecessor's
    length says, so a coincidence inside a string cannot mislead. Otherwise lengths are read one at a time, in runs
    that double while the fast path keeps failing, which bounds the time for any input.

    Raises ModelFileError when a string leaves the file. The caller has checked 8 * count against the file's size.
    """
    starts = np.empty(count, np.int64)
    size, done, window, slow_run = len(data), 0, _FIRST_WINDOW, 1
    while done < count:
        found, pos = _index_window(data, pos, starts[done:], window)
        done += found
        if found >= _WORTHWHILE:
            window, slow_run = min(window * 4, _LAST_WINDOW), 1
            continue
        window = _FIRST_WINDOW
        run_end = min(done + slow_run, count)
        while done < run_end:
            length = int.from_bytes(data[pos:pos + _HEADER].tobytes(), "little") if pos + _HEADER <= size else None
            if length is None or length > size - pos - _HEADER:
                raise _string_outside(path, key, done, count, pos, length, size)
            starts[done] = pos + _HEADER
            pos += _HEADER + length
            done += 1
        slow_run = min(slow_run * 2, 4096)
    return starts, pos


def _index_window(data: np.ndarray, pos: int, starts: np.ndarray, window: int) -> tuple[int, int]:
    """The fast path of `index_strings` on data[pos:pos+window]: (strings accepted, position after them)."""
    view = data[pos:pos + window]
    zero = view == 0
    zeros = zero[:-1] & zero[1:]
    zeros = zeros[:-2] & zeros[2:]
    zeros = zeros[:-3] & zeros[3:]  # zeros[p]: the seven bytes from p on are zero
    heads = np.flatnonzero(zeros[1:] & ~zero[:max(len(zeros) - 1, 0)])
    if len(heads) == 0 or heads[0] != 0:
        return 0, pos
    after = heads + (_HEADER + view[heads].astype(np.int64))
    broken = np.flatnonzero(heads[1:] != after[:-1])
    found = min(int(broken[0]) + 1 if len(broken) else len(heads), len(starts))
    # The last string may run past the window, or past the file: leave such a one to the checked slow path.
    if after[found - 1] > len(view):
        found -= 1
    if found == 0:
        return 0, pos
    starts[:found] = heads[:found] + (pos + _HEADER)
    return found, pos + int(after[found - 1])


def _string_outside(path: str, key: str, index: int, count: int, pos: int, length: int | None, size: int
                    ) -> ModelFileError:
    what = "the file ends inside its length" if length is None else f"its length {length} leaves the file"
    return ModelFileError(path, what, offset=pos, item=f"{key}[{index}] of {count}",
                          expected=f"at most {max(size - pos - _HEADER, 0)} bytes",
                          remedy="The file is truncated or damaged: obtain or convert it again.")
