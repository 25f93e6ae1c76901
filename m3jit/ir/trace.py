"""`TraceXp`: the namespace that builds tensor IR when an opcode's body runs in the compiler.

It offers the primitives of the eager namespace (`m3jit.ir.eager.EagerXp`) over `Traced` operands.  Whatever a body does
that cannot be compiled (an operand whose value is not known, a shape that disagrees, a dtype without a kernel) raises
`Untraceable`; the region then ends before that instruction and the interpreter executes it, with its exact error.
"""
from __future__ import annotations

from typing import Any, Sequence

from m3jit.ir.tensor import (B1T, F64T, I64T, Dim, Node, ScalarType, TensorType, dim_add, dim_ceildiv, dim_mul)
from m3jit.ir.trace_layout import TraceLayout
from m3jit.ir.trace_model import TraceModel
from m3jit.ir.trace_recurrent import CellKey, CellRef, TraceRecurrent
from m3jit.ir.trace_routed import TraceRouted
from m3jit.isa import types as T
from m3jit.isa.types import DType


class Untraceable(Exception):
    """This instruction is left to the interpreter; the message says why."""


class Recorder:
    """What the tracer needs from the lifter: a place to put nodes, assumptions and checks."""
    def emit(self, node: Node) -> Node: raise NotImplementedError
    def assume_equal(self, a: Dim, b: Dim) -> bool: raise NotImplementedError
    def assume_at_least(self, d: Dim, n: int) -> bool: raise NotImplementedError
    def today(self, d: Dim) -> int: raise NotImplementedError
    def check(self, cond: Node, reason: str) -> None: raise NotImplementedError
    def same_stream(self, key: Any, geometry: Any, dtype: str, new: str) -> bool: raise NotImplementedError
    def cell(self, state: CellRef, key: CellKey) -> Node: raise NotImplementedError


_FOLD = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}


def wrap64(v: int) -> int:
    return (v + 2 ** 63) % 2 ** 64 - 2 ** 63


class TraceXp(TraceLayout, TraceModel, TraceRecurrent, TraceRouted):
    """Builds nodes through `recorder`."""
    tracing = True

    def __init__(self, recorder: Recorder):
        self.r = recorder
        self.where = (-1, "")

    # -- helpers -------------------------------------------------------------------------------------------------
    def error(self, message: str) -> Untraceable:
        return Untraceable(message)

    def node(self, op: str, type: Any, /, *args: Node, **attrs: Any) -> Node:
        return self.r.emit(Node(op, type, list(args), attrs, self.where))

    def imm(self, value: Any, dtype: DType) -> Node:
        return self.node("imm", TensorType(dtype, ()), value=value)

    def tensor(self, x: Any) -> Node:
        if isinstance(x, Node) and x.is_tensor:
            return x
        raise Untraceable(f"expected a tensor, got {getattr(x, 'type', type(x).__name__)}")

    def same(self, a: Dim, b: Dim) -> bool:
        """Are two dims equal (assuming equality of symbols where it can be guarded)?"""
        if a == b:
            return True
        if isinstance(a, int) and isinstance(b, int):
            return False
        return self.r.assume_equal(a, b)

    def broadcast_shape(self, *shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
        rank = max(map(len, shapes))
        out: list[Dim] = []
        for axis in range(rank):
            dim: Dim = 1
            for s in shapes:
                d = s[axis - rank + len(s)] if axis - rank + len(s) >= 0 else 1
                if d == 1:
                    continue
                if dim == 1:
                    dim = d
                elif not self.same(dim, d):
                    raise Untraceable(f"shapes {' and '.join(map(str, shapes))} do not broadcast")
            out.append(dim)
        return tuple(out)

    def axis(self, x: Node, axis: int) -> int:
        n = x.rank
        if not -n <= axis < n:
            raise Untraceable(f"axis {axis} of a rank-{n} tensor")
        return axis % n

    # -- elementwise ------------------------------------------------------------------------------------------------
    def _operands(self, values: Sequence[Any]) -> list[Node]:
        dtypes = {v.dtype for v in values if isinstance(v, Node) and v.is_tensor}
        if len(dtypes) > 1:
            if not dtypes <= set(T.FLOATS):
                raise Untraceable(f"dtypes {sorted(d.name for d in dtypes)} differ")
            dtype = T.F32
        elif dtypes:
            dtype = next(iter(dtypes))
        else:
            raise Untraceable("no tensor operand")
        if dtype.is_block:
            raise Untraceable(f"{dtype.name} is a weight type; DEQUANT it first")
        out = []
        for v in values:
            if isinstance(v, Node) and v.is_tensor:
                out.append(v)
            elif isinstance(v, Node) and v.is_scalar:
                if v.type == I64T and dtype.kind == "float":
                    v = self._rounded_once(v)
                if (v.type == F64T) != (dtype.kind == "float"):
                    raise Untraceable("scalar and tensor kinds differ")
                out.append(self.imm(v.attrs["value"], dtype) if v.op == "const" else
                           self.node("from_scalar", TensorType(dtype, ()), v))
            elif isinstance(v, (bool, int, float)):
                out.append(self.imm(v, dtype))
            else:
                raise Untraceable(f"operand {type(v).__name__}")
        return out

    def _rounded_once(self, v: Node) -> Node:
        """An integer as an f64 that rounds to the f32 nearest to the integer.  Beyond 2^53 the low 11 bits become one
        sticky bit, which keeps every f32 rounding decision (those lie at bit 28 and above) and fits f64's 53 bits."""
        if v.op == "const":
            return self.const(float(v.attrs["value"]) if abs(v.attrs["value"]) <= 2 ** 53 else
                              float(v.attrs["value"] & -2048 | (1024 if v.attrs["value"] & 2047 else 0)))
        small = self.scalar("bool_and", self.scalar("le", -2 ** 53, v), self.scalar("le", v, 2 ** 53))
        sticky = self.scalar("select", self.scalar("ne", self.scalar("and", v, 2047), 0), 1024, 0)
        jammed = self.scalar("or", self.scalar("and", v, -2048), sticky)
        return self.scalar("i2f", self.scalar("select", small, v, jammed))

    def elementwise(self, op: str, *values: Any, dtype: DType | None = None) -> Node:
        args = self._operands(values)
        kinds = [a.dtype for a in args]
        result = dtype or (T.F32 if len(set(kinds)) > 1 else kinds[0])
        shape = self.broadcast_shape(*[a.shape for a in args])
        return self.node(op, TensorType(result, shape), *args)

    def _float_only(self, op: str, *values: Any) -> Node:
        out = self.elementwise(op, *values)
        if out.dtype.kind != "float":
            raise Untraceable(f"{op} of {out.dtype.name}")
        return out

    def _number(self, op: str, *values: Any) -> Node:
        out = self.elementwise(op, *values)
        if out.dtype.kind not in ("float", "int"):
            raise Untraceable(f"{op} of {out.dtype.name}")
        return out

    def add(self, a, b): return self._number("add", a, b)
    def sub(self, a, b): return self._number("sub", a, b)
    def mul(self, a, b): return self._number("mul", a, b)
    def div(self, a, b): return self._float_only("div", a, b)
    def minimum(self, a, b): return self._number("minimum", a, b)
    def maximum(self, a, b): return self._number("maximum", a, b)
    def neg(self, a): return self._number("neg", a)
    def abs(self, a): return self._number("abs", a)
    def sqrt(self, a): return self._float_only("sqrt", a)
    def floor(self, a): return self._float_only("floor", a)
    def rint(self, a): return self._float_only("rint", a)
    def fma(self, a, b, c): return self._float_only("fma", a, b, c)
    def exp(self, a): return self._float_only("exp", a)
    def log(self, a): return self._float_only("log", a)
    def sin(self, a): return self._float_only("sin", a)
    def cos(self, a): return self._float_only("cos", a)
    def tanh(self, a): return self._float_only("tanh", a)
    def erf(self, a): return self._float_only("erf", a)
    def sigmoid(self, a): return self._float_only("sigmoid", a)
    def softplus(self, a): return self._float_only("softplus", a)
    def lt(self, a, b): return self.elementwise("lt", a, b, dtype=T.BOOL)
    def le(self, a, b): return self.elementwise("le", a, b, dtype=T.BOOL)
    def eq(self, a, b): return self.elementwise("eq", a, b, dtype=T.BOOL)
    def ne(self, a, b): return self.elementwise("ne", a, b, dtype=T.BOOL)

    def logical_not(self, a):
        a = self.tensor(a)
        if a.dtype is not T.BOOL:
            raise Untraceable("logical_not needs BOOL")
        return self.node("logical_not", a.type, a)

    def select(self, c, a, b):
        c = self.tensor(c)
        if c.dtype is not T.BOOL:
            raise Untraceable("select needs a BOOL condition")
        x, y = self._operands((a, b))
        if x.dtype is not y.dtype:
            raise Untraceable("select of different dtypes")
        shape = self.broadcast_shape(c.shape, x.shape, y.shape)
        return self.node("select", TensorType(x.dtype, shape), c, x, y)

    def cast(self, x, dtype: DType):
        x = self.tensor(x)
        if x.dtype is dtype:
            return x
        if x.dtype.is_block or dtype.is_block:
            raise Untraceable("cast of a block type")
        return self.node("cast", TensorType(dtype, x.shape), x)

    # -- reductions ------------------------------------------------------------------------------------------------
    def reduce(self, x, op: str, axis: int | None = None, keepdims: bool = False):
        x = self.tensor(x)
        if axis is None:
            flat = self.reshape(x, (x.type.count(),))
            out = self.reduce(flat, op, 0, False)
            return self.reshape(out, (1,) * x.rank) if keepdims else out
        axis = self.axis(x, axis)
        shape = tuple(1 if i == axis else d for i, d in enumerate(x.shape)) if keepdims else \
            tuple(d for i, d in enumerate(x.shape) if i != axis)
        dtype = T.I64 if x.dtype.kind == "int" and op in ("SUM", "PROD") else x.dtype
        if x.dtype.kind == "bool" or x.dtype.is_block or x.shape[axis] == 0:
            raise Untraceable(f"reduce of {x.dtype.name} {x.shape}")
        return self.node("reduce", TensorType(dtype, shape), x, op=op, axis=axis, keepdims=keepdims)

    def argmax(self, x, axis: int):
        x = self.tensor(x)
        axis = self.axis(x, axis)
        if x.dtype.is_block or x.shape[axis] == 0:
            raise Untraceable("argmax of this tensor")
        shape = tuple(1 if i == axis else d for i, d in enumerate(x.shape))
        return self.node("argmax", TensorType(T.I64, shape), x, axis=axis)

    # -- moves ------------------------------------------------------------------------------------------------------
    def reshape(self, x, shape: Sequence[Dim]):
        x = self.tensor(x)
        shape = tuple(self._static_dim(d) for d in shape)
        if -1 in shape:
            rest = dim_mul(*(d for d in shape if d != -1))
            total = x.type.count()
            if isinstance(total, int) and isinstance(rest, int) and rest and total % rest == 0:
                missing: Dim = total // rest
            else:
                missing = self._divide(total, rest)
            shape = tuple(missing if d == -1 else d for d in shape)
        if x.dtype.is_block or not self.same(dim_mul(*shape), x.type.count()):
            raise Untraceable(f"cannot reshape {x.shape} to {shape}")
        if shape == x.shape:
            return x
        return self.node("reshape", TensorType(x.dtype, shape), x)

    def _static_dim(self, d):
        if isinstance(d, Node):
            if d.op == "const":
                return d.attrs["value"]
            if d.op == "dim":
                return d.attrs["dim"]
            raise Untraceable("a dimension held in a register")
        return d

    def _divide(self, total: Dim, by: Dim) -> Dim:
        """total / by when it is visibly exact."""
        if total == by:
            return 1
        if by == 1:
            return total
        from m3jit.ir.tensor import DimExpr
        if isinstance(total, DimExpr) and total.op == "mul":
            if isinstance(total.b, int) and isinstance(by, int) and total.b % by == 0:
                return dim_mul(total.a, total.b // by)
            if total.b == by:
                return total.a
            if total.a == by:
                return total.b
        if isinstance(by, int) and by > 0:
            from m3jit.ir.tensor import dim_ceildiv
            if self.same(total, by):                         # 1 broadcasts, so it must be known
                return 1
            quotient = dim_ceildiv(total, by)                # exact today; the guard keeps it so
            if self.same(dim_mul(quotient, by), total):
                return quotient
        raise Untraceable(f"cannot divide {total} by {by}")

    def broadcast(self, x, shape):
        x = self.tensor(x)
        shape = tuple(self._static_dim(d) for d in shape)
        if -1 in shape or x.rank > len(shape) or x.dtype.is_block or not all(
                d == 1 or self.same(d, want) for d, want in zip(x.shape, shape[len(shape) - x.rank:])):
            raise Untraceable(f"cannot broadcast {x.shape} to {shape}")
        return x if shape == x.shape else self.node("broadcast", TensorType(x.dtype, shape), x)

    def transpose(self, x, perm):
        x = self.tensor(x)
        if sorted(perm) != list(range(x.rank)) or x.dtype.is_block:
            raise Untraceable("transpose")
        return self.node("transpose", TensorType(x.dtype, tuple(x.shape[p] for p in perm)), x, perm=tuple(perm))

    def full(self, shape, dtype, value):
        shape = tuple(self._static_dim(d) for d in shape)
        if -1 in shape or dtype.is_block:
            raise Untraceable("full")
        if isinstance(value, Node):
            if (value.type == F64T) != (dtype.kind == "float") or dtype.kind == "bool":
                raise Untraceable("fill value of another kind")
            return self.node("full", TensorType(dtype, shape), value)
        if dtype.kind != "float" and (value != int(value) or not self._fits(dtype, int(value))):
            raise Untraceable("fill value does not fit the dtype")
        return self.node("full", TensorType(dtype, shape), value=value)

    def slice(self, x, axis: int, start, stop, step: int = 1):
        """Positions start, start + step, .. below stop; a start held in a register must be visibly in range."""
        x = self.tensor(x)
        axis = self.axis(x, axis)
        d = x.shape[axis]
        if x.dtype.is_block or step < 1:
            raise Untraceable("slice of a block type")
        if isinstance(start, Node) and start.op == "const":
            start = start.attrs["value"]
        if isinstance(stop, Node) and stop.op == "const":
            stop = stop.attrs["value"]
        if isinstance(start, int) and isinstance(d, int) and (stop is None or isinstance(stop, int)):
            stop = d if stop is None else stop
            if not 0 <= start <= d or not start <= stop <= d:
                raise Untraceable("slice outside the axis")
            length: Dim = -(-(stop - start) // step)
            args = [x]
        elif isinstance(start, int) and start >= 0 and (stop is None or isinstance(stop, int)):
            length = self._symbolic_length(d, start, stop, step)
            args = [x]
        else:
            back, length = self._from_end(d, start, stop)
            if step != 1 or axis != 0:
                raise Untraceable("slice with a computed start on this axis")
            args = [x, start if isinstance(start, Node) else self.const(start)]
            start = None
        shape = tuple(length if i == axis else n for i, n in enumerate(x.shape))
        return self.node("slice", TensorType(x.dtype, shape), *args, axis=axis, start=start, step=step)

    def _symbolic_length(self, d: Dim, start: int, stop: int | None, step: int) -> Dim:
        """Length of start : stop : step of a symbolic axis.  A symbolic length must never be 0 or 1 (those fold and
        broadcast differently), so an axis too short for that is taken as it is today."""
        if stop is not None:
            if stop < start or not self.r.assume_at_least(d, stop):
                raise Untraceable("slice outside the axis")
            return -(-(stop - start) // step)
        if self.r.assume_at_least(d, start + step + 1):
            return dim_ceildiv(dim_add(d, -start), step)
        n = self.r.today(d)
        if n < start or not self.same(d, n):
            raise Untraceable("slice outside the axis")
        return -(-(n - start) // step)

    def _from_end(self, d: Dim, start, stop) -> tuple[int, int]:
        """(rows from the end, length) of a window that starts at dim - back, back <= 2, as SLICE START=-1 gives it."""
        def offset(v) -> int:
            if isinstance(v, Node) and v.op == "add" and v.args[0].op == "dim" and v.args[0].attrs["dim"] == d and \
                    v.args[1].op == "const":
                return v.args[1].attrs["value"]
            if isinstance(v, Node) and v.op == "add" and v.args[1].op == "const":
                return offset(v.args[0]) + v.args[1].attrs["value"]
            if isinstance(v, Node) and v.op == "dim" and v.attrs["dim"] == d:
                return 0
            raise Untraceable("slice start in a register")
        first = offset(start)
        last = 0 if stop is None else offset(stop)
        if not -2 <= first <= last <= 0:
            raise Untraceable("slice start in a register")
        return -first, last - first

    # -- scalars ------------------------------------------------------------------------------------------------------
    def const(self, value: int | float) -> Node:
        return self.node("const", F64T if isinstance(value, float) else I64T, value=value)

    def as_scalar(self, v: Any) -> Node:
        if isinstance(v, Node) and v.is_scalar:
            return v
        if isinstance(v, (int, float)) and not isinstance(v, bool):
            return self.const(v)
        raise Untraceable(f"expected a scalar, got {getattr(v, 'type', type(v).__name__)}")

    def is_scalar(self, v: Any) -> bool:
        return isinstance(v, (int, float)) or (isinstance(v, Node) and v.is_scalar)

    def number_kind(self, *values: Any) -> str:
        """"int" or "float", the one kind of all operands."""
        kinds = {self.as_scalar(v).type for v in values}
        if len(kinds) != 1 or B1T in kinds:
            raise Untraceable("mixed kinds")
        return "int" if kinds == {I64T} else "float"

    def dim(self, x, axis: int) -> Node:
        x = self.tensor(x)
        d = x.shape[self.axis(x, axis)]
        return self.const(d) if isinstance(d, int) else self.node("dim", I64T, dim=d)

    def is_zero(self, v: Any) -> bool:
        return v == 0 if isinstance(v, (int, float)) else v.op == "const" and v.attrs["value"] == 0

    def scalar(self, op: str, a: Any, b: Any = None, c: Any = None) -> Node:
        args = [v if isinstance(v, Node) and v.type == B1T else self.as_scalar(v) for v in (a, b, c) if v is not None]
        want, result = SCALAR_SIGNATURES[op]
        if op == "select":
            want = (B1T, args[1].type, args[1].type)
            result = args[1].type
        if tuple(x.type for x in args) != want:
            raise Untraceable(f"{op} of {[x.type for x in args]}")
        if op in _FOLD and all(x.op == "const" for x in args):
            return self.const(wrap64(_FOLD[op](*[x.attrs["value"] for x in args])))
        if op in ("div", "mod") and not (args[1].op == "const" and args[1].attrs["value"] not in (0, -1)):
            zero = self.const(0)
            self.r.check(self.node("ne", B1T, args[1], zero), "division by zero")
        return self.node(op, result, *args)

    def number_kind(self, *values: Any) -> str:
        """"int" or "float": the kind all values share."""
        kinds = {self.as_scalar(v).type for v in values}
        if len(kinds) != 1 or B1T in kinds:
            raise Untraceable("operands of different kinds")
        return "float" if F64T in kinds else "int"

    def compare(self, a: Any, b: Any, immediate: bool = False) -> Node:
        """Flags of a COMPARE; a one-element tensor compares as its element; an immediate takes a's kind."""
        x, y = (self.element(v, 0) if isinstance(v, Node) and v.is_tensor and v.type.count() == 1
                else self.as_scalar(v) for v in (a, b))
        if immediate and x.type != y.type:
            if isinstance(b, int):
                y = self.const(float(b))
            elif b != b:
                raise Untraceable("compare of an integer with NaN")
            else:
                y = self.const(int(min(max(round(b) if abs(b) < 2.0 ** 63 else b, -2.0 ** 63), 2 ** 63 - 1)))
        if x.type != y.type:
            raise Untraceable("compare of an integer with a float")
        return self.node("compare", I64T, x, y)

    def element(self, x, index: Any) -> Node:
        """Element `index` of the flattened tensor as a scalar; where it is not visibly in range, that is checked."""
        x = self.tensor(x)
        total = x.type.count()
        if x.dtype.is_block or x.dtype.kind == "bool":
            raise Untraceable("element of this tensor")
        kind = F64T if x.dtype.kind == "float" else I64T
        if isinstance(index, int) and isinstance(total, int):
            if not 0 <= index < total:
                raise Untraceable("element outside the tensor")
            return self.node("element", kind, x, index=index)
        at = self.as_scalar(index)
        if at.type != I64T or (isinstance(index, int) and index < 0):
            raise Untraceable("element index")
        if not isinstance(index, int):
            self.r.check(self.node("le", B1T, self.const(0), at), "element before the tensor")
        end = self.const(total) if isinstance(total, int) else self.node("dim", I64T, dim=total)
        self.r.check(self.node("lt", B1T, at, end), "element behind the tensor")
        return self.node("element", kind, x, at, index=None)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args, **_kw):
            raise Untraceable(f"{name} has no compiled form")
        return refuse



_I, _F, _B = I64T, F64T, B1T
SCALAR_SIGNATURES: dict[str, tuple[tuple[ScalarType, ...], ScalarType | None]] = {
    **{op: ((_I, _I), _I) for op in ("add", "sub", "mul", "div", "mod", "and", "or", "xor", "shl", "shr", "sar", "min",
                                     "max")},
    "neg": ((_I,), _I), "fneg": ((_F,), _F), "fsqrt": ((_F,), _F),
    **{op: ((_F, _F), _F) for op in ("fadd", "fsub", "fmul", "fdiv", "fmin", "fmax")},
    **{op: ((_I, _I), _B) for op in ("eq", "ne", "lt", "le")},
    **{op: ((_F, _F), _B) for op in ("feq", "fne", "flt", "fle")},
    "bool_and": ((_B, _B), _B), "bool_or": ((_B, _B), _B), "bool_not": ((_B,), _B),
    "i2f": ((_I,), _F), "f2i": ((_F,), _I), "select": ((), None),
}
