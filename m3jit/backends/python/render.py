"""Renders a kernel as readable Python.

The text runs as it stands (slowly: small shapes), or under numba (whole models); only the helper functions it calls
differ: `runtime_plain` and `runtime_numba` offer the same names.  A value that differs between lanes is a vector of
`lanes` elements (a NumPy array when run plain); `+ - * / & | ^ << >> < <= == !=` work element by element.  Pointers are
integer addresses: `load_f32(p, i)` reads element i from address p, `load_lanes_f32(p, i)` the elements i, i + 1, ... of
the lanes, `gather_f32(p, v)` those numbered by the vector v; a last argument is a mask.

A value used once stands inside the expression that uses it, where nothing between the two could change it.
"""
from __future__ import annotations

import keyword
import operator
from dataclasses import dataclass, field
from typing import Any, Sequence

from m3jit.ir.loop import MEMORY, PURE, Kernel, Value, walk

# op -> (operator, its precedence as Python ranks it)
_INFIX = {"or": ("|", 1), "xor": ("^", 2), "and": ("&", 3), "shl": ("<<", 4), "ashr": (">>", 4), "add": ("+", 5),
          "sub": ("-", 5), "mul": ("*", 6), "div": ("/", 6), "lt": ("<", 0), "le": ("<=", 0), "eq": ("==", 0),
          "ne": ("!=", 0)}
_BITWISE = ("or", "xor", "and", "shl", "ashr")
_ATOM, _LOOSE = 9, -1                       # precedence of a name or call; of a conditional expression
_RING = ("add", "sub", "mul")               # wrapping at the end of a chain of these is enough
_WRAPS = (*_RING, "shl")
_WIDTH = 64                                 # an operand longer than this gets a name of its own
_WORDS = """
    lane lane_numbers group groups thread threads i32 i64 f32 f64 inf nan where fma sqrt floor rint absolute negative
    lshr_i32 lshr_i64 idiv irem minimum maximum min max dot4 lookup zext first shuffle_down scratch canonical
    range""".split()
HELPERS = frozenset(
    _WORDS
    + keyword.kwlist
    + [f"{kind}_{t}" for kind in ("load", "load_lanes", "gather", "store", "store_lanes", "scatter") for t in MEMORY]
    + [f"{kind}_{t}" for kind in ("to", "splat", "where", "as") for t in ("b1", "i32", "i64", "f32", "f64")]
    + [f"fold_{op}" for op in ("add", "mul", "fmin", "fmax", "imin", "imax", "and", "or")])


def render_python(kernel: Kernel) -> str:
    """Source of a function `<kernel name>(thread, threads, <parameters>)`."""
    return _Renderer(kernel).text()


def render_grid(kernel: Kernel) -> str:
    """Source of `grid(<parameters>)`, the number of groups of a launch (hosts that enqueue work-groups need it)."""
    r = _Renderer(kernel)
    r.block(kernel.prologue, 1)
    params = ", ".join(r.params.values())
    return "\n".join([f"def grid({params}):", *r.lines, f"    return {r.ref(kernel.grid)}"]) + "\n"


def identifier(name: str) -> str:
    """A Python name for `name` that is no keyword and hides no helper."""
    out = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
    out = out if out[:1].isalpha() or out[:1] == "_" else "k_" + out
    return out + "_" if out in HELPERS else out


def _is_value(v: Value) -> bool:
    """Does the node only compute something (as against changing memory, a cell or control)?"""
    return v.op in PURE or v.op in ("get", "load", "load_lanes")


@dataclass(slots=True)
class _Text:
    """An expression waiting to be put into the one that uses it."""
    value: Value
    text: str
    rank: int
    depends: set = field(default_factory=set)             # cells read (ids), "memory" for loads


class _Renderer:
    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.lines: list[str] = []
        self.scratch: list[Value] = []
        self.pending: dict[int, _Text] = {}
        self.params = {p.name: identifier(p.name) for p in kernel.params}
        self.taken = set(self.params.values()) | HELPERS
        self.names: dict[int, str] = {}
        self.counts: dict[str, int] = {}
        self.users: dict[int, list[Value]] = {}
        self.home: dict[int, int] = {}                    # value -> the block it stands in
        self.users[id(kernel.grid)] = [kernel.grid]
        self._survey(kernel.body)
        self._survey(kernel.prologue)
        self.unwrapped: dict[int, bool] = {}
        self.literals: dict[int, int] = {}                # uniform integers made of constants alone

    def _survey(self, body: Sequence[Value]) -> None:
        """Users and home of every value that something depends on (uses come after definitions: walk backwards)."""
        for v in reversed(body):
            self.home[id(v)] = id(body)
            for part in (v.orelse, v.body):
                if part:
                    self._survey(part)
            if not _is_value(v) or id(v) in self.users:
                for a in v.args[1:2] if v.op == "select" and self._replaces_nan(v) else v.args:
                    self.users.setdefault(id(a), []).append(v)

    # -- text -------------------------------------------------------------------------------------------------------
    def text(self) -> str:
        k = self.k
        self.block(k.prologue, 1)
        groups = self.ref(k.grid)
        head, self.lines = self.lines, []
        self.block(k.body, 2)
        body, self.lines = self.lines, []
        out = [f"def {identifier(k.name)}(thread, threads, {', '.join(self.params.values())}):",
               f'    """{k.lanes} lane{"s" if k.lanes > 1 else ""}; groups are independent."""', *head]
        for s in self.scratch:
            name, size = self.name(s), MEMORY[s.attrs["dtype"]][0] * s.attrs["count"]
            out.append(f"    {name} = scratch({size})")
        if any(a.op == "lane" for v in walk(k.body) for a in v.args):
            out.append("    lane = lane_numbers()")
        out.append(f"    groups = {groups}")
        out.append("    for group in range(groups * thread // threads, groups * (thread + 1) // threads):")
        return "\n".join(out + body) + "\n"

    def emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    # -- names ------------------------------------------------------------------------------------------------------
    def name(self, v: Value) -> str:
        if id(v) not in self.names:
            self.names[id(v)] = self._fresh(*self._stem(v))
        return self.names[id(v)]

    def _fresh(self, stem: str, numbered: bool) -> str:
        """stem and a number that makes it new; stem alone the first time when not `numbered`."""
        name = stem
        while numbered or name in self.taken:
            self.counts[stem] = self.counts.get(stem, 0) + 1
            name, numbered = f"{stem}{self.counts[stem]}", False
        self.taken.add(name)
        return name

    def _stem(self, v: Value) -> tuple[str, bool]:
        match v.op:
            case "scratch":
                return identifier(v.attrs["name"]), False
            case "var":
                return "var", True
            case "index":
                return "i", False
            case "load" | "load_lanes":
                base = v.args[0]
                return (self.params[base.attrs["name"]] if base.op == "param" else self.name(base)) + "_", True
        return "mask" if v.type == "b1" and v.varying else "v" if v.varying else "u", True

    def ref(self, v: Value) -> str:
        """A name or constant."""
        return self.operand(v).text

    def operand(self, v: Value, bare: bool = True) -> _Text:
        """An operand: the pending expression itself (consumed), a name, or a constant.  bare False: a constant carries
        its type (`f32(0.5)`), as it must where no vector beside it says what it is."""
        waiting = self.pending.pop(id(v), None)
        if waiting is not None:
            return waiting
        if v.op == "const":
            return self._constant(v, bare)
        text = self.params[v.attrs["name"]] if v.op == "param" else v.op if v.op in ("lane", "group") else self.name(v)
        return _Text(v, text, _ATOM)

    @staticmethod
    def _constant(v: Value, bare: bool) -> _Text:
        x = v.attrs["value"]
        if v.type in ("f32", "f64"):
            text = float_text(x)
            return _Text(v, text, _ATOM if x >= 0 else 7) if bare else _Text(v, f"{v.type}({text})", _ATOM)
        return _Text(v, str(x), _ATOM if x >= 0 else 7)

    def inside(self, v: Value, rank: int, depends: set, bare: bool, infix: str = "") -> str:
        """Text of an operand, in parentheses where it binds less tightly than `rank`, or where it mixes bits with
        arithmetic or comparison (`infix` is the operator it stands beside): nobody remembers how those bind."""
        t = self.operand(v, bare)
        depends |= t.depends
        mixed = infix and 0 <= t.rank < 7 and t.value.op != infix and (infix in _BITWISE or t.value.op in _BITWISE)
        return t.text if t.rank >= rank and not mixed else f"({t.text})"

    def call(self, function: str, args: Sequence[Value], depends: set, bare: bool = True) -> str:
        return f"{function}({', '.join(self.inside(a, _LOOSE, depends, bare) for a in args)})"

    # -- statements -------------------------------------------------------------------------------------------------
    def block(self, body: Sequence[Value], depth: int) -> None:
        start = len(self.lines)
        for v in body:
            if _is_value(v):
                if self.users.get(id(v)):
                    self._value(v, depth)
            else:
                self._statement(v, depth)
        self._settle(depth, [t for t in self.pending.values() if self.home[id(t.value)] == id(body)])
        if len(self.lines) == start and depth > 1:
            self.emit(depth, "pass")

    def _value(self, v: Value, depth: int) -> None:
        t = self.expression(v)
        users = self.users[id(v)]
        if len(users) == 1 and self.home.get(id(users[0])) == self.home[id(v)] and users[0] is not v and \
                users[0].args.count(v) == 1 and users[0].op not in ("loop", "if") and len(t.text) <= _WIDTH:
            self.pending[id(v)] = t
        else:
            self.emit(depth, f"{self.name(v)} = {t.text}")

    def _settle(self, depth: int, waiting: Sequence[_Text]) -> None:
        """Gives pending expressions names, before something they depend on changes."""
        for t in list(waiting):
            if self.pending.pop(id(t.value), None) is not None:
                self.emit(depth, f"{self.name(t.value)} = {t.text}")

    def _settle_on(self, depth: int, *changes: Any) -> None:
        self._settle(depth, [t for t in self.pending.values() if t.depends & set(changes)])

    def _statement(self, v: Value, depth: int) -> None:
        match v.op:
            case "scratch":
                self.scratch.append(v)
            case "sync":
                self._settle_on(depth, "memory")
            case "var":
                self.emit(depth, f"{self.name(v)} = {self._assigned(v, v.args[0])}")
            case "set":
                text = self._assigned(v.args[0], v.args[1])
                self._settle_on(depth, id(v.args[0]))
                self.emit(depth, f"{self.name(v.args[0])} = {text}")
            case "store" | "store_lanes":
                text = self._store(v)
                self._settle_on(depth, "memory")
                for line in text:
                    self.emit(depth, line)
            case "loop":
                lo, hi, index = v.args
                step = f", {v.attrs['step']}" if v.attrs["step"] != 1 else ""
                start = "" if lo.op == "const" and lo.attrs["value"] == 0 and not step else f"{self.ref(lo)}, "
                head = f"for {self.name(index)} in range({start}{self.ref(hi)}{step}):"
                self._compound(v, head, depth)
            case "if":
                self._compound(v, f"if {self.ref(v.args[0])}:", depth)

    def _compound(self, v: Value, head: str, depth: int) -> None:
        self._settle(depth, [t for t in self.pending.values() if t.depends])
        self.emit(depth, head)
        self.block(v.body, depth + 1)
        if v.orelse:
            self.emit(depth, "else:")
            self.block(v.orelse, depth + 1)

    def _assigned(self, cell: Value, value: Value) -> str:
        if cell.varying and not value.varying:
            return self.call(f"splat_{cell.type}", [value], set())
        return self.inside(value, _LOOSE, set(), bare=False)

    # -- memory -----------------------------------------------------------------------------------------------------
    def _address(self, v: Value, depends: set) -> str:
        base, offset = v.args[:2]
        if offset.op == "const" and offset.attrs["value"] == 0:
            return self.ref(base)
        return f"{self.ref(base)} + {self.inside(offset, 5, depends, True)}"

    def _access(self, v: Value, depends: set) -> list[str]:
        """Helper name, address and index."""
        kind = {"load_lanes": "load_lanes", "store_lanes": "store_lanes", "load": "gather", "store": "scatter"}[v.op]
        if not v.op.endswith("_lanes") and not v.args[2].varying:
            kind = v.op
        return [f"{kind}_{v.attrs['dtype']}", self._address(v, depends), self.inside(v.args[2], _LOOSE, depends, True)]

    def _load(self, v: Value, depends: set) -> tuple[str, int]:
        depends.add("memory")
        name, *args = self._access(v, depends)
        if not v.attrs.get("masked"):
            return f"{name}({', '.join(args)})", _ATOM
        mask = self.inside(v.args[3], _LOOSE if v.varying else 0, depends, True)
        if v.varying:
            return f"{name}({', '.join([*args, mask])})", _ATOM
        zero = f"{v.type}(0.0)" if v.type in ("f32", "f64") else "0"
        return f"{name}({', '.join(args)}) if {mask} else {zero}", _LOOSE

    def _store(self, v: Value) -> list[str]:
        name, *args = self._access(v, set())
        args.append(self.inside(v.args[3], _LOOSE, set(), bare=False))
        mask = self.inside(v.args[4], _LOOSE, set(), True) if v.attrs.get("masked") else None
        if mask is not None and v.varying:
            args.append(mask)
        text = f"{name}({', '.join(args)})"
        return [f"if {mask}:", f"    {text}"] if mask is not None and not v.varying else [text]

    # -- expressions ------------------------------------------------------------------------------------------------
    def expression(self, v: Value) -> _Text:
        depends: set = set()
        if v.op == "get":
            depends.add(id(v.args[0]))
            return _Text(v, self.name(v.args[0]), _ATOM, depends)
        if v.op in ("load", "load_lanes"):
            return _Text(v, *self._load(v, depends), depends)
        folded = self._folded(v)
        if folded is not None:
            self.literals[id(v)] = folded
            return _Text(v, str(folded), _ATOM if folded >= 0 else 7)
        text, rank = self._pure(v, depends)
        if v.op in _WRAPS and not v.varying and v.type in ("i32", "i64") and not self._unwrapped(v):
            text, rank = f"{v.type}({text})", _ATOM
        return _Text(v, text, rank, depends)

    def _folded(self, v: Value) -> int | None:
        """A sum, product or shift of constants: Python would compute it at once, without wrapping."""
        args = [a.attrs["value"] if a.op == "const" else self.literals.get(id(a)) for a in v.args]
        if v.op not in _WRAPS or v.type not in ("i32", "i64") or None in args:
            return None
        exact = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "shl": operator.lshift}[v.op](*args)
        half = 1 << (31 if v.type == "i32" else 63)
        return (exact + half) % (2 * half) - half

    def _unwrapped(self, v: Value) -> bool:
        """May a uniform sum or product stay unwrapped?  Yes if every user is one too, which is wrapped at the end of
        the chain, or uses it as an address or bound, which are in range or a fault."""
        if id(v) not in self.unwrapped:
            self.unwrapped[id(v)] = v.op in _RING and all(self._takes_any(u, v) for u in self.users[id(v)])
        return self.unwrapped[id(v)]

    @staticmethod
    def _takes_any(user: Value, v: Value) -> bool:
        if user.op in _RING:
            return not user.varying
        if v.type != "i64":
            return False
        if user.op in ("load", "load_lanes"):
            return v in user.args[1:3]
        if user.op in ("store", "store_lanes"):
            return v in user.args[1:3] and v is not user.args[3]
        return user.op == "loop"

    def _pure(self, v: Value, depends: set) -> tuple[str, int]:
        """(text, precedence) of a pure operation."""
        op, args, kind = v.op, v.args, v.args[0].type if v.args else v.type
        typed = any(a.varying for a in args)              # some operand is a vector: constants take its type
        if op in _INFIX:
            sign, rank = _INFIX[op]
            left, right = (self.inside(a, rank + d, depends, typed or kind not in ("f32", "f64"), op)
                           for a, d in zip(args, (rank == 0, 1)))
            return f"{left} {sign} {right}", rank
        match op:
            case "select":
                return self._select(v, depends)
            case "not":
                return (f"~{self.inside(args[0], 8, depends, True)}", 7) if typed else \
                    (f"not {self.inside(args[0], 0, depends, True)}", _LOOSE)
            case "abs" if not typed and kind in ("i32", "i64"):
                return f"{v.type}({self.call('absolute', args, depends)})", _ATOM
            case "neg" if typed or kind not in ("f32", "f64"):
                text = f"-{self.inside(args[0], 8, depends, True)}"
                return (text, 7) if typed else (f"{v.type}({text})", _ATOM)
            case "cvt" if not typed and (kind, v.type) == ("i32", "i64"):
                t = self.operand(args[0])                  # the same number
                depends |= t.depends
                return t.text, t.rank
            case "zext" if not typed:
                return f"{self.inside(args[0], 3, depends, True)} & 0xFFFFFFFF", 3
            case "shuffle_down":
                return f"shuffle_down({self._vector(args[0], depends)}, {v.attrs['by']})", _ATOM
            case "fold":
                return f"fold_{v.attrs['op']}({self._vector(args[0], depends)})", _ATOM
            case "first":
                return (f"first({self.inside(args[0], _LOOSE, depends, True)})", _ATOM) if typed else \
                    (self.inside(args[0], _ATOM, depends, False), _ATOM)
            case "imin" | "imax":
                name = {"imin": "min", "imax": "max"}[op] + ("imum" if typed else "")
                return self.call(name, args, depends), _ATOM
        name = {"abs": "absolute", "neg": "negative", "lshr": f"lshr_{kind}", "bits": f"as_{v.type}",
                "cvt": f"to_{v.type}"}.get(op, op)
        return self.call(name, args, depends, bare=typed), _ATOM

    def _vector(self, v: Value, depends: set) -> str:
        return self.inside(v, _LOOSE, depends, True) if v.varying else self.call(f"splat_{v.type}", [v], depends)

    @staticmethod
    def _replaces_nan(v: Value) -> bool:
        """Is it `x == x ? x : NaN`?"""
        c, a, b = v.args
        return c.op == "eq" and c.args[0] is c.args[1] is a and b.op == "const" and b.attrs["value"] != b.attrs["value"]

    def _select(self, v: Value, depends: set) -> tuple[str, int]:
        c, a, b = v.args
        if self._replaces_nan(v):
            return f"canonical({self.inside(a, _LOOSE, depends, False)})", _ATOM
        if not v.varying:
            typed = v.type in ("f32", "f64")
            condition = self.inside(c, 0, depends, True)
            a_text, b_text = (self.inside(x, 0, depends, not typed) for x in (a, b))
            return f"{a_text} if {condition} else {b_text}", _LOOSE
        name = "where" if a.varying or b.varying else f"where_{v.type}"
        return self.call(name, v.args, depends), _ATOM


def float_text(x: float) -> str:
    """A float literal that Python reads back exactly."""
    if x != x:
        return "nan"
    if x in (float("inf"), float("-inf")):
        return "inf" if x > 0 else "-inf"
    return repr(x)
