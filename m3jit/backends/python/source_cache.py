"""Kernels rendered to Python files and compiled by numba, which keeps the machine code beside them.

Where: the directory of the disk cache (see `cpu.cache`), below it `python/`.  numba caches only functions that come
from a real file of a module that can be found again: each kernel is written once to `k_<hash>.py`, named by the hash
of its text and of the helpers' sources, and loaded as a module of that name.  Without a cache directory the text is
compiled in memory, every time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Callable

from m3jit.backends.python.render import identifier, render_python
from m3jit.cache_files import look_now
from m3jit.ir.loop import Kernel
from m3jit.new_file import NewFile

LIMIT_BYTES = 256 << 20                   # of sources and machine code together
_HEAD = '''"""Kernel {name}."""
from numba import njit

from m3jit.backends.python.runtime_numba import namespace

globals().update(namespace({lanes}))


@njit(error_model="numpy", boundscheck=False, cache={cache})
'''


def compiled_function(kernel: Kernel) -> Callable:
    """The kernel as a numba function f(thread, threads, *parameters); its machine code is made or read when it is first
    called."""
    directory = cache_directory()
    text = _HEAD.format(name=kernel.name, lanes=kernel.lanes, cache=directory is not None) + render_python(kernel)
    name = "k_" + hashlib.blake2b((text + _helpers_version()).encode(), digest_size=12).hexdigest()
    if directory is not None:
        try:
            return getattr(_module(directory, name, text), identifier(kernel.name))
        except OSError as e:
            _refused(directory, e)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text.replace("cache=True", "cache=False"), f"<kernel {kernel.name}>", "exec"), names)
    return names[identifier(kernel.name)]


_unwritable: list[str] = []               # directories that refused a file in this process


def _refused(directory: Path, e: OSError) -> None:
    _unwritable.append(str(directory))


def cache_directory() -> Path | None:
    """Where sources and machine code go, or None when the cache is turned off or cannot be written."""
    from m3jit.backends.cpu.cache import default_directory
    cpu = default_directory()
    directory = cpu.parent / "python" if cpu is not None else None
    return None if str(directory) in _unwritable else directory


@functools.cache
def _helpers_version() -> str:
    """Hash of what compiled code depends on beside its own text."""
    import llvmlite
    import numba
    h = hashlib.blake2b(f"{numba.__version__} {llvmlite.__version__}".encode(), digest_size=12)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()


def _module(directory: Path, name: str, text: str) -> Any:
    """The module of a source file, written if it is not there."""
    if name in sys.modules:
        return sys.modules[name]
    path = directory / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        directory.mkdir(parents=True, exist_ok=True)
        if look_now(name.removeprefix("k_")):
            trim(directory)
        with NewFile(path, prefix=".new-", suffix="") as new:
            new.handle.write(text.encode())
            new.commit(mode=0o600)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module            # numba finds the function again through its module
    spec.loader.exec_module(module)
    return module


def trim(directory: Path, limit: int = LIMIT_BYTES) -> None:
    """Removes the oldest kernels until their files take less than 7/8 of the limit, if they exceed it."""
    sizes: dict[str, int] = {}
    ages: dict[str, float] = {}
    files: dict[str, list[Path]] = {}
    for path in [*directory.glob("k_*.py"), *(directory / "__pycache__").glob("k_*")]:
        name = path.name.split(".")[0]
        try:
            s = path.stat()
        except OSError:
            continue
        sizes[name] = sizes.get(name, 0) + s.st_size
        ages[name] = max(ages.get(name, 0.0), s.st_mtime)
        files.setdefault(name, []).append(path)
    total = sum(sizes.values())
    if total <= limit:
        return
    for name in sorted(ages, key=ages.get):
        if total <= limit * 7 // 8:
            return
        for path in files[name]:
            path.unlink(missing_ok=True)
        total -= sizes[name]
