"""Operations across lanes: shuffle_down, first, fold."""
from __future__ import annotations

from m3jit.backends.cpu.arith import emit
from m3jit.backends.cpu.numeric import Form
from m3jit.backends.cpu.target import CpuTarget
from m3jit.backends.cpu.text import LLVM_TYPE, Writer
from m3jit.backends.cpu.values import Lanes, Val

FOLDS = ("add", "mul", "fmin", "fmax", "imin", "imax", "and", "or")


def first(w: Writer, lanes: Lanes, v: Val) -> Val:
    """Lane 0 as a uniform."""
    if v.uniform:
        return v
    part = lanes.parts(v)[0]
    if lanes.per_part > 1:
        part = w.op(f"extractelement {lanes.vec(v.type)} {part}, i64 0")
    return lanes.uniform(v.type, part)


def shuffle_down(w: Writer, lanes: Lanes, v: Val, by: int, live: list[bool]) -> Val:
    """Lane l receives lane l + by; the last `by` lanes keep their own value."""
    parts, width, total = lanes.parts(v), lanes.per_part, lanes.lanes
    out = []
    for j in range(lanes.count):
        if not live[j]:
            out.append("poison")
            continue
        sources = [s + by if s + by < total else s for s in range(j * width, (j + 1) * width)]
        out.append(_pick(w, lanes.vec(v.type), parts, sources, width))
    return lanes.varying(v.type, out)


def _pick(w: Writer, vt: str, parts: list[str], sources: list[int], width: int) -> str:
    """The vector whose lane i is lane sources[i] of the whole value."""
    used = sorted({s // width for s in sources})
    if len(used) == 1 and sources == list(range(used[0] * width, (used[0] + 1) * width)):
        return parts[used[0]]
    result, done = parts[used[0]], {used[0]}
    if len(used) == 1:
        return _shuffle(w, vt, result, result, [s % width for s in sources])
    for k, p in enumerate(used[1:]):
        done.add(p)
        # lanes already right stay where they are (after the first step), lanes of part p come from the second operand
        mask = [width + s % width if s // width == p else (i if k else s % width) if s // width in done else 0
                for i, s in enumerate(sources)]
        result = _shuffle(w, vt, result, parts[p], mask)
    return result


def _shuffle(w: Writer, vt: str, a: str, b: str, mask: list[int]) -> str:
    return w.op(f"shufflevector {vt} {a}, {vt} {b}, <{len(mask)} x i32> <{', '.join(f'i32 {m}' for m in mask)}>")


def fold(w: Writer, lanes: Lanes, target: CpuTarget, v: Val, op: str) -> Val:
    """Halving tree: lane l combines (own, other) with lane l + n/2, then n/4 ... 1.  Only lanes that reach lane 0."""
    parts, width = list(lanes.parts(v)), lanes.per_part
    while len(parts) > 1:
        half, form = len(parts) // 2, Form(width)
        parts = [combine(w, form, target, op, v.type, parts[j], parts[j + half]) for j in range(half)]
    x, t = parts[0], LLVM_TYPE[v.type]
    while width > 1:
        half = width // 2
        low, high = (_shuffle(w, f"<{width} x {t}>", x, "poison", list(range(s, s + half))) for s in (0, half))
        if half == 1:
            low, high = (w.op(f"extractelement <2 x {t}> {x}, i64 {i}") for i in (0, 1))
        x, width = combine(w, Form(half), target, op, v.type, low, high), half
    return lanes.uniform(v.type, x)


def combine(w: Writer, F: Form, target: CpuTarget, op: str, type: str, own: str, other: str) -> str:
    """One step of a fold.  fmin/fmax: own if own < (>) other or other is NaN, else other."""
    if op not in ("fmin", "fmax"):
        return emit(w, F, target, op, type, type, [own, other], {})
    t = F.t(LLVM_TYPE[type])
    better = w.op(f"fcmp {'olt' if op == 'fmin' else 'ogt'} {t} {own}, {other}")
    nan = w.op(f"fcmp uno {t} {other}, {other}")
    keep = w.op(f"or {F.t('i1')} {better}, {nan}")
    return w.op(f"select {F.t('i1')} {keep}, {t} {own}, {t} {other}")
