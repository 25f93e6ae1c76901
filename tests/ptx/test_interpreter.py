"""The PTX interpreter itself: arithmetic against closed forms, what it refuses, the races and faults it finds."""
from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.instructions import PtxError, Unsupported
from tests.ptx.interpreter import launch, parse

HEAD = """
.version 7.0
.target sm_80
.address_size 64

.shared .align 16 .b8 tile[256];
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u64 .ptr .global .align 1 k_param_1
)
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<30>;
	.reg .b64 	%rd<30>;

	ld.param.b64 	%rd1, [k_param_0];
	ld.param.b64 	%rd2, [k_param_1];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	mov.b64 	%rd9, tile;
	add.s64 	%rd4, %rd9, %rd3;
	mov.u32 	%r3, %ntid.x;
	mad.lo.s32 	%r4, %r2, %r3, %r1;
	mul.wide.u32 	%rd5, %r4, 4;
	add.s64 	%rd6, %rd1, %rd5;
	add.s64 	%rd7, %rd2, %rd5;
	ld.global.b32 	%r5, [%rd6];
"""
TAIL = "\n	st.global.b32 	[%rd7], %r9;\n	ret;\n}\n"


def run(body: str, x: np.ndarray, grid: int = 1, threads: int | None = None, out: np.ndarray | None = None,
        written=(False, True)):
    y = np.zeros(x.size, x.dtype) if out is None else out
    done = launch(HEAD + body + TAIL, [x, y], grid, threads or x.size // grid, written)
    return y, done


def test_blocks_and_threads():
    x = np.arange(12, dtype=np.uint32)
    y, done = run("	add.s32 	%r9, %r5, 1;", x, grid=3)
    assert (y == x + 1).all() and done.blocks == 3 and done.instructions == 3 * 16


FLOATS = np.array([0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, 1e-45, 3e38, 16777217.0, 2.5, -1e10, 0.1], np.float32)
UNARY = {"neg.f32": lambda x: -x, "abs.f32": np.abs, "sqrt.rn.f32": np.sqrt, "rcp.rn.f32": lambda x: np.float32(1) / x,
         "cvt.rni.f32.f32": np.rint, "cvt.rmi.f32.f32": np.floor}
BINARY = {"add.rn.f32": lambda a, b: a + b, "sub.rn.f32": lambda a, b: a - b, "mul.rn.f32": lambda a, b: a * b,
          "div.rn.f32": lambda a, b: a / b}


@pytest.mark.parametrize("op", [*UNARY, *BINARY])
def test_floats(op):
    b = np.float32(-0.3)
    operands = "%r5" if op in UNARY else "%r5, 0fBE99999A"
    y, _ = run(f"	{op} 	%r9, {operands};", FLOATS)
    with np.errstate(all="ignore"):
        expected = UNARY[op](FLOATS) if op in UNARY else BINARY[op](FLOATS, b)
    nan = np.isnan(expected)
    assert (y.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all()
    assert (y.view(np.uint32)[nan] == 0x7FFFFFFF).all()       # as the hardware writes it


def test_float_to_integer_saturates():
    x = np.array([1.9, -1.9, 3e9, -3e9, np.nan, np.inf, -np.inf, 2147483520.0], np.float32)
    y, _ = run("	cvt.rzi.s32.f32 	%r9, %r5;", x)
    assert y.view(np.int32).tolist() == [1, -1, 2 ** 31 - 1, -2 ** 31, 0, 2 ** 31 - 1, -2 ** 31, 2147483520]


@pytest.mark.parametrize("body, expected", (
    ("	shl.b32 	%r9, %r5, 33;", lambda x: 0 * x), ("	shr.s32 	%r9, %r5, 40;", lambda x: x >> 31),
    ("	shr.u32 	%r9, %r5, 4;", lambda x: x.view(np.uint32) >> 4), ("	mul.lo.s32 	%r9, %r5, %r5;", lambda x: x * x),
    ("	bfe.u32 	%r9, %r5, 8, 8;", lambda x: x >> 8 & 255),
    *((f"	shf.l.wrap.b32 	%r9, 305419896, %r5, {n};",         # 0x12345678 follows from below
       lambda x, n=n & 31: (x.astype(np.int64) << n | 0x12345678 >> (32 - n)) & 0xFFFFFFFF) for n in (0, 1, 31, 33)),
    ("	bfe.s32 	%r9, %r5, 8, 8;", lambda x: (x << 16) >> 24),
    ("	mul.hi.s32 	%r9, %r5, 1431655766;", lambda x: (x.astype(np.int64) * 1431655766 >> 32)),
    ("	cvt.s32.s8 	%r9, %r5;", lambda x: (x << 24) >> 24), ("	min.s32 	%r9, %r5, -5;", lambda x: np.minimum(x, -5)),
    ("	setp.lt.u32 	%p1, %r5, 9;\n	selp.b32 	%r9, 1, %r5, %p1;", lambda x: np.where(x.view(np.uint32) < 9, 1, x)),
    ("	dp4a.u32.s32 	%r9, %r5, -16776961, 7;",             # bytes of the second: -1, 0, 0, -1
     lambda x: 7 - (x & 255) - (x.view(np.uint32) >> 24).astype(np.int32))))
def test_integers(body, expected):
    x = np.array([0, 1, -1, 255, 256, -2 ** 31, 2 ** 31 - 1, 0x01FF80FF, -12345678], np.int32)
    with np.errstate(all="ignore"):
        want = np.asarray(expected(x))
    y, _ = run(body, x)
    assert (y.view(np.uint32) == want.astype(np.int64).astype(np.uint32)).all()


def test_fma_rounds_once():
    x = np.array([1 + 2.0 ** -12], np.float32)
    y, _ = run("	fma.rn.f32 	%r9, %r5, %r5, 0fBF800000;", x)
    assert y[0] == np.float32(2.0 ** -11 + 2.0 ** -24)


def test_diverging_threads_meet_again():
    body = """
	setp.lt.s32 	%p1, %r1, 3;
	@%p1 bra 	$L__small;
	add.s32 	%r9, %r5, 100;
	bra.uni 	$L__joined;
$L__small:
	add.s32 	%r9, %r5, 200;
$L__joined:
	st.shared.b32 	[%rd4], %r9;
	bar.sync 	0;
	ld.shared.b32 	%r9, [tile+4];
"""
    x = np.arange(8, dtype=np.uint32)
    y, done = run(body, x)
    assert (y == 201).all() and done.barriers == 1


FAULTS = {
    "race": ("	st.shared.b32 	[%rd4], %r5;\n	ld.shared.b32 	%r9, [tile+4];", "reads what another thread wrote"),
    "write after read": ("	mov.b32 	%r9, 1;\n	ld.shared.b32 	%r8, [tile+4];\n	st.shared.b32 	[%rd4], %r9;",
                         "writes what another thread read"),
    "same byte": ("	mov.b32 	%r9, 1;\n	st.shared.b32 	[tile], %r9;", "two threads store to the same byte"),
    "bounds": ("	mov.b32 	%r9, 1;\n	st.shared.b32 	[%rd4+256], %r9;", "byte 256 of shared memory, which has 256"),
    "alignment": ("	ld.shared.b32 	%r9, [%rd4+2];", "4-byte access to shared memory at byte 2, not aligned"),
    "read-only": ("	mov.b32 	%r9, 1;\n	st.global.b32 	[%rd6], %r9;", "store to argument k_param_0, which is read-only"),
    "wild": ("	mov.b64 	%rd8, 12345;\n	ld.global.b32 	%r9, [%rd8];", "global address 0x3039 belongs to no argument"),
    "barrier": ("	mov.b32 	%r9, 1;\n	setp.lt.s32 	%p1, %r1, 3;\n	@%p1 bra 	$L__skip;\n	bar.sync 	0;\n$L__skip:",
                "threads left before the barrier"),
    "two barriers": ("	mov.b32 	%r9, 1;\n	setp.lt.s32 	%p1, %r1, 3;\n	@%p1 bra 	$L__b;\n	bar.sync 	0;\n"
                     "	bra.uni 	$L__e;\n$L__b:\n	bar.sync 	0;\n$L__e:", "threads wait at different barriers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    body, message = FAULTS[fault]
    with pytest.raises(PtxError, match=message):
        run(body, np.arange(8, dtype=np.uint32))


def test_blocks_may_not_share_bytes():
    x = np.arange(8, dtype=np.uint32)
    with pytest.raises(PtxError, match="writes what another block wrote"):
        run("	add.s64 	%rd7, %rd2, %rd3;\n	mov.b32 	%r9, 1;", x, grid=2)


OUTSIDE = ("sin.approx.f32 	%r9, %r5;", "add.ftz.f32 	%r9, %r5, %r5;", "div.full.f32 	%r9, %r5, %r5;",
           "mad.rn.f32 	%r9, %r5, %r5, %r5;", "min.f32 	%r9, %r5, %r5;", "ex2.approx.f32 	%r9, %r5;",
           "@%p1 add.s32 	%r9, %r5, 1;", "shfl.sync.down.b32 	%r9, %r5, 1, 31, -1;", "add.s32 	%r9, %f5, 1;",
           "atom.global.add.u32 	%r9, [%rd6], 1;", "vote.sync.any.pred 	%p1, %p2, -1;", ".pragma \"nounroll\";",
           "ld.shared.v2.b32 	{%r9, %r8}, [%rd4];")


@pytest.mark.parametrize("line", OUTSIDE)
def test_everything_else_is_refused_by_name(line):
    with pytest.raises(Unsupported, match="the interpreter knows no"):
        run(f"	{line}", np.arange(8, dtype=np.uint32))


def test_no_entry_is_refused():
    with pytest.raises(PtxError, match="no .entry"):
        parse(".version 7.0\n.target sm_80\n")
