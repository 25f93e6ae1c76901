"""Loop IR as text: every kernel of the library survives printing and parsing; mistakes are named with their line."""
from __future__ import annotations

import math

import numpy as np
import pytest

from m3jit.ir.loop import LoopError, canonical
from m3jit.ir.loop_builder import Builder
from m3jit.ir.loop_text import LoopTextError, parse_kernel, print_kernel
from tests.backends.kernel_cases import CASES

SCALE = """\
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
"""


def scale():
    b = Builder("scale", lanes=64)
    x, y = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32")
    n, k = b.scalar("n", "i64"), b.scalar("k", "f32")
    b.set_grid((n + 63) // 64)
    base = b.group * 64
    inside = b.in_range(base, n)
    b.store_lanes("f32", y, base, b.load_lanes("f32", x, base, mask=inside) * k, mask=inside)
    return b.finish()


def test_the_text_of_a_kernel():
    assert print_kernel(scale()) == SCALE
    assert canonical(parse_kernel(SCALE)) == canonical(scale())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_kernel_survives(case):
    kernel = case.kernel
    again = parse_kernel(print_kernel(kernel))
    assert canonical(again) == canonical(kernel)
    assert [(p.name, p.kind, p.access, p.dtype) for p in again.params] == \
        [(p.name, p.kind, p.access, p.dtype) for p in kernel.params]
    assert print_kernel(again) == print_kernel(kernel)


def test_constants_keep_their_type_and_value():
    b = Builder("constants", 8)
    out = b.ptr("out", "w", "f32")
    b.set_grid(1)
    values = [b.f32(v) for v in (0.0, -0.0, 0.1, 1e-45, math.inf, -math.inf, math.nan, 3.0)]
    wide = [b.f64(v) for v in (5e-324, -math.inf, math.nan, 0.1)]
    ints = [b.i32(-2 ** 31), b.i32(5), b.i64(2 ** 63 - 1), b.i64(-2 ** 63)]
    for v in values:
        b.store("f32", out, 0, b.select(b.b1(True), v, b.f32(1.0)))
    for v in wide:
        b.store("f32", out, 0, b.cvt(v + 1.0, "f32"))
    for v in ints:
        b.store("f32", out, 0, b.cvt(v, "f32"))
    b.store("f32", out, 0, b.select(b.b1(False), b.f32(0.0), b.f32(1.0)))
    kernel = b.finish()
    text = print_kernel(kernel)
    assert canonical(parse_kernel(text)) == canonical(kernel)
    for literal in (
        "-0.0",
        "+inf",
        "-inf",
        "+nan",
        "5e-324_f64",
        "-2147483648_i32",
        "9223372036854775807",
        "1_b1",
        "0_b1",
    ):
        assert f" {literal}" in text


def test_control_scratch_and_comments():
    text = """
    kernel sums(x: ptr r f32, y: ptr rw f16, n: i64) lanes 16 {   # the prologue is empty
    grid n:
        %rows = scratch f32[64]
        %c0: f32 = var varying 0.0
        loop %i = 0 .. n step 16 {
            %k: i64 = add %i, %group
            %v: f32 = load_lanes f32 x@%k[%i]
            %old: f32 = get %c0
            %new: f32 = add %old, %v
            set %c0 = %new
        }
        %few: b1 = lt n, 5
        if %few {
            sync
        } else {
            %t: f32 = get %c0
            store_lanes f32 %rows[0] = %t
        }
        %total: f32 = fold add %v0
        %down: f32 = shuffle_down %v0 by 8
    }""".replace("%v0", "%last").replace("%total:", "%last: f32 = get %c0\n        %total:")
    kernel = parse_kernel(text)
    assert canonical(parse_kernel(print_kernel(kernel))) == canonical(kernel)
    loop = kernel.body[2]
    assert (loop.op, loop.attrs["step"], len(loop.body)) == ("loop", 16, 5)


MISTAKES = {
    "kernel": (
        ("kernel scale(", "kernal scale("),
        r"line 1: expected 'kernel NAME\(PARAMETERS\) lanes N \{', got 'kernal",
    ),
    "parameter": (("n: i64", "n: i46"), "line 1: expected 'NAME: TYPE' or .*got 'n: i46'; types are b1, i32"),
    "access": (("ptr r f32", "ptr x f32"), "line 1: expected .* got 'x: ptr x f32'"),
    "twice": (("k: f32", "n: f32"), "line 1: parameter n is declared twice"),
    "lanes": (("lanes 64", "lanes 63"), "lanes must be 1, 8, 16, 32 or 64, got 63"),
    "unknown": (("mul %v6, k", "mul %v6, kk"), "line 10: kk is not defined here"),
    "undefined": (("mul %v6, k", "mul %v9, k"), "line 10: %v9 is not defined here"),
    "operation": (("mul %v6, k", "mull %v6, k"), "line 10: no operation 'mull' in 'mull %v6, k'"),
    "operand": (("mul %v6, k", "mul %v6, ?"), r"line 10: '\?' is no operand"),
    "arity": (("mul %v6, k", "mul %v6"), "line 10: scale: mul takes 2 operands, got 1"),
    "type": (("mul %v6, k", "mul %v6, n"), "line 10: scale: mul expects two numbers of one type, got f32, i64"),
    "declared": (("%v7: f32", "%v7: i32"), "line 10: %v7 is declared i32, but mul gives f32"),
    "redefined": (("%v7: f32", "%v6: f32"), "line 10: %v6 is defined twice"),
    "memory": (("load_lanes f32", "load_lanes f33"), "line 9: no memory type 'f33'; expected one of i8"),
    "buffer": (("x[%u2]", "n[%u2]"), "line 9: n is no pointer parameter and no scratch array"),
    "stored": (("= %v7 if", "= %u2 if"), "store of i64 as f32"),
    "statement": (("store_lanes f32 y", "strore f32 y"), "line 11: expected a statement, got 'strore f32 y"),
    "end": (("}\n", ""), "the text ends before }"),
    "more": (("}\n", "}\nsync\n"), "line 13: nothing may follow the kernel's closing brace, got 'sync'"),
    "cell": (("%v7: f32 = mul %v6, k", "set %v6 = k"), "line 10: %v6 is no variable"),
    "constant": (
        ("idiv %u0, 64", "idiv %u0, 64.5_i64"),
        "line 3: '64.5_i64': a i64 constant is written without a point",
    ),
    "suffix": (("idiv %u0, 64", "idiv %u0, 64_i8"), "line 3: '64_i8': no type 'i8'"),
    "grid": (("grid %u1:", "grid %v1:"), "line 4: %v1 is not defined here"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake):
    (old, new), message = MISTAKES[mistake]
    assert SCALE.count(old) == 1 or mistake in ("access",)
    with pytest.raises(LoopError, match=message):
        parse_kernel(SCALE.replace(old, new, 1))


def test_empty_text():
    with pytest.raises(LoopTextError, match="expected 'kernel NAME"):
        parse_kernel("# nothing\n")


def test_damaged_text_is_refused_or_another_kernel():
    """Characters and lines removed, doubled or exchanged: a LoopError or a kernel, never anything else."""
    rng = np.random.default_rng(0)
    texts = [SCALE, *(print_kernel(c.kernel) for c in CASES if c.name in ("rope_6_NORM_3", "fused_softmax_2x63"))]
    refused = 0
    for _ in range(600):
        text = texts[rng.integers(len(texts))]
        parts = text.splitlines(keepends=True) if rng.random() < 0.3 else list(text)
        for _ in range(rng.integers(1, 4)):
            at, other = rng.integers(len(parts), size=2)
            match rng.integers(3):
                case 0:
                    parts[at] = ""
                case 1:
                    parts[at] = parts[at] * 2
                case 2:
                    parts[at], parts[other] = parts[other], parts[at]
        try:
            print_kernel(parse_kernel("".join(parts)))
        except LoopError as e:
            refused += 1
            assert str(e)
    assert refused > 400


def test_scope_ends_with_its_block():
    text = SCALE.replace("    %u2: i64 = mul %group, 64\n",
                         "    loop %i9 = 0 .. 3 {\n        %u2: i64 = mul %group, 64\n    }\n")
    with pytest.raises(LoopTextError, match="line 9: %u2 is not defined here"):
        parse_kernel(text)
