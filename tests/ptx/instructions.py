"""The PTX instructions the CUDA backend emits, one rule each; an opcode without a rule is refused by name.

Registers are bit patterns (uint16, uint32, uint64, bool for predicates); a rule views them as the type its opcode
names.
Sources: PTX ISA, "Integer Arithmetic", "Floating Point", "Comparison and Selection", "Data Movement and Conversion".
"""

from __future__ import annotations

import re
from typing import Any, Callable

import numpy as np

from tests.loop_eval import fma as exact_fma


class PtxError(AssertionError):
    """The program did something PTX does not allow."""


class Unsupported(PtxError):
    """An instruction or form outside the subset."""


_TYPES = {"s8": np.int8, "u8": np.uint8, "b8": np.uint8, "s16": np.int16, "u16": np.uint16, "b16": np.uint16,
          "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "s64": np.int64, "u64": np.uint64, "b64": np.uint64,
          "f32": np.float32, "f64": np.float64, "pred": np.bool_}
_REGISTER = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.uint32, "f64": np.uint64}
_NAN = {"f32": np.uint32(0x7FFFFFFF), "f64": np.uint64(0x7FFFFFFFFFFFFFFF)}


# -- operands -------------------------------------------------------------------------------------------------------

def _immediate(text: str, type: str) -> Any:
    if text.startswith("0f"):
        return np.frombuffer(bytes.fromhex(text[2:])[::-1], np.uint32).view(
            _TYPES[type] if type in ("f32",) else np.uint32
        )[0]
    if text.startswith("0d"):
        return np.frombuffer(bytes.fromhex(text[2:])[::-1], np.uint64).view(
            _TYPES[type] if type in ("f64",) else np.uint64
        )[0]
    bits = 8 * np.dtype(_TYPES[type]).itemsize
    return np.array(int(text) % (1 << bits), f"u{bits // 8}").view(_TYPES[type])[()]


def reader(entry: Any, text: str, type: str) -> Callable[[Any], Any]:
    """A function block -> the operand's values for the active threads (or one number), viewed as `type`."""
    if m := re.fullmatch(r"%(tid|ctaid|ntid)\.x", text):
        what = m[1]
        return lambda b: b.active.astype(np.uint32) if what == "tid" else \
            np.uint32(b.number if what == "ctaid" else b.threads)
    if text.startswith("%"):
        name = text[1:]
        prefix = re.match(r"[a-z]+", name)[0]
        if prefix not in entry.registers:
            raise Unsupported(f"the interpreter knows no register {text}")
        kind = np.dtype(_TYPES[type])
        stored = np.dtype(_REGISTER[entry.registers[prefix]])
        if kind.itemsize < stored.itemsize:                   # a narrower view takes the low bits
            return lambda b: b.registers[name][b.active].astype(f"u{kind.itemsize}").view(kind)
        if kind.itemsize > stored.itemsize:
            raise Unsupported(f"{text} is read as {type}, wider than the register")
        return lambda b: b.registers[name][b.active].view(kind)
    if text in entry.shared:
        from tests.ptx.interpreter import SHARED_BASE
        address = np.uint64(SHARED_BASE + entry.shared[text][0])
        return lambda b: address
    value = _immediate(text, type)
    return lambda b: value


def writer(entry: Any, text: str) -> Callable[[Any, Any], None]:
    """A function (block, values) that sets a register for the active threads; narrower values are zero-extended."""
    name = text[1:]
    stored = np.dtype(_REGISTER[entry.registers[re.match(r"[a-z]+", name)[0]]])

    def write(b: Any, values: Any) -> None:
        values = np.asarray(values)
        if values.dtype.kind == "i" and values.dtype.itemsize < stored.itemsize:
            values = values.astype(f"i{stored.itemsize}")     # ld.s8 and the like extend with the sign
        if values.dtype != np.bool_:
            values = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(stored)
        r = b.registers.get(name)
        if r is None:
            r = b.registers[name] = np.zeros(b.threads, stored)
        r[b.active] = values
    return write


# -- arithmetic -----------------------------------------------------------------------------------------------------

def _clean(x: Any, type: str) -> Any:
    """Results that are NaN carry the hardware's one pattern."""
    if type in ("f32", "f64"):
        x = np.array(x, _TYPES[type])
        x.view(_NAN[type].dtype)[np.isnan(x)] = _NAN[type]
    return x


def _wide(x: Any, bits: int) -> Any:
    return np.asarray(x).astype(f"{np.asarray(x).dtype.kind}{bits // 8}")


def _shift(kind: str) -> Callable:
    """Counts beyond the width give what shifting one by one would."""
    def shift(a: Any, n: Any) -> Any:
        bits = 8 * np.asarray(a).dtype.itemsize
        count = np.minimum(n, bits - 1).astype(np.asarray(a).dtype)
        out = a << count if kind == "shl" else a >> count
        gone = np.asarray(n >= bits)
        return out if kind == "sar" else np.where(gone, np.zeros_like(out), out)
    return shift


def _field(signed: bool) -> Callable:
    """bfe: `length` bits from `start`, both below the width."""
    def extract(a: Any, start: Any, length: Any) -> Any:
        up = np.uint32(32) - np.uint32(start) - np.uint32(length)
        x = np.asarray(a).view(np.uint32) << up
        down = np.uint32(32) - np.uint32(length)
        return (x.view(np.int32) >> down.astype(np.int32)) if signed else x >> down
    return extract


def _dp4a(a: Any, b: Any, c: Any) -> Any:
    total = np.asarray(c, np.uint32).astype(np.int64)
    for i in (0, 8, 16, 24):
        total = total + ((np.asarray(a) >> np.uint32(i)) & np.uint32(255)).astype(np.int64) * \
            ((np.asarray(b) >> np.uint32(i)) & np.uint32(255)).astype(np.uint8).view(np.int8)
    return (total & 0xFFFFFFFF).astype(np.uint32)


_ARITHMETIC: dict[str, tuple[Callable, list[str], str]] = {}


def _rule(names: str, types: str, function: Callable, pattern: str = "{t}", result: str = "{t}") -> None:
    """`name.type` for every name (with {t} in it) and type."""
    for name in names.split():
        for t in types.split():
            kinds = [p.format(t=t) for p in pattern.split()]
            _ARITHMETIC[name.format(t=t)] = (function, kinds, result.format(t=t))


_rule("add.{t} add.rn.{t}", "f32 f64", lambda a, b: a + b, "{t} {t}")
_rule("sub.rn.{t}", "f32 f64", lambda a, b: a - b, "{t} {t}")
_rule("mul.rn.{t}", "f32 f64", lambda a, b: a * b, "{t} {t}")
_rule("div.rn.{t}", "f32 f64", lambda a, b: a / b, "{t} {t}")
_rule("rcp.rn.{t}", "f32 f64", lambda a: np.asarray(a).dtype.type(1) / a)
_rule("sqrt.rn.{t}", "f32 f64", np.sqrt)
_rule("fma.rn.{t}", "f32 f64", lambda a, b, c: exact_fma(*np.broadcast_arrays(a, b, c)), "{t} {t} {t}")
_rule("neg.{t}", "f32 f64 s32 s64", lambda a: np.zeros_like(a) - a if np.asarray(a).dtype.kind == "i" else -a)
_rule("abs.{t}", "f32 f64 s32 s64", np.abs)
_rule("max.{t}", "s32 s64 u32 u64", np.maximum, "{t} {t}")
_rule("min.{t}", "s32 s64 u32 u64", np.minimum, "{t} {t}")
_rule("add.{t}", "s16 s32 s64", lambda a, b: a + b, "{t} {t}")
_rule("sub.{t}", "s16 s32 s64", lambda a, b: a - b, "{t} {t}")
_rule("mul.lo.{t}", "s16 s32 s64", lambda a, b: a * b, "{t} {t}")
_rule("mad.lo.{t}", "s32 s64", lambda a, b, c: a * b + c, "{t} {t} {t}")
_rule("mul.wide.{t}", "s16 u16", lambda a, b: _wide(a, 32) * _wide(b, 32), "{t} {t}")
_rule("mul.wide.{t}", "s32 u32", lambda a, b: _wide(a, 64) * _wide(b, 64), "{t} {t}")
_rule("mul.hi.{t}", "s32 u32", lambda a, b: (_wide(a, 64) * _wide(b, 64) >> 32).astype(np.asarray(a).dtype), "{t} {t}")
_rule("mul.hi.{t}", "s64", np.vectorize(lambda a, b: int(a) * int(b) >> 64, otypes=[np.int64]), "{t} {t}")
_rule("div.{t}", "u32 u64", lambda a, b: a // b, "{t} {t}")
_rule("rem.{t}", "u32 u64", lambda a, b: a % b, "{t} {t}")
_rule("div.{t}", "s32 s64", lambda a, b: (np.abs(a) // b) * np.sign(a), "{t} {t}")
_rule("rem.{t}", "s32 s64", lambda a, b: a - (np.abs(a) // b) * np.sign(a) * b, "{t} {t}")
_rule("and.{t}", "b16 b32 b64 pred", lambda a, b: a & b, "{t} {t}")
_rule("or.{t}", "b16 b32 b64 pred", lambda a, b: a | b, "{t} {t}")
_rule("xor.{t}", "b16 b32 b64 pred", lambda a, b: a ^ b, "{t} {t}")
_rule("not.{t}", "b16 b32 b64 pred", lambda a: ~np.asarray(a))
_rule("shl.{t}", "b16 b32 b64", _shift("shl"), "{t} u32")
_rule("shr.{t}", "u16 u32 u64", _shift("shr"), "{t} u32")
_rule("shr.{t}", "s16 s32 s64", _shift("sar"), "{t} u32")
_rule("shf.l.wrap.b32", "u32", lambda low, high, n: (((high.astype(np.uint64) << np.uint64(32)) | low) >>
                                                     (np.uint64(32) - (n & np.uint64(31)))).astype(np.uint32),
      "u32 u32 u32", "u32")                                # the upper word of both, shifted to the left
_rule("bfe.s32", "s32", _field(True), "s32 u32 u32", "s32")
_rule("bfe.u64", "u64", lambda a, start, length: (a >> np.uint64(start)) & ((np.uint64(1) << np.uint64(length)) -
                                                                           np.uint64(1)), "u64 u32 u32", "u64")
_rule("bfe.u32", "u32", _field(False), "u32 u32 u32", "u32")
_rule("dp4a.u32.s32", "u32", _dp4a, "u32 u32 u32", "u32")
_rule("mov.{t}", "b16 b32 b64 u32 u64 pred f32 f64", lambda a: a)
_rule("high.b16", "u32", lambda a: (a >> np.uint32(16)).astype(np.uint16), "u32", "b16")      # see `parse`
_MOVES = ("mov.", "neg.s", "selp.")                       # results of these are not arithmetic on floats


# -- conversions ----------------------------------------------------------------------------------------------------

def _saturating(target: str) -> Callable:
    low, high = (-2 ** 31, 2 ** 31 - 1) if target == "s32" else (-2 ** 63, 2 ** 63 - 1)

    def convert(a: Any) -> Any:
        """cvt.rzi: truncates, saturates, NaN gives 0."""
        x = np.trunc(np.asarray(a, np.float64))
        inside = (x >= float(low)) & (x < float(high) if target == "s64" else x <= float(high))
        out = np.where(inside, x, 0.0).astype(np.int64)
        out = np.where(np.isnan(x), 0, np.where(inside, out, np.where(x > 0, high, low)))
        return out.astype(_TYPES[target])
    return convert


for _f in ("f32", "f64"):
    for _t in ("s32", "s64"):
        _ARITHMETIC[f"cvt.rzi.{_t}.{_f}"] = (_saturating(_t), [_f], _t)
    for _t in ("s16", "u16", "s32", "s64", "u32", "u64"):
        _ARITHMETIC[f"cvt.rn.{_f}.{_t}"] = (lambda a, _f=_f: np.asarray(a).astype(_TYPES[_f]), [_t], _f)
for _f in ("f32", "f64"):
    _ARITHMETIC[f"cvt.rni.{_f}.{_f}"] = (np.rint, [_f], _f)
    _ARITHMETIC[f"cvt.rmi.{_f}.{_f}"] = (np.floor, [_f], _f)
_ARITHMETIC["cvt.f64.f32"] = (lambda a: np.asarray(a).astype(np.float64), ["f32"], "f64")
_ARITHMETIC["cvt.rn.f32.f64"] = (lambda a: np.asarray(a).astype(np.float32), ["f64"], "f32")
for _a in ("s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"):
    for _b in ("s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"):
        _ARITHMETIC[f"cvt.{_a}.{_b}"] = (lambda a, _a=_a: np.asarray(a).astype(_TYPES[_a]), [_b], _a)
for _w in ("b16", "b32", "b64", "f32", "f64"):
    _ARITHMETIC[f"selp.{_w}"] = (lambda a, b, c: np.where(c, a, b), [_w, _w, "pred"], _w)


# -- comparisons ----------------------------------------------------------------------------------------------------

_RELATIONS: dict[str, Callable] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) & ~_unordered(a, b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b) if np.asarray(a).dtype.kind == "f" else np.zeros(np.broadcast(a, b).shape, bool)


for _name, _f in list(_RELATIONS.items()):
    for _t in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64", "f32", "f64"):
        if _t[0] == "b" and _name not in ("eq", "ne"):
            continue
        _ARITHMETIC[f"setp.{_name}.{_t}"] = (_f, [_t, _t], "pred")
        if _t[0] == "f":                                  # equ, neu, ltu ...: true when unordered
            _ARITHMETIC[f"setp.{_name}u.{_t}"] = (lambda a, b, _f=_f: _f(a, b) | _unordered(a, b), [_t, _t], "pred")
for _t in ("f32", "f64"):
    _ARITHMETIC[f"setp.nan.{_t}"] = (_unordered, [_t, _t], "pred")
    _ARITHMETIC[f"setp.num.{_t}"] = (lambda a, b: ~_unordered(a, b), [_t, _t], "pred")


# -- one instruction ------------------------------------------------------------------------------------------------

def execute_plan(entry: Any, i: Any) -> Callable[[Any], None]:
    """A function that executes an instruction for the active threads of a block."""
    where = f"{entry.name}, PTX line {i.line}"
    if m := re.fullmatch(r"ld\.(param|global|shared)\.([subf]\d+)", i.opcode):
        return _load(entry, i, m[1], m[2], where)
    if m := re.fullmatch(r"st\.(global|shared)\.([subf]\d+)", i.opcode):
        return _store(entry, i, m[1], m[2], where)
    if i.opcode not in _ARITHMETIC:
        raise Unsupported(f"{where}: the interpreter knows no instruction {i.opcode} {', '.join(i.operands)}")
    function, kinds, result = _ARITHMETIC[i.opcode]
    if len(i.operands) != len(kinds) + 1:
        raise Unsupported(f"{where}: {i.opcode} with {len(i.operands)} operands")
    operands = [reader(entry, o, k) for o, k in zip(i.operands[1:], kinds)]
    put = writer(entry, i.operands[0])
    if i.opcode.startswith(_MOVES) or result not in ("f32", "f64"):
        return lambda b: put(b, function(*[o(b) for o in operands]))
    return lambda b: put(b, _clean(function(*[o(b) for o in operands]), result))


_ADDRESS = re.compile(r"\[([%\w$]+)(?:\+(-?\d+))?\]")


def _address(entry: Any, text: str, where: str) -> Callable[[Any], np.ndarray]:
    m = _ADDRESS.fullmatch(text)
    if not m:
        raise Unsupported(f"{where}: address {text}")
    base, offset = reader(entry, m[1], "s64" if m[1].startswith("%") else "u64"), int(m[2] or 0)
    return lambda b: np.broadcast_to(np.asarray(base(b)).astype(np.int64) + offset, b.active.shape)


def _load(entry: Any, i: Any, space: str, type: str, where: str) -> Callable[[Any], None]:
    put, kind = writer(entry, i.operands[0]), np.dtype(_TYPES[type])
    if space == "param":
        name = i.operands[1].strip("[]")
        if name not in dict(entry.params):
            raise Unsupported(f"{where}: parameter address {i.operands[1]}")
        return lambda b: put(b, np.full(b.active.shape, np.frombuffer(b.params[name].tobytes(), kind)[0]))
    address = _address(entry, i.operands[1], where)

    def load(b: Any) -> None:
        at = address(b)
        if b.active.size:
            raw = b.space(space, at).read(at, kind.itemsize, b.active, b.number, where)
            put(b, np.ascontiguousarray(raw).view(kind).reshape(-1))
    return load


def _store(entry: Any, i: Any, space: str, type: str, where: str) -> Callable[[Any], None]:
    address, value = _address(entry, i.operands[0], where), reader(entry, i.operands[1], type)
    kind = np.dtype(_TYPES[type])

    def store(b: Any) -> None:
        at = address(b)
        v = np.ascontiguousarray(np.broadcast_to(value(b), at.shape)).astype(kind)
        b.space(space, at).write(at, v.view(np.uint8).reshape(-1, kind.itemsize), b.active, b.number, where)
    return store
