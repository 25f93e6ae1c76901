"""Coverage-guided fuzzing of what reads files from outside: assembler, formatter, loader and verifier.

    python tools/fuzz.py --target assemble --seconds 120
    python tools/fuzz.py --target load --seconds 120 --seed 7 --crashes build/crashes

With atheris installed it drives the search; without, a mutation fuzzer keeps every input that reaches a new edge
between lines of m3jit/frontend and m3jit/isa.  An input is a find when anything but the declared errors comes out, when
it takes longer than the limit, or when what is accepted does not survive the round trip.  Finds are written as files
and make the exit status 1; each should become a test.
"""
from __future__ import annotations

import argparse
import os
import random
import struct
import sys
import time
import traceback
from typing import Callable

import xxhash

from m3jit.frontend import (AssemblyError, Cfg, ContainerError, assemble, disassemble, format_source, liveness, load,
                            verify)
from m3jit.isa.table import OPS, load_table

load_table()
SLOW = 5.0                         # seconds one small input may take, under tracing
SEEDS_TEXT = ["""
.model net "net.gguf"
.equ N 5
.data
x: .f32 [2, 2] [1, 2, nan:0x7fc00001, -0.0]
t: .str "a\\n\\u{e9}"
p: .i64 [&x+4, 7]
.text
start: LOADI rX, @x
LOADI rY, "text"
LOADI rZ, @net:blk.0.w
COMPARE rX, N
IF_LESS rX, start
CALL f ARGS=[rX, rY]
ESCAPE EXT=1 FLAGS=1 PAYLOAD="00ff"
NOP LAMPORT=5 DEADLINE=80ms
HALT
.func f(rA, rB)
.loc "b.m3asm" 7
SUB rA, rA, 1
RET
"""]


def check_assemble(data: bytes) -> None:
    """Text -> program or AssemblyError; a program goes to text and back."""
    try:
        p = assemble(data.decode("utf-8", "replace"))
    except AssemblyError as e:
        assert e.errors and all(x.line >= 1 and x.column >= 1 for x in e.errors), "an error without a place"
        return
    assert verify(p) == [], "the assembler made an unsound program"
    q = assemble(disassemble(p))
    assert (p.text, p.data, p.symbols, p.relocs, p.lines, p.imports) == \
        (q.text, q.data, q.symbols, q.relocs, q.lines, q.imports), "the disassembly gives another program"


def check_format(data: bytes) -> None:
    """Text -> text or AssemblyError; twice is once."""
    try:
        once = format_source(data.decode("utf-8", "replace"))
    except AssemblyError:
        return
    assert format_source(once) == once, "formatting twice differs from once"


def check_load(data: bytes) -> None:
    """Bytes (checksums set right) -> program or ContainerError; a program goes to bytes and back, to text and back."""
    for candidate in (data, with_checksums(data)):
        try:
            p = load(candidate)
        except ContainerError:
            continue
        assert load(p.to_bytes()).to_bytes() == p.to_bytes(), "bytes differ after a round trip"
        liveness(Cfg(p))
        q = assemble(disassemble(p))
        assert (p.text, p.data, p.symbols, p.relocs, p.lines, p.imports) == \
            (q.text, q.data, q.symbols, q.relocs, q.lines, q.imports), "the disassembly gives another program"


def with_checksums(data: bytes) -> bytes:
    """A container with every checksum set right, so that mutations reach what lies behind them."""
    out = bytearray(data)
    if len(out) < 64:
        return data
    struct.pack_into("<Q", out, 24, len(out))
    (sections,) = struct.unpack_from("<I", out, 40)
    sections = min(sections, 7, (len(out) - 64) // 32)
    for i in range(sections):
        kind, zero, offset, length, _ = struct.unpack_from("<IIQQQ", out, 64 + 32 * i)
        if offset + length <= len(out):
            struct.pack_into("<Q", out, 64 + 32 * i + 24, xxhash.xxh64_intdigest(bytes(out[offset:offset + length])))
    struct.pack_into("<Q", out, 56, xxhash.xxh64_intdigest(bytes(out[:56] + out[64:64 + 32 * sections])))
    return bytes(out)


TARGETS: dict[str, Callable[[bytes], None]] = {"assemble": check_assemble, "format": check_format, "load": check_load}


class Coverage:
    """Edges between lines of the fuzzed packages, by sys.settrace."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()
        self.fresh = 0
        self.watched: dict[object, bool] = {}

    def _enter(self, frame, event, arg):
        code = frame.f_code
        if code not in self.watched:
            self.watched[code] = "m3jit/frontend" in code.co_filename or "m3jit/isa" in code.co_filename
        if not self.watched[code]:
            return None
        key, last = id(code), -1

        def line(frame, event, arg):
            nonlocal last
            edge = (key, last, frame.f_lineno)
            last = frame.f_lineno
            if edge not in self.seen:
                self.seen.add(edge)
                self.fresh += 1
            return line
        return line

    def run(self, check: Callable[[bytes], None], data: bytes) -> int:
        """Run one input; how many edges it reached first.  What the check raises passes through."""
        self.fresh = 0
        sys.settrace(self._enter)
        try:
            check(data)
        finally:
            sys.settrace(None)
        return self.fresh


def mutate(data: bytes, corpus: list[bytes], tokens: list[bytes], rng: random.Random) -> bytes:
    """A few random edits: bits, bytes, blocks, known words, parts of another input."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind == 2:
            del out[at:at + rng.choice([1, 1, 4, 32])]
        elif kind == 3:
            out[at:at] = rng.choice(tokens)
        elif kind == 4:
            out[at:at] = out[rng.randrange(len(out) + 1):][:rng.choice([4, 32, 64])]
        elif kind == 5:
            other = rng.choice(corpus)
            start = rng.randrange(len(other) + 1)
            out[at:at + 16] = other[start:start + rng.choice([8, 32, 100])]
        elif len(out) >= 8:
            at %= len(out) - 7
            value = rng.choice([0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, 2 ** 31, 2 ** 63, len(out)])
            out[at:at + 4] = struct.pack("<I", value & 0xFFFFFFFF)
    return bytes(out[:1 << 14])


def seeds(target: str) -> list[bytes]:
    """Inputs to start from."""
    texts = SEEDS_TEXT + [f"{r.name}\n" for r in OPS[::9]]
    if target != "load":
        return [t.encode() for t in texts]
    out = [assemble(SEEDS_TEXT[0]).to_bytes(), assemble("HALT").to_bytes(), b""]
    return out


def fuzz(target: str, seconds: float, seed: int, crashes: str) -> int:
    """The built-in fuzzer; number of finds."""
    check, rng, coverage = TARGETS[target], random.Random(seed), Coverage()
    corpus = seeds(target)
    tokens = [r.name.encode() for r in OPS] + [w.encode() for w in
              (".data ", ".text\n", ".func f(rA)\n", ".str ", ".f32 ", "[", "]", ",", "=", "\n", " ", '"', "@x", "&x",
               "rX", "R255",
               "nan:0x7fc00000", "0x1p3", "80ms", ": ", "L_0040", ".loc ", ".org ", ".reg ", ".equ ", "_")]
    for data in corpus:
        coverage.run(check, data)
    end, runs, finds, shown, kinds = time.monotonic() + seconds, 0, 0, 0.0, set()
    while time.monotonic() < end:
        data = mutate(rng.choice(corpus), corpus, tokens, rng)
        started = time.monotonic()
        try:
            fresh = coverage.run(check, data)
            problem = "" if time.monotonic() - started < SLOW else f"took {time.monotonic() - started:.1f} s"
        except Exception:
            fresh, problem = 0, traceback.format_exc()
        runs += 1
        if problem:
            finds += 1
            place = "\n".join(line for line in problem.split("\n") if line.startswith("  File"))
            if place not in kinds:                          # one report for each way to fail
                kinds.add(place)
                report(crashes, target, data, problem)
        elif fresh:
            corpus.append(data)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{target}: {runs} runs, {len(corpus)} inputs kept, {len(coverage.seen)} edges, {finds} finds",
                  flush=True)
    print(f"{target}: {runs} runs, {len(corpus)} inputs kept, {len(coverage.seen)} edges, {finds} finds")
    return finds


def report(crashes: str, target: str, data: bytes, problem: str) -> None:
    """Write a find and say what it did."""
    os.makedirs(crashes, exist_ok=True)
    path = os.path.join(crashes, f"{target}-{xxhash.xxh64_hexdigest(data)}")
    with open(path, "wb") as f:
        f.write(data)
    print(f"find: {path}\n{problem}", file=sys.stderr, flush=True)


def with_atheris(target: str, seconds: float) -> int:
    """Let atheris (libFuzzer) search instead."""
    import atheris
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}"], TARGETS[target])
    atheris.Fuzz()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--seconds", type=float, default=60, help="per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crashes", default="build/crashes", help="folder for finds")
    args = parser.parse_args()
    try:
        import atheris  # noqa: F401
        have = args.target != "all"
    except ImportError:
        have = False
    if have:
        return with_atheris(args.target, args.seconds)
    names = list(TARGETS) if args.target == "all" else [args.target]
    return 1 if sum(fuzz(n, args.seconds, args.seed, args.crashes) for n in names) else 0


if __name__ == "__main__":
    sys.exit(main())
