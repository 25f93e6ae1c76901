"""The program whose blocks the model-based test executes in random order, and how the random operations are drawn.

Every operation has a block of one instruction (`token` has several), which ends with YIELD.  Operands that vary are in
registers from R20 on, which the test writes before each operation and does not compare.
"""
from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np

from m3jit.frontend.assembler import assemble
from m3jit.isa.types import Tensor
from m3jit.vm.extensions import Extension, Registry, pack
from m3jit.isa.fields import Reg
from tests.vm.state_model.oracle import GENERAL, HEADS, PIECES, WIDTH

NAMED = 5                          # general registers that programs name: R0 to R4
ACT, ARENA, SHARED = 3 << 60, 5 << 60, (6 << 60)
CALLS = ((), (0,), (1, 3), (4, 0, 2))
TENSORS = {"q": 24, "k": 25, "v": 26, "x": 27, "dt": 28, "a": 29, "b": 30, "g": 31, "w": 32, "logits": 33}
NUMBERS = {"address": 20, "size": 21, "source": 23, "length": 34, "sink": 35, "window": 36, "token": 37, "value": 39}
CHANNELS, D_STATE, TAPS, VOCABULARY = 6, 4, 3, 8


class Words:
    """A model that is nothing but a vocabulary."""

    def __init__(self, name: str):
        self.name = name

    def decode_bytes(self, token: int) -> bytes:
        return PIECES[token]


class Provider:
    def load(self, reference: str, quant: str = "") -> Words:
        return Words(reference)


PROVIDER = Provider()


def _counted(held: tuple | None, value: int, immediate: bytes = b"") -> tuple[int, tuple]:
    """An extension whose state is its last four inputs; gives their sum."""
    new = (*(held or ()), value)[-4:]
    return sum(new), new


def registry() -> Registry:
    found = Registry()
    found.add(Extension("last four", 7, (1, 0), _counted, state=True))
    return found


def _blocks() -> dict[str, str]:
    out = {"seed": "RNG_SEED R39", "reset": "SSM_RESET S2", "ret": "RET", "arena_reset": "ARENA_RESET",
           "memcpy": "MEMCPY R20, R22", "memmove": "MEMCPY R20, R23, LEN=R21", "setmodel": "",
           "memset_0": "MEMSET R20, PATTERN=0, LEN=R21", "memset_90": "MEMSET R20, PATTERN=90, LEN=R21",
           "scan_0": "SSM_SCAN R6, R27, S2, R28, R29, R30, R31, LAYER=0",
           "scan_1": "SSM_SCAN R6, R27, S2, R28, R29, R30, R31, LAYER=1",
           "conv_0": "CONV R7, R27, R32, _, S2, LAYER=0",
           "token": "SSM_SCAN R6, R27, S2, R28, R29, R30, R31, LAYER=0\n CONV R7, R27, R32, _, S2, LAYER=0\n"
                    f" ATTN R5, R24, R25, R26, S0, HEADS={HEADS}, LAYER=0\n SAMPLE R8, R33\n RNG_NEXT R9"}
    del out["setmodel"]
    for s, kind in ((0, "F16"), (1, "F32")):
        for layer in (0, 1):
            out[f"attend_{s}_{layer}"] = f"ATTN R5, R24, R25, R26, S{s}, HEADS={HEADS}, LAYER={layer}, KV_TYPE={kind}"
        out[f"truncate_{s}"] = f"KV_TRUNCATE S{s}, R34"
        out[f"compress_{s}"] = f"KV_COMPRESS S{s}, SINK=R35, WINDOW=R36"
    for i, args in enumerate(CALLS):
        listed = ", ".join(f"R{a}" for a in args)
        out[f"call_{i}"] = "CALL callee" + (f" ARGS=[{listed}]" if args else "")
    for r in range(NAMED):
        out |= {f"set_{r}": f"MOV R{r}, R39", f"cmp_{r}": f"COMPAREI R{r}, 0", f"fork_{r}": f"FORK R{r}",
                f"snapshot_{r}": f"SNAPSHOT R{r}", f"switch_{r}": f"CTX_SWITCH R{r}", f"abort_{r}": f"ABORT R{r}",
                f"resume_{r}": f"ABORT R{r}, RESUME", f"restore_{r}": f"RESTORE R{r}", f"child_{r}": f"FORK R{r}, idle",
                f"spawn_{r}": f"SPAWN_CONTEXT R{r}, idle", f"kill_{r}": f"KILL_CONTEXT R{r}",
                f"load_{r}": f'LOAD_MODEL R{r}, "m"', f"unload_{r}": f"UNLOAD_MODEL R{r}",
                f"setmodel_{r}": f"SET_MODEL R{r}", f"sense_{r}": f"SENSE R{r}, TOKEN, NON_BLOCKING",
                f"stream_{r}": f"STREAM R37, OUTPUT, TEXT, MODEL=R{r}", f"sample_{r}": f"SAMPLE R{r}, R33",
                f"draw_{r}": f"RNG_NEXT R{r}", f"alloc_{r}": f"ARENA_ALLOC R{r}, R21",
                f"preempt_{r}": f"PREEMPT_CHECK R{r}",
                f"ext_{r}": f'ESCAPE EXT=7, VERSION=1, PAYLOAD="{pack([Reg(0, r)], [Reg(0, 39)], b"").hex()}"'}
        for s in range(NAMED):
            out[f"mov_{r}_{s}"] = f"MOV R{r}, R{s}"
    return out


@functools.cache
def program() -> tuple[Any, dict[str, int], frozenset[int]]:
    """(the program, block -> index of its first instruction, indices where blocks have ended)."""
    lines, starts, ends, at = ["    HALT"], {}, set(), 1
    for name, text in _blocks().items():
        lines += [f"{name}:", f"    {text}", "    YIELD"]
        starts[name] = at
        at += text.count("\n") + 2
        ends.add(at)
    lines += ["idle:", "callee:", "    YIELD", "    HALT"]
    ends.add(at + 1)
    return assemble("\n".join(lines) + "\n", "blocks.m3asm"), starts, frozenset(ends)


# -- random operations ------------------------------------------------------------------------------------------------

def _pool(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    made = np.random.default_rng(seed)
    return [Tensor.of((made.standard_normal(shape) * scale).astype(np.float32)) for _ in range(VARIANTS)]


VARIANTS = 3
ROWS = (1, 1, 1, 2, 7, 40)         # that an operation appends; a page has 64
FEW_ROWS = (1, 1, 1, 2)            # of recurrences, which are one step after the other
_POOLS = {n: [_pool((n, WIDTH), seed=n + i) for i in range(3)] + [_pool((n, CHANNELS), seed=n + 3)] +
          [[Tensor.of(np.abs(a.data)) for a in _pool((n, CHANNELS), 0.3, seed=n + 4)]] +
          [_pool((n, D_STATE), seed=n + i) for i in (5, 6)]
          for n in {*ROWS, *FEW_ROWS}}
_A, _W = Tensor.of(-np.abs(_pool((CHANNELS, D_STATE))[0].data)), _pool((CHANNELS, TAPS))[0]
_LOGITS = _pool((VOCABULARY,))
OFFSETS = (0, 100, 4090, 4096, 8000)
WEIGHTS = {"set": 2, "mov": 4, "cmp": 2, "fork": 9, "snapshot": 2, "switch": 1, "abort": 9, "resume": 3, "restore": 4,
           "host_fork": 1, "host_abort": 1, "call": 2, "ret": 2, "child": 1, "spawn": 1, "kill": 1, "load": 3,
           "unload": 1, "setmodel": 2, "sense": 3, "stream": 4, "sample": 2, "draw": 2, "seed": 1, "interrupt": 1,
           "preempt": 1, "attend": 10, "truncate": 3, "compress": 1, "scan": 4, "conv": 3, "reset": 1, "token": 3,
           "memset": 4, "memcpy": 1, "memmove": 1, "alloc": 2, "arena_reset": 1, "ext": 2}
_KINDS, _SHARES = list(WEIGHTS), list(WEIGHTS.values())


def tensors(rng: random.Random, rows: int) -> dict[str, Tensor]:
    at, other = rng.randrange(VARIANTS), rng.randrange(VARIANTS)
    q, k, v, x, dt, b, g = (pool[at] for pool in _POOLS[rows])
    q = _POOLS[rows][0][other]
    return {"q": q, "k": k, "v": v, "x": x, "dt": dt, "a": _A, "b": b, "g": g, "w": _W, "logits": rng.choice(_LOGITS)}


_WANTED = {"abort": "snapshot", "resume": "snapshot", "restore": "snapshot", "kill": "context", "unload": "state",
           "setmodel": "state", "stream": "state"}           # what the register of these should name


def draw(rng: random.Random, root: Any) -> tuple[tuple, dict[str, Any]]:
    """(operation, its parameters): a random one.  root: of the context; what names the right thing comes often."""
    kind = rng.choices(_KINDS, _SHARES)[0]
    r, s = rng.randrange(NAMED), rng.randrange(NAMED)
    fitting = [i for i, v in enumerate(root.R[:NAMED]) if getattr(v, "what", "") == _WANTED.get(kind, "-")]
    if fitting and rng.random() < 0.9:
        r = rng.choice(fitting)
    t = tensors(rng, rng.choice(ROWS if kind == "attend" else FEW_ROWS))

    def of(*names: str) -> dict[str, Any]:
        return {n: t[n] for n in names}
    address = rng.choice((ACT, ACT, ARENA, SHARED)) + rng.choice(OFFSETS) * rng.choice((0, 1))
    stream = rng.randrange(2)
    match kind:
        case "set":
            return (kind, r), {"value": rng.randrange(-2, 3)}
        case "mov":
            return (kind, r, s), {}
        case "seed":
            return (kind,), {"value": rng.randrange(100)}
        case "ext":
            return (kind, r), {"value": rng.randrange(100)}
        case "call":
            return (kind, rng.choice(CALLS)), {}
        case "stream":
            return (kind, r), {"token": rng.randrange(len(PIECES))}
        case "sample":
            return (kind, r), of("logits")
        case "attend":
            return (kind, stream, rng.randrange(2)), of("q", "k", "v")
        case "truncate":
            return (kind, stream), {"length": rng.choice((-1, 0, 1, 5, 30, 63, 64, 65, 100))}
        case "compress":
            return (kind, stream), {"sink": rng.choice((0, 2, 40)), "window": rng.choice((0, 3, 30))}
        case "scan":
            return (kind, rng.randrange(2)), of("x", "dt", "a", "b", "g")
        case "conv":
            return (kind, 0), of("x", "w")
        case "token":
            return (kind,), of("q", "k", "v", "x", "dt", "a", "b", "g", "w", "logits")
        case "memset":
            return (kind, rng.choice((0, 90))), {"address": address, "size": rng.choice((1, 3, 200, 4100))}
        case "memcpy":
            return (kind,), {"address": address, "source": t["x"]}
        case "memmove":
            other = rng.choice((ACT, SHARED)) + rng.choice(OFFSETS)
            return (kind,), {"address": address, "source": other, "size": rng.choice((1, 200, 4100))}
        case "alloc":
            return (kind, r), {"size": rng.choice((1, 40, 500))}
        case "host_abort":
            return (kind,), {"resume": rng.random() < 0.5, "place": rng.randrange(2)}
        case "host_fork" | "interrupt" | "ret" | "reset" | "arena_reset":
            return (kind,), {}
    return (kind, r), {}


def block_of(op: tuple) -> str:
    """The name of an operation's block."""
    if op[0] == "call":
        return f"call_{CALLS.index(op[1])}"
    return "_".join(map(str, op))


def signed(v: int) -> int:
    return v - (1 << 64) if v >= 1 << 63 else v


def put_parameters(ctx: Any, params: dict[str, Any]) -> None:
    """Write an operation's parameters to their registers."""
    for name, value in params.items():
        if value.__class__ is Tensor:
            ctx.R[22 if name == "source" else TENSORS[name]] = value
        elif name in NUMBERS:
            ctx.R[NUMBERS[name]] = signed(value)


assert GENERAL <= min(NUMBERS.values())
