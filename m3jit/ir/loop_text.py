"""Text form of loop IR: `print_kernel` writes it, `parse_kernel` reads it back.

    kernel scale(x: ptr r f32, y: ptr w f32, n: i64, k: f32) lanes 64 {
        %u0: i64 = add n, 63
        %u1: i64 = idiv %u0, 64
    grid %u1:
        %u2: i64 = mul %group, 64
        %v3: i64 = cvt %lane
        %v4: i64 = add %v3, %u2
        %v5: b1 = lt %v4, n
        %v6: f32 = load_lanes f32 x[%u2] if %v5
        %v7: f32 = mul %v6, k
        store_lanes f32 y[%u2] = %v7 if %v5
    }

* What stands before `grid` is the prologue, what follows is one group's body.
* `%u` values are uniform, `%v` values vary between lanes, `%c` are cells (`var`), `%i` loop indices; only the spelling
  of a definition matters to the parser.  Bare names are parameters; `%group` and `%lane` are built in.
* A bare integer is i64, a bare float f32; other constants carry their type: `7_i32`, `1.5_f64`, `1_b1`.  Infinities and
  NaN are `+inf`, `-inf`, `+nan`.
* Memory: `x[i]` is element i; `x@o[i]` counts from byte offset o.  `if m` masks.
* `cvt` converts to the type on the left; `fold add %v3`; `shuffle_down %v3 by 32`.
* Control: `loop %i0 = lo .. hi step 64 {`, `if %u4 {`, `} else {`, `}`.  `# ...` is a comment.

`canonical(parse_kernel(print_kernel(k))) == canonical(k)` for every kernel that `verify_kernel` accepts.
"""
from __future__ import annotations

import re
from typing import Any, Iterator, NoReturn, Sequence

from m3jit.ir.loop import FLOATS, MEMORY, PURE, TYPES, Buffer, Kernel, LoopError, Param, Value
from m3jit.ir.loop_builder import Builder, Var

_DEFAULT = {int: "i64", float: "f32"}                       # type of a constant written without a suffix
_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"


# -- printing -------------------------------------------------------------------------------------------------------

def print_kernel(kernel: Kernel) -> str:
    """Text of a kernel."""
    return _Printer(kernel).text()


def constant_text(type: str, value: Any) -> str:
    """A constant operand, so that the parser gives back the same type and value."""
    if type == "b1":
        return f"{int(value)}_b1"
    if isinstance(value, float):
        text = "+nan" if value != value else repr(value)
        text = "+inf" if text == "inf" else text
        return text if type == "f32" else f"{text}_{type}"
    return str(value) if type == "i64" else f"{value}_{type}"


def _param_text(p: Param) -> str:
    return f"{p.name}: ptr {p.access} {p.dtype}" if p.kind == "ptr" else f"{p.name}: {p.kind}"


class _Printer:
    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.names: dict[int, str] = {}
        self.used: set[str] = set()
        self.lines: list[str] = []

    def text(self) -> str:
        k = self.k
        params = ", ".join(map(_param_text, k.params))
        self._block(k.prologue, 1)
        head, self.lines = self.lines, []
        self._block(k.body, 1)
        return "\n".join([f"kernel {k.name}({params}) lanes {k.lanes} {{", *head, f"grid {self.ref(k.grid)}:",
                          *self.lines, "}"]) + "\n"

    def ref(self, v: Value) -> str:
        if v.op == "const":
            return constant_text(v.type, v.attrs["value"])
        if v.op == "param":
            return v.attrs["name"]
        if v.op in ("lane", "group"):
            return "%" + v.op
        name = self.names.get(id(v))
        if name is None:
            name = self.names[id(v)] = self._name(v)
        return name

    def _name(self, v: Value) -> str:
        if v.op == "scratch":
            name = f"%{v.attrs['name']}"
            while name in self.used:
                name += "'"
            self.used.add(name)
            return name
        letter = {"var": "c", "index": "i"}.get(v.op, "v" if v.varying else "u")
        return f"%{letter}{len(self.names)}"

    def _block(self, body: Sequence[Value], depth: int) -> None:
        for v in body:
            self._statement(v, depth)

    def _statement(self, v: Value, depth: int) -> None:
        def put(text: str) -> None:
            self.lines.append("    " * depth + text)
        args = [self.ref(a) for a in v.args]
        match v.op:
            case "loop":
                step = f" step {v.attrs['step']}" if v.attrs["step"] != 1 else ""
                put(f"loop {args[2]} = {args[0]} .. {args[1]}{step} {{")
                self._block(v.body, depth + 1)
                put("}")
            case "if":
                put(f"if {args[0]} {{")
                self._block(v.body, depth + 1)
                if v.orelse:
                    put("} else {")
                    self._block(v.orelse, depth + 1)
                put("}")
            case "sync":
                put("sync")
            case "set":
                put(f"set {args[0]} = {args[1]}")
            case "store" | "store_lanes":
                put(f"{v.op} {v.attrs['dtype']} {self._place(v)} = {args[3]}{self._mask(v)}")
            case "scratch":
                put(f"{self.ref(v)} = scratch {v.attrs['dtype']}[{v.attrs['count']}]")
            case _:
                put(f"{self.ref(v)}: {v.type} = {self._result(v, args)}")

    def _result(self, v: Value, args: list[str]) -> str:
        match v.op:
            case "load" | "load_lanes":
                ahead = f" ahead {v.attrs['ahead']}" if "ahead" in v.attrs else ""
                return f"{v.op} {v.attrs['dtype']} {self._place(v)}{self._mask(v)}{ahead}"
            case "var":
                return f"var {'varying' if v.varying else 'uniform'} {args[0]}"
            case "get":
                return f"get {args[0]}"
            case "fold":
                return f"fold {v.attrs['op']} {args[0]}"
            case "shuffle_down":
                return f"shuffle_down {args[0]} by {v.attrs['by']}"
        return f"{v.op} {', '.join(args)}"

    def _place(self, v: Value) -> str:
        base, offset, index = v.args[:3]
        at = (
            ""
            if offset.op == "const" and offset.type == "i64" and offset.attrs["value"] == 0
            else f"@{self.ref(offset)}"
        )
        return f"{self.ref(base)}{at}[{self.ref(index)}]"

    def _mask(self, v: Value) -> str:
        return f" if {self.ref(v.args[-1])}" if v.attrs.get("masked") else ""


# -- parsing --------------------------------------------------------------------------------------------------------

class LoopTextError(LoopError):
    """Text that is no kernel: names the line, what stands there and what was expected."""


_HEADER = re.compile(rf"kernel\s+({_IDENTIFIER})\s*\((.*)\)\s*lanes\s+(\d+)\s*\{{")
_PARAM = re.compile(rf"({_IDENTIFIER})\s*:\s*(?:ptr\s+(r|w|rw)\s+(\w+)|(\w+))")
_NAME = r"%[A-Za-z0-9_']+"
_DEFINITION = re.compile(rf"({_NAME})\s*:\s*(\w+)\s*=\s*(.*)")
_SCRATCH = re.compile(rf"({_NAME})\s*=\s*scratch\s+(\w+)\[(\d+)\]")
_LOOP = re.compile(rf"loop\s+({_NAME})\s*=\s*(\S+)\s*\.\.\s*(\S+?)(?:\s+step\s+(\d+))?\s*\{{")
_IF = re.compile(r"if\s+(\S+)\s*\{")
_PLACE = r"([^\s@\[]+)(?:@([^\s\[]+))?\[([^\s\]]+)\]"
_LOAD = re.compile(rf"(load|load_lanes)\s+(\w+)\s+{_PLACE}(?:\s+if\s+(\S+))?(?:\s+ahead\s+(\d+))?")
_STORE = re.compile(rf"(store|store_lanes)\s+(\w+)\s+{_PLACE}\s*=\s*(\S+)(?:\s+if\s+(\S+))?")
_SET = re.compile(rf"set\s+({_NAME})\s*=\s*(\S+)")
_CONSTANT = re.compile(r"([+-]?(?:inf|nan|[0-9.]+(?:e[+-]?[0-9]+)?))(?:_(\w+))?")


def parse_kernel(text: str) -> Kernel:
    """The kernel a text denotes.  LoopTextError (with the line): no kernel's text; LoopError: an ill-formed kernel."""
    return _Parser(text).kernel()


class _Parser:
    def __init__(self, text: str):
        self.text = text
        self.number = 0                                     # current line, from 1
        self.lines = self._significant(text)
        self.values: dict[str, Value] = {}
        self.vars: dict[str, Var] = {}
        self.buffers: dict[str, Value] = {}

    def _significant(self, text: str) -> Iterator[str]:
        for self.number, line in enumerate(text.splitlines(), 1):
            line = line.split("#", 1)[0].strip()
            if line:
                yield line

    def fail(self, message: str) -> NoReturn:
        raise LoopTextError(f"loop IR, line {self.number}: {message}")

    def kernel(self) -> Kernel:
        header = next(self.lines, None)
        m = _HEADER.fullmatch(header or "")
        if not m:
            self.fail(f"expected 'kernel NAME(PARAMETERS) lanes N {{', got {header!r}")
        self.b = Builder(m[1], int(m[3]))
        for part in filter(None, (p.strip() for p in m[2].split(","))):
            self._param(part)
        line = self._block(("grid",))
        grid = re.fullmatch(r"grid\s+(\S+)\s*:", line)
        if not grid:
            self.fail(f"expected 'grid VALUE:', got {line!r}")
        self._checked(self.b.set_grid, self.operand(grid[1]))
        self._block(("}",))
        extra = next(self.lines, None)
        if extra is not None:
            self.fail(f"nothing may follow the kernel's closing brace, got {extra!r}")
        return self._checked(self.b.finish)

    def _param(self, text: str) -> None:
        m = _PARAM.fullmatch(text)
        if not m or (m[4] and m[4] not in TYPES) or (m[3] and m[3] not in MEMORY):
            self.fail(f"expected 'NAME: TYPE' or 'NAME: ptr r|w|rw MEMORY_TYPE', got {text!r}; types are "
                      f"{', '.join(TYPES)}, memory types {', '.join(MEMORY)}")
        if m[1] in self.values or m[1] in self.buffers:
            self.fail(f"parameter {m[1]} is declared twice")
        if m[3]:
            self.buffers[m[1]] = self.b.ptr(m[1], m[2], m[3]).base
        else:
            self.values[m[1]] = self.b.scalar(m[1], m[4])

    def _checked(self, f, *args: Any, **kw: Any) -> Any:
        """f(...), with the line named in what the builder has to say."""
        try:
            return f(*args, **kw)
        except LoopTextError:
            raise
        except LoopError as e:
            self.fail(str(e))

    # -- operands -----------------------------------------------------------------------------------------------
    def operand(self, text: str) -> Value:
        if text == "%lane":
            return self.b.lane
        if text == "%group":
            return self.b.group
        v = self.values.get(text)
        if v is not None:
            return v
        m = _CONSTANT.fullmatch(text)
        if not m:
            self.fail(f"{text} is not defined here (values are defined before they are used, in the same or an outer "
                      "block)" if text.startswith("%") or text.isidentifier() else f"{text!r} is no operand")
        return self._constant(m[1], m[2], text)

    def _constant(self, number: str, type: str | None, text: str) -> Value:
        try:
            value: int | float = int(number)
        except ValueError:
            try:
                value = float(number)
            except ValueError:
                self.fail(f"{text!r} is no number")
        type = type or _DEFAULT[value.__class__]
        if type not in TYPES:
            self.fail(f"{text!r}: no type {type!r}; expected one of {', '.join(TYPES)}")
        if isinstance(value, float) and type not in FLOATS:
            self.fail(f"{text!r}: a {type} constant is written without a point")
        return self.b.const(type, bool(value) if type == "b1" else value)

    def buffer(self, base: str, offset: str | None) -> Buffer:
        if base not in self.buffers:
            self.fail(f"{base} is no pointer parameter and no scratch array")
        return Buffer(self.buffers[base], self.operand(offset) if offset else None)

    # -- statements ---------------------------------------------------------------------------------------------
    def _block(self, ends: tuple[str, ...]) -> str:
        """Statements up to a line that starts with one of `ends`, which is returned.  Definitions end with the block
        (the prologue's stay visible)."""
        outer = (dict(self.values), dict(self.vars), dict(self.buffers))
        for line in self.lines:
            if line.split(None, 1)[0] in ends:
                if ends != ("grid",):
                    self.values, self.vars, self.buffers = outer
                return line
            self._statement(line)
        self.fail(f"the text ends before {' or '.join(ends)}")

    def _statement(self, line: str) -> None:
        if line == "sync":
            self.b.sync()
        elif m := _SCRATCH.fullmatch(line):
            self.buffers[m[1]] = self.b.scratch(m[1][1:].rstrip("'"), self._memory(m[2]), int(m[3])).base
        elif m := _DEFINITION.fullmatch(line):
            self._define(m[1], m[2], m[3])
        elif m := _STORE.fullmatch(line):
            mask = self.operand(m[7]) if m[7] else None
            self._checked(getattr(self.b, m[1]), self._memory(m[2]), self.buffer(m[3], m[4]), self.operand(m[5]),
                          self.operand(m[6]), mask)
        elif m := _SET.fullmatch(line):
            self._var(m[1]).set(self.operand(m[2]))
        elif m := _LOOP.fullmatch(line):
            self._loop(*m.groups())
        elif m := _IF.fullmatch(line):
            self._if(self.operand(m[1]))
        else:
            self.fail(f"expected a statement, got {line!r}")

    def _memory(self, name: str) -> str:
        if name not in MEMORY:
            self.fail(f"no memory type {name!r}; expected one of {', '.join(MEMORY)}")
        return name

    def _var(self, name: str) -> Var:
        if name not in self.vars:
            self.fail(f"{name} is no variable")
        return self.vars[name]

    def _loop(self, index: str, lo: str, hi: str, step: str | None) -> None:
        with self.b.loop(self.operand(lo), self.operand(hi), int(step or 1)) as i:
            before = self.values
            self.values = {**before, index: i}
            self._block(("}",))
            self.values = before

    def _if(self, cond: Value) -> None:
        with self.b.if_(cond):
            end = self._block(("}",))
        if end == "} else {":
            with self.b.else_():
                end = self._block(("}",))
        if end != "}":
            self.fail(f"expected '}}' or '}} else {{', got {end!r}")

    def _define(self, name: str, type: str, text: str) -> None:
        if name in self.values or name in self.vars or name in ("%lane", "%group"):
            self.fail(f"{name} is defined twice")
        op, _, rest = text.partition(" ")
        rest = rest.strip()
        if op == "var":
            kind, _, init = rest.partition(" ")
            if kind not in ("varying", "uniform"):
                self.fail(f"expected 'var varying|uniform VALUE', got {text!r}")
            self.vars[name] = self._checked(self.b.var, type, self.operand(init.strip()), kind == "varying")
            return
        v = self._checked(self._value, op, rest, type, text)
        if v.type != type:
            self.fail(f"{name} is declared {type}, but {op} gives {v.type}")
        self.values[name] = v

    def _value(self, op: str, rest: str, type: str, text: str) -> Value:
        if m := _LOAD.fullmatch(text):
            mask = self.operand(m[6]) if m[6] else None
            more = {"ahead": int(m[7])} if m[7] and m[1] == "load_lanes" else {}
            return getattr(self.b, m[1])(self._memory(m[2]), self.buffer(m[3], m[4]), self.operand(m[5]), mask, **more)
        if op == "get":
            return self._var(rest).get()
        if op not in PURE or op in ("lane", "group"):
            self.fail(f"no operation {op!r} in {text!r}")
        attrs: dict[str, Any] = {}
        if op == "cvt":
            attrs["to"] = type
        elif op == "fold":
            attrs["op"], _, rest = rest.partition(" ")
            if attrs["op"] not in FOLDS:
                self.fail(f"fold combines with one of {', '.join(FOLDS)}, got {attrs['op']!r}")
        elif op == "shuffle_down":
            m = re.fullmatch(r"(\S+)\s+by\s+(\d+)", rest)
            if not m:
                self.fail(f"expected 'shuffle_down VALUE by COUNT', got {text!r}")
            rest, attrs["by"] = m[1], int(m[2])
        return self.b.pure(op, *(self.operand(a.strip()) for a in rest.split(",") if a.strip()), **attrs)


FOLDS = ("add", "mul", "fmin", "fmax", "imin", "imax", "and", "or")
