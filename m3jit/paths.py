"""Where m3jit keeps files of its own."""
from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path | None:
    """$M3JIT_CACHE_DIR, else $XDG_CACHE_HOME/m3jit, else ~/.cache/m3jit; None when M3JIT_CACHE_DIR is empty (no cache).

    Below it: `cpu/` compiled code, `weights/` repacked weights, `models/` obtained models, `tokenizers/` tables."""
    given = os.environ.get("M3JIT_CACHE_DIR")
    if given is not None:
        return Path(given) if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m3jit"
