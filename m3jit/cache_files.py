"""Files of a cache on a disk, by age: the least recently used ones go when there are too many bytes.

A cache is looked through after one file in LOOK_EVERY that is made.  Which one that is follows from the file's name, a
hash, not from a count: so processes that make a few files each look as seldom as one that makes many.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator

LOOK_EVERY = 64


def look_now(name: str) -> bool:
    """Whether to look through the cache behind a file of this name (hexadecimal digits of a hash)."""
    return int(name[-8:], 16) % LOOK_EVERY == 0


def files_below(root: Path, ending: str = "") -> list[tuple[float, int, str]]:
    """(time of last use, bytes, path) of the files in the folders of `root`; what vanishes meanwhile is left out."""
    found = []
    for folder in _entries(root):
        if folder.is_dir():
            for file in _entries(folder.path):
                if file.name.endswith(ending):
                    try:
                        s = file.stat()
                    except OSError:                    # another process has removed it meanwhile
                        continue
                    found.append((s.st_mtime, s.st_size, file.path))
    return found


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from found
    except OSError:                                    # not there, or not ours to read: nothing to remove
        return


def trim(root: Path, limit: int, ending: str = "") -> int:
    """Remove least recently used files until those left have at most 7/8 of `limit` bytes, if they have more than
    `limit`; the bytes removed."""
    files = files_below(root, ending)
    total = sum(size for _, size, _ in files)
    if total <= limit:
        return 0
    removed = 0
    for _, size, path in sorted(files, key=lambda file: (file[0], file[2])):
        if total - removed <= limit * 7 // 8:
            break
        try:
            os.unlink(path)
        except OSError:                                # it is still there, or another process removed it
            continue
        removed += size
    return removed
