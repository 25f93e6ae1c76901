"""Model files in memory without reading them."""
from __future__ import annotations

import mmap
import os
import stat

from m3jit.models.model_error import ModelFileError


def map_file(path: str, shortest: int, shortest_is: str, kind: str, damaged: str) -> tuple[mmap.mmap, int]:
    """Map a regular file read-only; also its modification time in ns.  Nothing is opened that could block.

    ModelFileError: no regular file (the remedy asks for `kind`), one below `shortest` bytes (which are `shortest_is`;
    the remedy is `damaged`), or one that cannot be opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError(path, "is not a regular file", remedy=f"Give a {kind}.")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < shortest:
                raise ModelFileError(path, f"has {status.st_size} bytes",
                                     expected=f"at least {shortest}, {shortest_is}", remedy=damaged)
            return mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ), status.st_mtime_ns
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened ({error.strerror})",
                             remedy="Check the path and its permissions.") from error
    except ValueError as error:  # a path with a NUL, or a file that shrank between fstat and mmap
        raise ModelFileError(path, f"cannot be opened ({error})", remedy="Check the path.") from None
