"""What a debugger shows, as text: source, registers, tensors, frames, snapshots, contexts, differences."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np

from m3jit.errors import UserError
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import BF16, FLOATS, U8, Tensor
from m3jit.vm.context import PRIORITIES, Context
from m3jit.vm.image import show
from m3jit.vm.machine import FLAG_WORDS
from m3jit.vm.snapshots import SnapshotHandle
from m3jit.vm.values import Handle

SHADES = " .:-=+*#%@"
WIDTH, HEIGHT = 64, 16             # characters of a picture
FEW = 8                            # elements that are shown as numbers
AROUND = 3                         # source lines before and after


# -- positions ---------------------------------------------------------------------------------------------------------

def position(vm: Any, ctx: Context | None, time: int) -> str:
    """Where the run is, in a line: time, context, place, the instruction that is next."""
    if ctx is None:
        return f"@{time}"
    image = vm.image
    if ctx.index >= len(image.pcs):
        return f"@{time} context {ctx.id}: behind the last instruction"
    pc = image.pcs[ctx.index]
    line = image.line(pc)
    where = f" {Path(line[0]).name}:{line[1]}" if line else ""
    near = label_before(image.program, pc)
    return f"@{time} context {ctx.id} 0x{pc:04x}{where}{f' <{near}>' if near else ''}: {instruction(vm, ctx.index)}"


def instruction(vm: Any, index: int) -> str:
    """An instruction with the program's names of its registers."""
    ins = vm.image.instructions[index]
    if vm.image.program is not None:
        try:
            from m3jit.frontend.disassembler import instruction_text
            return instruction_text(vm.image.program, vm.image.pcs[index], ins)
        except (UserError, LookupError, ValueError):   # a damaged program: its words as they are
            pass
    return show(ins, vm.image.program)


def labels_of(program: Any) -> dict[str, int]:
    """Label or function -> pc."""
    return {s.name: s.value for s in program.symbols if s.kind.name in ("LABEL", "FUNC")} if program is not None else {}


def label_before(program: Any, pc: int) -> str:
    """The label at or before a pc, with the bytes between; "" when there is none."""
    best = max(((at, name) for name, at in labels_of(program).items() if at <= pc), default=None)
    if best is None:
        return ""
    return best[1] if best[0] == pc else f"{best[1]}+0x{pc - best[0]:x}"


def listing(vm: Any, ctx: Context, marked: frozenset[int] = frozenset()) -> list[str]:
    """Lines of source around the next instruction; the instructions themselves where there is no source file."""
    image = vm.image
    at = min(ctx.index, len(image.pcs) - 1)
    line = image.line(image.pcs[at])
    text = _source(line[0]) if line is not None else None
    if text is None or line is None or line[1] > len(text):
        low = max(at - AROUND, 0)
        return [f"{'>' if i == ctx.index else ' '}{'*' if image.pcs[i] in marked else ' '} 0x{image.pcs[i]:04x}  "
                f"{instruction(vm, i)}" for i in range(low, min(at + AROUND + 1, len(image.pcs)))]
    stops = {image.line(pc) for pc in marked}
    first = max(line[1] - AROUND, 1)
    return [f"{'>' if n == line[1] else ' '}{'*' if (line[0], n) in stops else ' '} {n:5}  {text[n - 1]}"
            for n in range(first, min(line[1] + AROUND, len(text)) + 1)]


def _source(name: str) -> list[str] | None:
    try:
        return Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None


def reconstructed(vm: Any, name: str) -> str:
    """What the program knows of a source file that is not there: each instruction in its line, a label in the one
    before it; the rest is blank."""
    image, out = vm.image, {}                          # type: ignore[var-annotated]
    labels = {pc: label for label, pc in labels_of(image.program).items()}
    for index, pc in enumerate(image.pcs):
        line = image.line(pc)
        if line is not None and line[0] == name:
            out.setdefault(line[1], f"    {instruction(vm, index)}")
            if pc in labels:
                out.setdefault(line[1] - 1, f"{labels[pc]}:")
    return "".join(f"{out.get(n, '')}\n" for n in range(1, max(out, default=0) + 1))


# -- values ------------------------------------------------------------------------------------------------------------

def register_names(program: Any) -> dict[str, str]:
    """R3 -> rSum, of the main program's names."""
    if program is None:
        return {}
    return {str(s.register): s.name for s in program.symbols if s.kind.name == "REGISTER" and s.scope in (0,)}


def registers(vm: Any, ctx: Context) -> list[str]:
    """All written registers, a line each."""
    names = register_names(vm.image.program)
    rows = [(str(reg), names.get(str(reg), ""), brief_value(value, ctx)) for reg, value in ctx.live_registers().items()]
    wide = max((len(name) for _, name, _ in rows), default=0)
    return [f"{reg:4} {name.ljust(wide)}  {value}" for reg, name, value in rows] + [f"flags {FLAG_WORDS[ctx.flags]}"]


def brief_value(value: Any, ctx: Context | None = None) -> str:
    """A value in one line."""
    if value is None:
        return "(never written)"
    if value.__class__ is Tensor:
        return tensor_line(value)
    if value.__class__ is Handle and ctx is not None:
        state = ctx.states.get(value.id)
        return f"{value!r} {state_line(state)}" if state is not None else f"{value!r} (not here)"
    return repr(value)


def numbers(tensor: Tensor) -> np.ndarray | None:
    """The elements as float64; None for packed types."""
    if tensor.dtype.is_block:
        return None
    if tensor.dtype is BF16:
        return (tensor.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return tensor.data.astype(np.float64)              # integers over 2^53 are rounded


def tensor_line(tensor: Tensor) -> str:
    """Type, shape and statistics; few elements as they are, bytes that are text as text."""
    head = f"{tensor.dtype.name.lower()}{list(tensor.shape)}"
    a = numbers(tensor)
    if a is None:
        return f"{head} packed, {tensor.nbytes} bytes"
    if tensor.dtype is U8 and tensor.rank == 1 and tensor.size:
        text = tensor.tobytes()[:60].decode("utf-8", "replace")
        if text.isprintable() or text.replace("\n", "").isprintable():
            return f"{head} {text!r}{'..' if tensor.size > 60 else ''}"
    if a.size <= FEW:
        return f"{head} [{' '.join(f'{v:.6g}' if tensor.dtype in FLOATS else str(int(v)) for v in a.reshape(-1))}]"
    return f"{head} {statistics(a)}"


def statistics(a: np.ndarray) -> str:
    """Least, mean, greatest, spread of the finite elements; how many are zero, NaN, infinite."""
    finite = a[np.isfinite(a)]
    parts = [f"min {finite.min():.6g} mean {finite.mean():.6g} max {finite.max():.6g} std {finite.std():.6g}"] \
        if finite.size else []
    zeros, nans = int((a == 0).sum()), int(np.isnan(a).sum())
    infinite = a.size - finite.size - nans
    special = ((zeros, "zero"), (nans, "NaN"), (infinite, "infinite"))
    return " ".join(parts + [f"{n} {what}" for n, what in special if n])


def picture(tensor: Tensor) -> list[str]:
    """A small picture: the mean absolute value of each cell of a grid over the last two dimensions, darker is larger.

    ! marks a cell with a NaN or an infinity.  Leading dimensions lie below each other."""
    a = numbers(tensor)
    if a is None or not a.size:
        return ["(no picture of a packed or empty tensor)"]
    flat = np.abs(a.reshape(-1, a.shape[-1]) if a.ndim else a.reshape(1, 1))
    rows, columns = min(HEIGHT, flat.shape[0]), min(WIDTH, flat.shape[1])
    r = np.linspace(0, flat.shape[0], rows + 1).astype(int)
    c = np.linspace(0, flat.shape[1], columns + 1).astype(int)
    finite = np.where(np.isfinite(flat), flat, 0.0)
    sums = np.add.reduceat(np.add.reduceat(finite, r[:-1], axis=0), c[:-1], axis=1)
    bad = np.add.reduceat(np.add.reduceat(~np.isfinite(flat), r[:-1], axis=0), c[:-1], axis=1) > 0
    means = sums / np.outer(np.diff(r), np.diff(c))
    top = means.max() or 1.0
    level = np.minimum((means / top * len(SHADES)).astype(int), len(SHADES) - 1)
    lines = ["".join("!" if b else SHADES[v] for v, b in zip(row, wrong)) for row, wrong in zip(level, bad)]
    return [f"|{line}|" for line in lines] + [f"'{SHADES[-1]}' is {top:.6g}; {len(SHADES)} steps, one "
                                              f"character is about {flat.shape[0] // rows or 1} x "
                                              f"{flat.shape[1] // columns or 1} elements"]


def state_line(state: Any) -> str:
    """A state in a few words."""
    if isinstance(state, KVStream):
        lengths = {state.length(layer) for layer in state.layers}
        rows = f"{min(lengths)} to {max(lengths)}" if len(lengths) > 1 else str(next(iter(lengths), 0))
        return f"{state.dtype.name.lower()}, {state.geometry}, {len(state.layers)} layers of {rows} rows"
    if isinstance(state, CellState):
        return f"{len(state.cells)} cells, {state.nbytes} bytes"
    return getattr(getattr(state, "model", None), "name", "")


# -- structure ---------------------------------------------------------------------------------------------------------

def frames(vm: Any, ctx: Context) -> list[str]:
    """The calls that are open, the innermost first."""
    out = [f"#0 {position(vm, ctx, ctx.retired)}"]
    frame, number = ctx.frames, 1
    while frame is not None:
        at = min(frame.back, len(vm.image.pcs) - 1)
        pc = vm.image.pcs[at]
        line = vm.image.line(pc)
        out.append(f"#{number} returns to 0x{pc:04x}{f' {Path(line[0]).name}:{line[1]}' if line else ''} "
                   f"<{label_before(vm.image.program, pc)}>, {sum(v is not None for v in frame.R)} registers")
        frame, number = frame.parent, number + 1
    return out


def contexts(vm: Any, found: list[Context], current: Context | None) -> list[str]:
    """All contexts, a line each."""
    out = []
    for ctx in found:
        waits = f" for {ctx.waiting_for.what}" if ctx.waiting_for is not None else ""
        pc = vm.image.pcs[min(ctx.index, len(vm.image.pcs) - 1)]
        near = label_before(vm.image.program, pc)
        out.append(f"{'>' if ctx is current else ' '} {ctx.id}: {PRIORITIES[ctx.priority]} {ctx.status}{waits}, "
                   f"{ctx.retired} instructions, 0x{pc:04x}{f' <{near}>' if near else ''}")
    return out


def snapshot_tree(vm: Any, found: list[Context]) -> list[str]:
    """Live snapshots under those they came after, with where they resume; `*`: a context stands behind it."""
    live = {s.id: s for s in vm.snapshots.live()}
    here = {c.newest_snapshot: c.id for c in found if c.newest_snapshot}
    names = {v.id: f"R{i}" for c in found for i, v in enumerate(c.R) if v.__class__ is SnapshotHandle}
    children: dict[int, list[int]] = {}
    for s in live.values():
        children.setdefault(s.parent if s.parent in live else 0, []).append(s.id)

    def walk(number: int, depth: int) -> Iterator[str]:
        for child in children.get(number, []):
            s = live[child]
            at = min(s.resume, len(vm.image.pcs) - 1)
            line = vm.image.line(vm.image.pcs[at])
            yield (f"{'  ' * depth}{'*' if child in here else ' '} #{child} context {s.context}, resumes at "
                   f"0x{vm.image.pcs[at]:04x}{f' {Path(line[0]).name}:{line[1]}' if line else ''}"
                   f"{f', in {names[child]}' if child in names else ''}")
            yield from walk(child, depth + 1)
    return list(walk(0, 0)) or ["no snapshots"]


def memory(ctx: Context, address: int, length: int) -> list[str]:
    """Bytes of addressed memory, 16 in a line."""
    data = ctx.memory.read(address, length)
    return [f"{address + i & 2 ** 64 - 1:016x}  {data[i:i + 16].hex(' '):47}  "
            + "".join(chr(b) if 32 <= b < 127 else "." for b in data[i:i + 16]) for i in range(0, len(data), 16)]
