"""An interpreter of exactly the PTX the CUDA backend emits, for tests on machines without a GPU.

`launch(text, entry, arguments, grid, threads)` runs every block: NumPy vectors hold the block's threads, a group of
threads that stands at the same instruction executes it together, and groups that went different ways meet again where
their instructions meet (always the group furthest behind runs).  Everything else is refused by name.

Checked on the way: alignment, bounds, writes to read-only arguments, a barrier that not all threads reach, and races:
two threads that touch the same byte, one of them writing, without a barrier between (shared and global memory), or two
blocks that do.  A float result that is NaN becomes 0x7fffffff, as on the hardware, whose NaNs carry no payload.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import numpy as np

from m3jit.ir.loop import Kernel
from tests.loop_eval import NUMPY, compile_kernel
from tests.ptx.instructions import PtxError, Unsupported, execute_plan

GLOBAL_BASE, GLOBAL_STEP = 1 << 36, 1 << 32
SHARED_BASE = 1 << 20
NOBODY, SEVERAL = -1, -2


@dataclass
class Instruction:
    """One line: guard (register, wanted value), opcode, operands as written; `run` is set by the decoder."""
    opcode: str
    operands: list[str]
    guard: tuple[str, bool] | None
    line: int
    run: Callable | None = None


@dataclass
class Entry:
    name: str
    params: list[tuple[str, str]] = field(default_factory=list)          # (name, type)
    registers: dict[str, str] = field(default_factory=dict)              # prefix -> type
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)     # name -> (offset, bytes)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0


class Space:
    """A piece of memory and who touched its bytes since the last barrier."""

    def __init__(self, name: str, data: np.ndarray, base: int, writable: bool = True):
        self.name, self.data, self.base, self.writable = name, data, base, writable
        self.writer, self.reader = (np.full(data.size, NOBODY, np.int32) for _ in range(2))
        self.block = np.full(data.size, NOBODY, np.int64)                # block that wrote the byte
        self.touched = False

    def forget(self) -> None:
        if self.touched:
            self.writer[:], self.reader[:], self.touched = NOBODY, NOBODY, False

    def locate(self, address: np.ndarray, size: int, where: str) -> np.ndarray:
        at = address.astype(np.int64) - self.base
        bad = (at < 0) | (at + size > self.data.size)
        if bad.any():
            raise PtxError(f"{where}: byte {int(at[bad][0])} of {self.name}, which has {self.data.size}")
        if (at % size).any():
            raise PtxError(
                f"{where}: {size}-byte access to {self.name} at byte {int(at[at % size != 0][0])}, not aligned"
            )
        return at[:, None] + np.arange(size)

    def read(self, address: np.ndarray, size: int, threads: np.ndarray, block: int, where: str) -> np.ndarray:
        at = self.locate(address, size, where)
        who = np.repeat(threads, size)
        flat = at.reshape(-1)
        other = self.writer[flat]
        self._race((other != NOBODY) & (other != who), flat, who, where, "reads what another thread wrote")
        elsewhere = self.block[flat]
        self._race((elsewhere != NOBODY) & (elsewhere != block), flat, who, where, "reads what another block wrote")
        seen = self.reader[flat]
        self.reader[flat] = np.where((seen == NOBODY) | (seen == who), who, SEVERAL)
        if flat.size > 1 and len(np.unique(flat)) != flat.size:          # several threads read a byte at once
            values, counts = np.unique(flat, return_counts=True)
            self.reader[values[counts > 1]] = SEVERAL
        self.touched = True
        return self.data[at]

    def write(self, address: np.ndarray, raw: np.ndarray, threads: np.ndarray, block: int, where: str) -> None:
        if not self.writable:
            raise PtxError(f"{where}: store to {self.name}, which is read-only")
        size = raw.shape[1]
        at = self.locate(address, size, where)
        flat, who = at.reshape(-1), np.repeat(threads, size)
        if len(np.unique(flat)) != flat.size:
            raise PtxError(f"{where}: two threads store to the same byte of {self.name} at once")
        for owner, what in ((self.writer[flat], "writes what another thread wrote"),
                            (self.reader[flat], "writes what another thread read")):
            self._race((owner != NOBODY) & (owner != who), flat, who, where, what)
        elsewhere = self.block[flat]
        self._race((elsewhere != NOBODY) & (elsewhere != block), flat, who, where, "writes what another block wrote")
        self.writer[flat], self.block[flat], self.touched = who, block, True
        self.data[at] = raw

    def _race(self, bad: np.ndarray, flat: np.ndarray, who: np.ndarray, where: str, what: str) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise PtxError(f"{where}: thread {who[i]} {what} without a barrier: byte {flat[i]} of {self.name}")


# -- parsing --------------------------------------------------------------------------------------------------------

_DIRECTIVE = re.compile(r"\.(version|target|address_size|visible|loc|file)\b")
_PARAM = re.compile(r"\.param \.(u64|b64|u32|b32|f32|f64)(?: \.ptr \.global \.align \d+)? (\w+),?")
_REG = re.compile(r"\.reg \.(pred|b16|b32|b64|f32|f64) +%(\w+)<(\d+)>;")
_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];")
_INSTRUCTION = re.compile(r"(?:@(!?)%(p\d+)\s+)?([a-z][\w.:]*)(?:\s+(.*?))?;")
# LLVM's way to take the upper half of a register
_HIGH_HALF = re.compile(r"\{ \.reg \.b16 tmp; mov\.b32 \{tmp, (%rs\d+)\}, (%r\d+); \}")


def parse(text: str) -> Entry:
    """The one entry of a module."""
    entry: Entry | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = " ".join(line.split("//", 1)[0].split())
        if not line or line in ("(", ")", "{", "}") or _DIRECTIVE.match(line) and ".entry" not in line:
            continue
        if m := re.match(r"\.visible \.entry (\w+)\(", line):
            entry = Entry(
                m[1], shared=dict(entry.shared) if entry else {}, shared_bytes=entry.shared_bytes if entry else 0
            )
        elif m := _SHARED.fullmatch(line):
            entry = entry or Entry("")
            start = -(-entry.shared_bytes // int(m[1])) * int(m[1])
            entry.shared[m[2]] = (start, int(m[3]))
            entry.shared_bytes = start + int(m[3])
        elif m := _PARAM.fullmatch(line):
            entry.params.append((m[2], m[1]))
        elif m := _REG.fullmatch(line):
            entry.registers[m[2]] = m[1]
        elif m := re.fullmatch(r"(\$L\w+):", line):
            entry.labels[m[1]] = len(entry.body)
        elif m := _HIGH_HALF.fullmatch(line):
            entry.body.append(Instruction("high.b16", [m[1], m[2]], None, number))
        elif m := _INSTRUCTION.fullmatch(line):
            operands = [o.strip() for o in m[4].split(",")] if m[4] else []
            entry.body.append(Instruction(m[3], operands, (m[2], not m[1]) if m[2] else None, number))
        else:
            raise Unsupported(f"PTX line {number}: the interpreter knows no {line!r}")
    if entry is None or not entry.name:
        raise PtxError("no .entry in the PTX text")
    return entry


# -- running --------------------------------------------------------------------------------------------------------

class Block:
    """The threads of one block: registers, program counters, memory."""

    def __init__(
        self, entry: Entry, params: dict[str, Any], spaces: list[Space], shared: Space, number: int, threads: int
    ):
        self.entry, self.params, self.spaces, self.shared = entry, params, spaces, shared
        self.number, self.threads = number, threads
        self.registers: dict[str, np.ndarray] = {}
        self.everyone = np.arange(threads, dtype=np.int32)
        self.active = self.everyone                          # threads that execute the current instruction
        self.executed = self.barriers = 0

    def space(self, kind: str, address: np.ndarray) -> Space:
        if kind == "shared":
            return self.shared
        number = int(address[0] - GLOBAL_BASE) // GLOBAL_STEP
        if not 0 <= number < len(self.spaces):
            raise PtxError(f"global address {int(address[0]):#x} belongs to no argument")
        return self.spaces[number]

    def run(self) -> None:
        groups: dict[int, np.ndarray] = {0: self.everyone}   # program counter -> threads
        waiting: dict[int, np.ndarray] = {}                  # barrier -> threads that reached it
        while groups or waiting:
            if not groups:
                groups = self._release(waiting)
                waiting = {}
            pc = min(groups)
            threads = groups.pop(pc)
            self._advance(pc, threads, groups, waiting)

    def _release(self, waiting: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        if len(waiting) != 1 or sum(map(len, waiting.values())) != self.threads:
            lines = [self.entry.body[pc].line for pc in waiting]
            raise PtxError(
                f"{self.entry.name}: threads wait at different barriers (PTX lines {lines})"
                if len(waiting) > 1
                else f"{self.entry.name}: threads left before the barrier at line {lines[0]}"
            )
        self.barriers += 1
        for s in (self.shared, *self.spaces):
            s.forget()
        (pc, threads), = waiting.items()
        return {pc + 1: threads}

    def _advance(
        self, pc: int, threads: np.ndarray, groups: dict[int, np.ndarray], waiting: dict[int, np.ndarray]
    ) -> None:
        """Runs one group until it branches apart, waits, ends, or meets another group."""
        body = self.entry.body
        while True:
            if pc in groups:
                groups[pc] = np.sort(np.concatenate([groups[pc], threads]))
                return
            i = body[pc]
            self.executed += 1
            if i.opcode == "ret":
                return
            if i.opcode == "bar.sync":
                waiting[pc] = np.sort(np.concatenate([waiting[pc], threads])) if pc in waiting else threads
                return
            if i.opcode in ("bra", "bra.uni"):
                target = self.entry.labels[i.operands[0]]
                go, stay = self._split(i, threads)
                if len(go) and len(stay):
                    for where, who in ((target, go), (pc + 1, stay)):
                        groups[where] = np.sort(np.concatenate([groups[where], who])) if where in groups else who
                    return
                pc = target if len(go) else pc + 1
                if groups and min(groups) < pc:              # others are further behind: they go first
                    groups[pc] = np.sort(np.concatenate([groups[pc], threads])) if pc in groups else threads
                    return
                continue
            if i.guard is not None:
                raise Unsupported(f"PTX line {i.line}: the interpreter knows no predicated {i.opcode}")
            self.active = threads
            i.run(self)
            pc += 1

    def _split(self, i: Instruction, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if i.guard is None:
            return threads, threads[:0]
        name, wanted = i.guard
        taken = self.registers[name][threads] == wanted
        return threads[taken], threads[~taken]


@dataclass
class Launched:
    """What a launch did, so that tests can tell that it happened."""
    blocks: int
    instructions: int
    barriers: int
    opcodes: set[str]


def launch(text: str, arguments: Sequence[Any], grid: int, threads: int, written: Sequence[bool]) -> Launched:
    """Runs the module's entry.  arguments: NumPy arrays (changed in place) and NumPy numbers; written[i]: argument i
    may be stored to."""
    entry = parse(text)
    if len(entry.params) != len(arguments):
        raise PtxError(f"{entry.name} takes {len(entry.params)} arguments, got {len(arguments)}")
    for i in entry.body:
        if i.opcode not in ("bra", "bra.uni", "bar.sync", "ret"):
            i.run = execute_plan(entry, i)
    params: dict[str, Any] = {}
    spaces: list[Space] = []
    for (name, kind), a, may in zip(entry.params, arguments, written):
        if isinstance(a, np.ndarray):
            params[name] = np.uint64(GLOBAL_BASE + GLOBAL_STEP * len(spaces))
            spaces.append(Space(f"argument {name}", a.reshape(-1).view(np.uint8), int(params[name]), may))
        else:
            size = 4 if kind.endswith("32") else 8
            if not isinstance(a, np.generic) or a.itemsize != size:
                raise PtxError(f"{entry.name}: {name} takes a NumPy number of {size} bytes, got {a!r}")
            params[name] = a
    done = Launched(grid, 0, 0, {i.opcode for i in entry.body})
    with np.errstate(all="ignore"):
        for number in range(grid):
            shared = Space("shared memory", np.full(entry.shared_bytes, 0xA5, np.uint8), SHARED_BASE)
            block = Block(entry, params, spaces, shared, number, threads)
            block.run()
            for s in spaces:
                s.forget()
            done.instructions += block.executed
            done.barriers += block.barriers
    return done


def run_kernel(kernel: Kernel, args: Sequence[Any], arch: str = "sm_80", text: str | None = None) -> Launched:
    """Renders a loop-IR kernel as PTX and runs it over `args`, like `tests.loop_eval.run_kernel`."""
    from m3jit.backends.cuda.render import render_ptx
    values = [a if isinstance(a, np.ndarray) else NUMPY[p.kind](a) for p, a in zip(kernel.params, args)]
    return launch(text or render_ptx(kernel, arch), values, grid_size(kernel, args), kernel.lanes,
                  ["w" in p.access for p in kernel.params])


def grid_size(kernel: Kernel, args: Sequence[Any]) -> int:
    """Blocks of a launch, by the NumPy evaluator's reading of the prologue."""
    numbers = {p.name: NUMPY[p.kind](a) for p, a in zip(kernel.params, args) if p.kind != "ptr"}
    return compile_kernel(kernel)["grid"](numbers)
