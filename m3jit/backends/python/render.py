"""Renders a kernel as readable Python.

The text runs as it stands (slowly: small shapes), or under numba (whole models); only the helper functions it calls
differ: `runtime_plain` and `runtime_numba` offer the same names.  Pointers are integer addresses; `load_f32(p + 4 * i)`
reads memory.  Lane-varying statements stand in `for lane in range(L)` loops; a value that crosses such loops lives in
an array of L elements.
"""
from __future__ import annotations

from typing import Any, Sequence

from m3jit.ir.loop import MEMORY, Kernel, Value

_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "eq": "==",
          "ne": "!="}
_CALLS = {"sqrt": "sqrt_{t}", "fma": "fma_{t}", "floor": "floor_{t}", "rint": "rint_{t}", "idiv": "idiv",
          "irem": "irem", "lshr": "lshr_{t}", "dot4": "dot4"}
_NUMPY = {"f32": "np.float32", "f64": "np.float64", "i32": "np.int32", "i64": "np.int64", "b1": "np.bool_"}
_COMBINE = {"add": "{a} + {b}", "mul": "{a} * {b}", "imin": "min({a}, {b})", "imax": "max({a}, {b})",
            "fmin": "fmin({a}, {b})", "fmax": "fmax({a}, {b})", "and": "{a} & {b}", "or": "{a} | {b}"}


def render_python(kernel: Kernel) -> str:
    """Source of a function `<kernel name>(thread, threads, <parameters>)`."""
    return _Renderer(kernel).text()


def identifier(name: str) -> str:
    out = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return out if out[:1].isalpha() or out[:1] == "_" else "k_" + out


class _Renderer:
    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.names: dict[int, str] = {}
        self.arrays: dict[int, Value] = {}
        self.runs: dict[int, int] = {}            # varying node -> lane loop it is computed in
        self.run = 0
        self.lines: list[str] = []
        self.scratch: list[Value] = []
        self._assign_runs(kernel.body)
        self._find_arrays(kernel.body)

    # -- lane loops -------------------------------------------------------------------------------------------------
    @staticmethod
    def _in_lane_loop(v: Value) -> bool:
        """Statements that run once per lane."""
        if v.op in ("loop", "if", "sync", "scratch", "fold", "first", "shuffle_down", "var"):
            return False
        return v.varying

    @staticmethod
    def _ends_run(v: Value) -> bool:
        """Statements that must not move before the lane loop that is being collected."""
        return v.op in ("loop", "if", "sync", "fold", "first", "shuffle_down", "var", "load", "store", "set", "get") and \
            not (v.varying and v.op in ("load", "store", "set", "get"))

    def _assign_runs(self, body: Sequence[Value]) -> None:
        self.run += 1
        for v in body:
            if self._in_lane_loop(v):
                self.runs[id(v)] = self.run
            elif self._ends_run(v):
                self.run += 1
                for part in (v.body, v.orelse):
                    if part:
                        self._assign_runs(part)
                        self.run += 1
        self.run += 1

    def _find_arrays(self, body: Sequence[Value]) -> None:
        for v in body:
            if v.op == "var" and v.varying or v.op == "shuffle_down":
                self.arrays[id(v)] = v
            for a in v.args:
                if id(a) in self.runs and self.runs[id(a)] != self.runs.get(id(v)):
                    self.arrays[id(a)] = a
            for part in (v.body, v.orelse):
                if part:
                    self._find_arrays(part)

    # -- text -------------------------------------------------------------------------------------------------------
    def text(self) -> str:
        k = self.k
        params = ", ".join(identifier(p.name) for p in k.params)
        self._block(k.prologue, 1)
        head = self.lines
        self.lines = []
        self._block(k.body, 2)
        body, self.lines = self.lines, []
        out = [f"def {identifier(k.name)}(thread, threads, {params}):",
               f"    # {k.lanes} lanes; groups are independent", *head]
        for v in self.arrays.values():
            out.append(f"    {self.name(v)} = np.empty({k.lanes}, {_NUMPY[v.type]})")
        for s in self.scratch:
            size = MEMORY[s.attrs["dtype"]][0]
            out.append(f"    {self.name(s)}_memory = np.zeros({s.attrs['count'] * size + 8}, np.uint8)")
            out.append(f"    {self.name(s)} = address_of({self.name(s)}_memory)")
        out.append(f"    groups = {self.ref(k.grid)}")
        out.append("    for group in range(groups * thread // threads, groups * (thread + 1) // threads):")
        out += body or ["        pass"]
        return "\n".join(out) + "\n"

    def emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def name(self, v: Value) -> str:
        prefix = {"var": "var", "index": "i", "scratch": "scratch"}.get(v.op, "v" if v.varying else "u")
        return self.names.setdefault(id(v), f"{prefix}{len(self.names)}")

    def ref(self, v: Value) -> str:
        """Text of an operand inside a lane loop (uniform operands read the same anywhere)."""
        if v.op == "const":
            x = v.attrs["value"]
            if v.type in ("f32", "f64"):
                return f"{v.type}({float_text(x)})"
            return str(x)
        if v.op == "param":
            return identifier(v.attrs["name"])
        if v.op in ("lane", "group"):
            return v.op
        return self.name(v) + ("[lane]" if id(v) in self.arrays else "")

    def _block(self, body: Sequence[Value], depth: int) -> None:
        lane_lines: list[str] = []

        def flush() -> None:
            if lane_lines:
                self.emit(depth, f"for lane in range({self.k.lanes}):")
                for line in lane_lines:
                    self.emit(depth + 1, line)
                lane_lines.clear()
        start = len(self.lines)
        for v in body:
            if self._in_lane_loop(v):
                lane_lines.append(self._statement(v))
                continue
            if self._ends_run(v):
                flush()
            self._uniform(v, depth)
        flush()
        if len(self.lines) == start and depth > 1:
            self.emit(depth, "pass")

    def _uniform(self, v: Value, depth: int) -> None:
        match v.op:
            case "scratch":
                self.scratch.append(v)
            case "sync":
                pass
            case "var":
                if v.varying:
                    self.emit(depth, f"for lane in range({self.k.lanes}):")
                    self.emit(depth + 1, f"{self.name(v)}[lane] = {self.ref(v.args[0])}")
                else:
                    self.emit(depth, f"{self.name(v)} = {self.ref(v.args[0])}")
            case "loop":
                lo, hi, index = v.args
                step = f", {v.attrs['step']}" if v.attrs["step"] != 1 else ""
                self.emit(depth, f"for {self.name(index)} in range({self.ref(lo)}, {self.ref(hi)}{step}):")
                self._block(v.body, depth + 1)
            case "if":
                self.emit(depth, f"if {self.ref(v.args[0])}:")
                self._block(v.body, depth + 1)
                if v.orelse:
                    self.emit(depth, "else:")
                    self._block(v.orelse, depth + 1)
            case "fold":
                self._fold(v, depth)
            case "first":
                a = v.args[0]
                self.emit(depth, f"{self.name(v)} = {self.name(a)}[0]" if id(a) in self.arrays
                          else f"{self.name(v)} = {self.ref(a)}")
            case "shuffle_down":
                a, by = v.args[0], v.attrs["by"]
                source = f"{self.name(a)}[lane + {by} if lane + {by} < {self.k.lanes} else lane]" \
                    if id(a) in self.arrays else self.ref(a)
                self.emit(depth, f"for lane in range({self.k.lanes}):")
                self.emit(depth + 1, f"{self.name(v)}[lane] = {source}")
            case _:
                self.emit(depth, self._statement(v))

    def _fold(self, v: Value, depth: int) -> None:
        a, n = v.args[0], self.k.lanes
        work = f"tree{len(self.names)}"
        self.names[id((v, "tree"))] = work
        source = self.ref(a)
        self.emit(depth, f"{work} = np.empty({n}, {_NUMPY[a.type]})")
        self.emit(depth, f"for lane in range({n}):")
        self.emit(depth + 1, f"{work}[lane] = {source}")
        self.emit(depth, f"half = {n // 2}")
        self.emit(depth, "while half:")
        self.emit(depth + 1, "for lane in range(half):")
        text = _COMBINE[v.attrs["op"]].format(a=f"{work}[lane]", b=f"{work}[lane + half]")
        if a.type in ("i32", "i64"):
            text = f"{a.type}({text})"
        self.emit(depth + 2, f"{work}[lane] = {text}")
        self.emit(depth + 1, "half //= 2")
        self.emit(depth, f"{self.name(v)} = {work}[0]")

    def _statement(self, v: Value) -> str:
        match v.op:
            case "set":
                return f"{self.ref(v.args[0])} = {self.ref(v.args[1])}"
            case "get":
                return f"{self.ref(v)} = {self.ref(v.args[0])}"
            case "store" | "store_lanes":
                mask = self.ref(v.args[4]) if v.attrs.get("masked") else ""
                text = f"store_{v.attrs['dtype']}({self._address(v)}, {self.ref(v.args[3])})"
                return f"if {mask}: {text}" if mask else text
            case "load" | "load_lanes":
                text = f"load_{v.attrs['dtype']}({self._address(v)})"
                if v.attrs.get("masked"):
                    zero = f"{v.type}(0.0)" if v.type in ("f32", "f64") else f"{v.type}(0)"
                    text = f"{text} if {self.ref(v.args[3])} else {zero}"
                return f"{self.ref(v)} = {text}"
        return f"{self.ref(v)} = {self._pure(v)}"

    def _address(self, v: Value) -> str:
        base, offset, index = v.args[:3]
        size = MEMORY[v.attrs["dtype"]][0]
        parts = [self.ref(base)]
        if not (offset.op == "const" and offset.attrs["value"] == 0):
            parts.append(self.ref(offset))
        i = self.ref(index)
        if v.op.endswith("_lanes"):
            i = f"({i} + lane)"
        elif index.op == "const":
            i = str(index.attrs["value"])
        parts.append(f"{i} * {size}" if size > 1 else i)
        return " + ".join(parts)

    def _pure(self, v: Value) -> str:
        args = [self.ref(a) for a in v.args]
        t = v.args[0].type if v.args else v.type
        op = v.op
        if op in _INFIX:
            text = f"{args[0]} {_INFIX[op]} {args[1]}"
            return f"{t}({text})" if t in ("i32", "i64") and op in ("add", "sub", "mul") else text
        if op == "div":
            return f"div_{t}({args[0]}, {args[1]})"
        if op in _CALLS:
            return f"{_CALLS[op].format(t=t)}({', '.join(args)})"
        match op:
            case "neg" | "abs":
                return f"{op}_{t}({args[0]})"
            case "shl":
                return f"{t}({args[0]} << {args[1]})"
            case "ashr":
                return f"{args[0]} >> {args[1]}"
            case "imin":
                return f"min({args[0]}, {args[1]})"
            case "imax":
                return f"max({args[0]}, {args[1]})"
            case "select":
                return f"{args[1]} if {args[0]} else {args[2]}"
            case "not":
                return f"not {args[0]}"
            case "bits":
                return f"bits_{t}({args[0]})"
            case "cvt":
                return f"{v.attrs['to']}_from_{t}({args[0]})"
            case "zext":
                return f"{args[0]} & 0xFFFFFFFF"
        raise KeyError(f"no Python for {op}")


def float_text(x: float) -> str:
    """A float literal that Python reads back exactly."""
    if x != x:
        return "nan"
    if x in (float("inf"), float("-inf")):
        return "inf" if x > 0 else "-inf"
    return repr(x)


def render_grid(kernel: Kernel) -> str:
    """Source of `grid(<parameters>)`, the number of groups of a launch (hosts that enqueue work-groups need it)."""
    r = _Renderer(kernel)
    r._block(kernel.prologue, 1)
    params = ", ".join(identifier(p.name) for p in kernel.params)
    return "\n".join([f"def grid({params}):", *r.lines, f"    return {r.ref(kernel.grid)}"]) + "\n"
