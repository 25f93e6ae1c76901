"""Drawing a token from logits: the SAMPLE instruction's steps in one kernel.

1. history: each of its last `window` tokens (0: all): logit <= 0: times penalty, else divided by it.
2. Tokens whose mask is 0 and tokens whose logit is NaN are out.
3. temperature 0: the first greatest logit, nothing is drawn.  Else candidates in descending order, ties by index.
4. top_k > 0: the first top_k.  5. top_p < 1: the fewest whose running sum of e^(l - l_0) reaches top_p of the whole.
6. min_p > 0: those with e^(l - l_0) >= min_p.  7. logits / temperature, w_i = e^(l_i - l_0) (exactly 1 where equal).
8. One draw u of 24 bits (splitmix64): the first candidate whose running sum of w exceeds u times the whole sum.
Exponentials in f32, running sums in f64 in order.

Schedule: logits become integers of the same order; the maxima of 1,024 interleaved buckets give a bound that at least
top_k logits reach, so that only the few above it are collected and sorted.  One group.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from m3jit.ir import scalar_math
from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder, Var
from m3jit.kernels.sort import DIGITS, radix_pass

OK, NOTHING_ALLOWED, BAD_HISTORY = 0, 1, 2   # status
LANES, ROWS = 16, 64                         # 1,024 buckets: ROWS vectors
OUT = -2 ** 31                               # key of a token that is out
GOLDEN, MIX1, MIX2 = (c - (1 << 64) if c >> 63 else c for c in
                      (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WORK = {"keys": 4, "sort_keys0": 4, "sort_keys1": 4, "index0": 4, "index1": 4, "weights": 4, "sums": 8}
BYTES_PER_LOGIT = sum(_WORK.values())


def work_bytes(n: int) -> int:
    """Size of the work buffer for n logits."""
    return (n + LANES) * BYTES_PER_LOGIT


@dataclass(frozen=True, slots=True)
class Operands:
    """Which operands the kernel takes, and their memory types ("" = absent)."""
    logits: str = "f32"
    history: str = ""
    mask: str = ""


@functools.lru_cache(maxsize=None)
def sample(o: Operands) -> Kernel:
    """logits r [n], [history r integers,] [mask r bool or integers [n],] work rw u8 (`work_bytes`), out w i64 [3],
    n, [history_len, window,] rng, top_k i64, temperature f32, [penalty f32,] top_p, min_p f64; 1 <= n < 2^31.

    out: token, next RNG state, status (OK; NOTHING_ALLOWED: the mask leaves none; BAD_HISTORY: a token outside 0..n-1).
    All logits NaN and no mask: token 0 and the same state."""
    return _Sample(o).build()


class _Sample:
    def __init__(self, o: Operands):
        self.o = o
        self.b = b = Builder("sample_" + "_".join(filter(None, (o.logits, o.history and "h" + o.history,
                                                                o.mask and "m" + o.mask))), LANES)
        self.logits = b.ptr("logits", "r", o.logits)
        self.history = b.ptr("history", "r", o.history) if o.history else None
        self.mask = b.ptr("mask", "r", o.mask) if o.mask else None
        self.work, self.out = b.ptr("work", "rw", "i32"), b.ptr("out", "w", "i64")
        self.n = b.scalar("n")
        if self.history is not None:
            self.history_len, self.window = b.scalar("history_len"), b.scalar("window")
        self.rng, self.top_k = b.scalar("rng"), b.scalar("top_k")
        self.temperature = b.scalar("temperature", "f32")
        self.penalty = b.scalar("penalty", "f32") if self.history is not None else None
        self.top_p, self.min_p = b.scalar("top_p", "f64"), b.scalar("min_p", "f64")
        b.set_grid(1)
        at, room = b.i64(0), self.n + LANES
        self.place: dict[str, Buffer] = {}
        for name, size in sorted(_WORK.items(), key=lambda item: -item[1]):
            self.place[name] = self.work.at(at)
            at = at + room * size

    def build(self) -> Kernel:
        b, p = self.b, self.place
        self.status = b.var("i64", OK, varying=False)
        self.state = b.var("i64", self.rng, varying=False)
        self.token = b.var("i64", 0, varying=False)
        self.make_keys()
        if self.history is not None:
            b.sync()
            self.penalise()
        b.sync()
        greedy = self.temperature.equals(0.0)
        k = b.select(b.i64(0) < self.top_k, b.imin(self.top_k, self.n), self.n)
        k = b.select(greedy, b.i64(1), k)
        count = self.collect(self.bound(k))
        b.sync()
        with b.if_(b.i64(0) < count):
            order = self.sort(count)
            kept = b.var("i64", b.imin(count, k), varying=False)
            index = b.var("i64", 0, varying=False)
            with b.if_(b.logical_not(greedy)):
                index.set(self.draw(kept, order))
            b.sync()
            self.token.set(b.cvt(b.load("i32", p["index0"], index.get()), "i64"))
        if self.mask is not None:
            with b.else_():
                self.status.set(b.select(self.status.get().equals(OK), b.i64(NOTHING_ALLOWED), self.status.get()))
        b.store("i64", self.out, 0, self.token.get())
        b.store("i64", self.out, 1, self.state.get())
        b.store("i64", self.out, 2, self.status.get())
        return b.finish()

    # -- keys ---------------------------------------------------------------------------------------------------
    def key(self, v: Value, allowed: Value | None) -> Value:
        """Signed integer in the order of the logits; -0 as +0; OUT where NaN or not allowed."""
        b = self.b
        bits = b.bits(b.select(v.equals(0.0), b.f32(0.0), v))
        ordered = b.select(bits < 0, bits ^ 0x7FFFFFFF, bits)
        inside = b.pure("eq", v, v)
        return b.select(inside if allowed is None else inside & allowed, ordered, b.i32(OUT))

    def value(self, key: Value) -> Value:
        b = self.b
        return b.bits(b.select(key < 0, key ^ 0x7FFFFFFF, key))

    def make_keys(self) -> None:
        b = self.b
        with b.loop(0, self.n, LANES) as at:
            inside = b.in_range(at, self.n)
            allowed = inside
            if self.mask is not None:
                m = b.load_lanes(self.o.mask, self.mask, at, inside)
                allowed = inside & b.pure("ne", m, b.lift(0, m.type))
            v = b.load_lanes(self.o.logits, self.logits, at, inside)
            b.store_lanes("i32", self.place["keys"], at, self.key(v, allowed))        # the last vector is padded

    def penalise(self) -> None:
        """Keys of the recent tokens, from their own logits: repetitions change nothing."""
        b, n = self.b, self.n
        first = b.imax(self.history_len - self.window, b.i64(0))
        first = b.select(self.window.equals(0), b.i64(0), first)
        with b.loop(first, self.history_len) as i:
            token = b.cvt(b.load(self.o.history, self.history, i), "i64")
            inside = (b.i64(0) <= token) & (token < n)
            with b.if_(inside):
                v = b.load(self.o.logits, self.logits, token)
                v = b.select(v <= 0.0, v * self.penalty, v / self.penalty)
                old = b.load("i32", self.place["keys"], token)
                b.store("i32", self.place["keys"], token, b.select(old.equals(OUT), old, self.key(v, None)))
            with b.else_():
                self.status.set(b.i64(BAD_HISTORY))

    # -- candidates ---------------------------------------------------------------------------------------------
    def bound(self, k: Value) -> Value:
        """A key that at least k keys reach (fewer only if fewer tokens are allowed), close to the k-th greatest."""
        b = self.b
        buckets = b.scratch("buckets", "i32", ROWS * LANES)
        with b.loop(0, ROWS * LANES, LANES) as r:
            b.store_lanes("i32", buckets, r, b.i32(OUT))
        with b.loop(0, self.n, LANES) as at:
            row = at % (ROWS * LANES)
            key = b.load_lanes("i32", self.place["keys"], at)
            b.store_lanes("i32", buckets, row, b.imax(b.load_lanes("i32", buckets, row), key))
        b.sync()
        low = b.var("i64", OUT, varying=False)
        with b.if_(k <= ROWS * LANES):
            step = b.var("i64", 1 << 31, varying=False)
            with b.loop(0, 32):              # the greatest value that k buckets reach, bit by bit from the highest
                trial = low.get() + step.get()
                reached = b.var("i32", 0)
                with b.loop(0, ROWS * LANES, LANES) as r:
                    key = b.load_lanes("i32", buckets, r)
                    reached.set(reached.get() + b.cvt(b.cvt(trial, "i32") <= key, "i32"))
                enough = k <= b.cvt(b.fold(reached.get(), "add"), "i64")
                low.set(b.select(enough & (trial < 1 << 31), trial, low.get()))
                step.set(b.lshr(step.get(), 1))
        return b.cvt(b.imax(low.get(), b.i64(OUT + 1)), "i32")

    def collect(self, bound: Value) -> Value:
        """Keys that reach the bound, with their tokens in order, ready for the descending sort; their number."""
        b, p = self.b, self.place
        count = b.var("i64", 0, varying=False)
        with b.loop(0, self.n, LANES) as at:
            hit = bound <= b.load_lanes("i32", p["keys"], at)
            with b.if_(b.pure("ne", b.fold(b.cvt(hit, "i32"), "or"), b.i32(0))):
                with b.loop(at, b.imin(at + LANES, self.n)) as i:
                    key = b.load("i32", p["keys"], i)
                    with b.if_(bound <= key):
                        b.store("i32", p["sort_keys0"], count.get(), (key ^ OUT) ^ -1)
                        b.store("i32", p["index0"], count.get(), b.cvt(i, "i32"))
                        count.set(count.get() + 1)
        return count.get()

    def sort(self, count: Value) -> Buffer:
        b, p = self.b, self.place
        counts = b.scratch("counts", "i32", DIGITS)
        keys, indices = [p["sort_keys0"], p["sort_keys1"]], [p["index0"], p["index1"]]
        with b.loop(0, 4, 2) as byte:
            radix_pass(b, counts, "i32", keys, indices, 0, byte, count)
            radix_pass(b, counts, "i32", keys, indices, 1, byte + 1, count)
        b.sync()
        return keys[0]

    # -- the draw ----------------------------------------------------------------------------------------------
    def draw(self, kept: Var, order: Buffer) -> Value:
        """Index of the drawn candidate; narrows `kept` and advances the state."""
        b = self.b
        with b.loop(0, 3) as stage:          # top_p, min_p, the weights of the draw itself
            last = stage.equals(2)
            wanted = last | (stage.equals(0) & (self.top_p < 1.0)) | (stage.equals(1) & (b.f64(0.0) < self.min_p))
            with b.if_(wanted):
                self.sum_weights(kept.get(), order, b.select(last, self.temperature, b.f32(1.0)))
                with b.if_(stage.equals(0)):
                    total = b.load("f64", self.place["sums"], kept.get() - 1)
                    kept.set(b.imin(self.count_sums(kept.get(), self.top_p * total, inclusive=False) + 1, kept.get()))
                with b.if_(stage.equals(1)):
                    kept.set(self.count_heavy(kept.get()))
        state = self.rng + GOLDEN
        z = (state ^ b.lshr(state, 30)) * MIX1
        z = (z ^ b.lshr(z, 27)) * MIX2
        z = z ^ b.lshr(z, 31)
        self.state.set(state)
        u = b.cvt(b.lshr(z, 40), "f64") * 2.0 ** -24
        target = u * b.load("f64", self.place["sums"], kept.get() - 1)
        return b.imin(self.count_sums(kept.get(), target, inclusive=True), kept.get() - 1)

    def sum_weights(self, count: Value, order: Buffer, divisor: Value) -> None:
        """weights and their running sums over the first `count` candidates, of logits / divisor."""
        b, p = self.b, self.place
        b.sync()                             # nobody reads the weights of the stage before any more
        first = self.value((b.load("i32", order, 0) ^ -1) ^ OUT) / divisor
        with b.loop(0, count, LANES) as at:
            inside = b.in_range(at, count)
            v = self.value((b.load_lanes("i32", order, at, inside) ^ -1) ^ OUT) / divisor
            w = b.select(v.equals(first), b.f32(1.0), scalar_math.exp(b, v - first))
            b.store_lanes("f32", p["weights"], at, w, inside)
        b.sync()
        total = b.var("f64", 0.0, varying=False)
        with b.loop(0, count) as i:
            total.set(total.get() + b.cvt(b.load("f32", p["weights"], i), "f64"))
            b.store("f64", p["sums"], i, total.get())
        b.sync()

    def count_heavy(self, count: Value) -> Value:
        """How many weights reach min_p."""
        b = self.b
        heavy = b.var("i64", 0, varying=False)
        with b.loop(0, count) as i:
            w = b.cvt(b.load("f32", self.place["weights"], i), "f64")
            heavy.set(heavy.get() + b.cvt(self.min_p <= w, "i64"))
        return heavy.get()

    def count_sums(self, count: Value, limit: Value, inclusive: bool) -> Value:
        """How many running sums are below the limit (or equal to it, when inclusive)."""
        b = self.b
        below = b.var("i64", 0, varying=False)
        with b.loop(0, count) as i:
            s = b.load("f64", self.place["sums"], i)
            below.set(below.get() + b.cvt(s <= limit if inclusive else s < limit, "i64"))
        return below.get()
