"""Moves: RESHAPE SLICE CONCAT BROADCAST PAD TILE TRANSPOSE GATHER.  Bits are copied unchanged, NaN included."""
from __future__ import annotations

from m3jit.isa.fields import F32, I8, I32, R1, R2, R3, R4, U32, BytesField, Enum, IntOrReg, Rd, Shape
from m3jit.isa.forms import ANY, plus
from m3jit.isa.table import op


@op(0x2D, "RESHAPE", shape="SHAPE", dtypes=ANY + " and block types (last axis kept)", positional=("shape",),
    sample={"shape": (-1,)})
def reshape(xp, rd: Rd, x: R1, shape: Shape[0]):
    """rd = the elements of x, in row-major order, under SHAPE; one dimension may be -1 (inferred).

    Traps: another number of elements; a -1 that cannot be inferred."""
    return xp.reshape(x, shape)


@op(0x2E, "SLICE", shape="that of x, axis ceil(LEN / STEP)", dtypes=ANY, positional=("start", "len"))
def slice_(xp, rd: Rd, x: R1, start: IntOrReg(fmt="i")[0, 4] = 0, len: IntOrReg(fmt="i")[5, 9] = -1, step: I32[10] = 1,
           axis: I8[14] = 0):
    """rd = positions START, START + STEP, ... below START + LEN of an axis.

    A negative START counts from the end; LEN=-1 reaches to the end.  Traps: positions outside the axis, STEP < 1."""
    if type(len) is int and len < -1:
        raise xp.error(f"SLICE needs LEN from 0, or -1 for the rest, got {len}")
    if type(start) is int and start < 0:
        start = plus(xp, xp.dim(x, axis), start)
    stop = None if type(len) is int and len == -1 else plus(xp, start, len)
    return xp.slice(x, axis, start, stop, step)


@op(0x2F, "CONCAT", shape="that of a, the axis added up", dtypes=ANY, positional=("axis",))
def concat(xp, rd: Rd, a: R1, b: R2, c: R3 = None, d: R4 = None, axis: I8[0] = 0):
    """rd = a, b (and c, d) one after the other along an axis.  Traps: dtypes or other dimensions that differ."""
    return xp.concat([t for t in (a, b, c, d) if t is not None], axis)


@op(0x34, "BROADCAST", shape="SHAPE", dtypes=ANY, positional=("shape",), sample={"shape": (2, 3)})
def broadcast(xp, rd: Rd, x: R1, shape: Shape[0]):
    """rd = x repeated to SHAPE: aligned at the last axis, each dimension of x is 1 or equal.  Traps: anything else."""
    return xp.broadcast(x, shape)


@op(0x35, "PAD", shape="that of x, axis BEFORE + n + AFTER", dtypes=ANY)
def pad(xp, rd: Rd, x: R1, value: F32[0] = 0.0, axis: I8[4] = 0, before: U32[5] = 0, after: U32[9] = 0):
    """rd = x with BEFORE and AFTER elements of VALUE around it along an axis (VALUE in x's dtype).

    Traps: a VALUE that is no integer for an integer tensor."""
    return xp.pad(x, axis, before, after, value)


@op(0x36, "TILE", shape="that of x, axis n * REPS", dtypes=ANY, positional=("reps",), sample={"reps": 2})
def tile(xp, rd: Rd, x: R1, reps: IntOrReg(fmt="i")[0, 4], axis: I8[5] = 0):
    """rd = the whole axis REPS times over: a b c a b c.  Traps: REPS < 0."""
    return xp.tile(x, axis, reps)


@op(0x37, "TRANSPOSE", shape="dimensions of x in the order of AXES", dtypes=ANY, positional=("axes",))
def transpose(xp, rd: Rd, x: R1, axes: BytesField(count=5)[0] = ()):
    """rd = x with axis i taken from axis AXES[i] of x; without AXES the order is reversed.

    Traps: AXES that are not a permutation of x's axes."""
    return xp.transpose(x, axes or tuple(reversed(range(len(x.shape)))))


@op(0x1F, "GATHER", shape="GATHER: table's, the axis replaced by the index's shape; else that of acc", dtypes=ANY,
    positional=("mode",))
def gather(xp, rd: Rd, table: R1, index: R2, acc: R3 = None, axis: I8[0] = 0,
           mode: Enum("GATHER SCATTER_ADD SCATTER_MAX")[1] = "GATHER"):
    """GATHER: rd[.., n.., ..] = table[.., index[n..], ..].  SCATTER_ADD, SCATTER_MAX: rd = acc with the slices
    table[.., n.., ..] added to (or maximised into) acc[.., index[n..], ..], n in order.

    index: an integer tensor of any shape; its values are 0 .. length - 1.  SCATTER_MAX ignores NaN; F16 and BF16 sums
    are kept in f32 and rounded once.  Traps: an index outside the axis (named with its position); shapes or dtypes that
    do not fit; a scatter without acc."""
    if mode == "GATHER":
        return xp.gather(table, index, axis)
    if acc is None:
        raise xp.error(f"{mode} needs the accumulator as third operand")
    return xp.scatter(acc, index, table, axis, mode.removeprefix("SCATTER_"))
