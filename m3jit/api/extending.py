"""`@m3jit.extension`: an opcode of one's own under ESCAPE, written as a Python, NumPy or numba function."""
from __future__ import annotations

import functools
import inspect
import re
from typing import Any, Callable, Literal, TypeVar, get_args, get_origin

from m3jit.errors import UserError
from m3jit.isa.extension_rows import OPTIONAL, ROWS, ExtensionRow, add_row, make_row, option, remove_row
from m3jit.isa.fields import Field
from m3jit.vm.extensions import REGISTRY, Extension

MNEMONIC = re.compile(r"[A-Z][A-Z0-9_]*\Z")
F = TypeVar("F", bound=Callable[..., Any])


def extension(*, number: int, name: str | None = None, version: tuple[int, int] = (1, 0), outputs: int = 1,
              state: bool = False, replace: bool = False, pack: Callable[[Any], Any] | None = None,
              unpack: Callable[[Any], Any] | None = None) -> Callable[[F], F]:
    """Declare a function as extension opcode `number` (0..255) of this process; the assembler then knows `name`.

    Parameters without a default are source registers: NumPy arrays (read-only) or numbers.  A default of None makes
    the register optional.  Parameters with a number, a bool or a word (annotated `Literal["A", "B"]`) as default are
    options, written `KEY=value` (flags bare) and kept in the frame.  The function returns the destinations' values:
    one, a tuple of `outputs`, or None for outputs=0; arrays of float64 become F32.

        @m3jit.extension(name="CLAMP", number=17)
        def clamp(x, *, limit: float = 1.0):
            return np.clip(x, -limit, limit)            # CLAMP rD, rX, LIMIT=2.5

    state=True: the first parameter is what the context holds for this extension (None at first), and the function
    returns (values, new state).  The state is a root value: FORK, ABORT and RESTORE carry it, so it must not be changed
    in place.  A program asks for the same major and at least its minor version; `OPTIONAL` in the assembly lets
    machines without the extension skip it.  The same arguments must always give the same bytes: replays and rollbacks
    rely on it.  pack, unpack: what makes a tree of plain values (None, numbers, text, bytes, lists) of a state, and the
    state again, for versions on a disk; states that are such values, tuples, dicts or arrays need none.  replace: take
    over a name or number already declared (notebooks).  UserError: a declaration that cannot
    be encoded, or that is taken."""
    def declare(function: F) -> F:
        mnemonic = (name or getattr(function, "__name__", "")).upper()
        if not MNEMONIC.match(mnemonic):
            raise UserError(f"extension {mnemonic!r}: a mnemonic is letters, digits and _, beginning with a letter")
        try:
            sources, options = _operands(function, state)
            row = make_row(mnemonic, number, version, outputs, sources, options, inspect.getdoc(function) or mnemonic)
            if replace:
                forget(mnemonic)
                for other in [n for n, r in ROWS.items() if (r.number, r.version[0]) == (number, version[0])]:
                    forget(other)
            add_row(row, replace)
        except ValueError as e:
            raise UserError(f"extension {mnemonic}: {e}") from None
        REGISTRY.add(Extension(mnemonic, number, version, _decoding(row, function), state, pack, unpack))
        return function
    return declare


def forget(name: str) -> None:
    """Undo a declaration; unknown names are ignored."""
    remove_row(name)
    for e in [e for e in REGISTRY if e.name == name]:
        REGISTRY.remove(e)


def _operands(function: Callable[..., Any], state: bool) -> tuple[list[tuple[str, bool]], list[Field]]:
    """Source registers (name, may be absent) and options of a function's parameters."""
    parameters = list(inspect.signature(function).parameters.values())
    hints = _hints(function)
    if state:
        if not parameters:
            raise ValueError("with state=True the first parameter is the state")
        parameters = parameters[1:]
    sources: list[tuple[str, bool]] = []
    options: list[Field] = []
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ValueError(f"*{p.name}: an instruction has a fixed number of operands")
        if p.name in ("rd", OPTIONAL) or not p.name.isascii():
            raise ValueError(f"a parameter cannot be named {p.name}")
        if p.default is p.empty or p.default is None:
            if p.kind is p.KEYWORD_ONLY:
                raise ValueError(f"option {p.name} needs a default: a number, a bool or a word")
            if options:
                raise ValueError(f"register {p.name} stands behind options")
            sources.append((p.name, p.default is None))
        else:
            options.append(_option(p.name, p.default, hints.get(p.name)))
    return sources, options


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return inspect.get_annotations(getattr(function, "py_func", function), eval_str=True)
    except Exception:                # an annotation that cannot be evaluated says nothing about the encoding
        return {}


def _option(name: str, default: Any, hint: Any) -> Field:
    if isinstance(default, str):
        if get_origin(hint) is not Literal or default not in get_args(hint):
            raise ValueError(f'option {name} is a word; annotate it Literal["{default}", ...] with all its words')
        return option(name, default.upper(), tuple(str(w).upper() for w in get_args(hint)))
    if isinstance(default, (bool, int)):
        return option(name, default)
    if isinstance(default, float):
        return option(name, default)
    raise ValueError(f"option {name}: a default of type {type(default).__name__}; use a number, a bool or a word")


def _decoding(row: ExtensionRow, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the machine calls it: options come as the payload's bytes."""
    words = {f.name: {w.upper(): w for w in get_args(_hints(function)[f.name])} for f in row.options
             if hasattr(f, "words")}
    @functools.lru_cache(maxsize=256)
    def decoded(immediate: bytes) -> tuple[tuple[str, Any], ...]:
        out = []
        for f in row.options:
            value = f.decode(immediate, 0)
            out.append((f.name, words[f.name][value] if f.name in words else value))
        return tuple(out)

    def call(*values: Any, immediate: bytes) -> Any:
        return function(*values, **dict(decoded(immediate[:row.option_bytes])))
    return functools.update_wrapper(call, getattr(function, "py_func", function))
