"""Reads `.npy` files of plain numbers."""
from __future__ import annotations

import os

import numpy as np

MAGIC, ARCHIVE = b"\x93NUMPY", b"PK"


def read_npy(path: str | os.PathLike, mapped: bool = False) -> np.ndarray:
    """The array of a `.npy` file; mapped: without reading it all.  OSError when it cannot be read; ValueError says why
    it is no such file (`... is not a .npy file`, without the path)."""
    with open(path, "rb") as file:
        magic = file.read(len(MAGIC))
    if magic[:2] == ARCHIVE:
        raise ValueError("holds several arrays; save one with numpy.save")
    if magic != MAGIC:
        raise ValueError(r"is not a .npy file: it does not begin with \x93NUMPY; write one with numpy.save")
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, MemoryError):
        raise
    except Exception as error:                             # NumPy raises many kinds on a damaged file
        why = "its elements are Python objects, not numbers, or its header is damaged" if "pickle" in str(error) else \
            f"it is damaged ({error})"
        raise ValueError(f"is not a .npy file of numbers: {why}") from None
