"""The floating-point control word: round to nearest, nothing flushed to zero, while Python code computes.

NumPy and numba compute with whatever the calling thread has set; other libraries change it.
"""
from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
from typing import Any, Iterator

_DEFAULT = ctypes.c_void_p(-1)               # FE_DFL_ENV of glibc and of Apple's and the BSDs' libm
_ENVIRONMENT_BYTES = 64                      # more than any fenv_t


@functools.cache
def _libm() -> Any:
    name = ctypes.util.find_library("m")
    libm = ctypes.CDLL(name) if name else None
    return libm if libm is not None and hasattr(libm, "fesetenv") else None


@contextlib.contextmanager
def default_rounding() -> Iterator[None]:
    """Sets the default environment and puts the caller's back.  Without a C library that offers it (not on Linux):
    nothing is changed."""
    libm = _libm()
    if libm is None:
        yield
        return
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    libm.fegetenv(saved)
    libm.fesetenv(_DEFAULT)
    try:
        yield
    finally:
        libm.fesetenv(saved)
