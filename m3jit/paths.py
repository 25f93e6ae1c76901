"""Where m3jit keeps files of its own."""
from __future__ import annotations

import os
import sys
from pathlib import Path


def user_folder() -> Path:
    """The user's cache folder for m3jit: $XDG_CACHE_HOME/m3jit, else the platform's usual place."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):         # the XDG specification: relative paths are to be ignored
        return Path(base) / "m3jit"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "m3jit" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "m3jit"
    return Path.home() / ".cache" / "m3jit"


def cache_root() -> Path | None:
    """$M3JIT_CACHE_DIR, else `user_folder`; None when M3JIT_CACHE_DIR is empty (nothing is cached).

    Below it: `cpu/` compiled code, `weights/` repacked weights, `models/` obtained models."""
    given = os.environ.get("M3JIT_CACHE_DIR")
    if given is not None:
        return Path(given) if given else None
    return user_folder()
