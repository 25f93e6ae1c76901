#!/usr/bin/env python3
"""Write docs/reference/ from the instruction table: an index of all 256 numbers and one page for each family.

    python tools/make_reference.py            write the pages that changed
    python tools/make_reference.py --check    write nothing; exit code 1 and the names if a page is not current

Everything on a page is derived from `m3jit.isa`: no opcode is named here.
"""
from __future__ import annotations

import argparse
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Iterable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from m3jit.cli.ops import route, summary  # noqa: E402  (found through the path set above)
from m3jit.frontend import assemble  # noqa: E402
from m3jit.frontend.binding import key_of, usage  # noqa: E402
from m3jit.frontend.disassembler import instruction_text  # noqa: E402
from m3jit.frontend.numbers import format_float  # noqa: E402
from m3jit.isa import families  # noqa: E402
from m3jit.isa.fields import (REQUIRED, STATE, BitsEnum, EnumField, Field, FlagField, FlaggedEnum,  # noqa: E402
                              IntOrReg, LabelField, Number, PayloadReg, PrecisionField, RegField, RegList, ShapeField,
                              SymbolField)
from m3jit.isa.quirks import QUIRKS  # noqa: E402
from m3jit.isa.table import ESCAPES, OPS, RESERVED, Op, load_table  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
NOTE = "<!-- Written by tools/make_reference.py from m3jit/isa; change the table, not this file. -->\n"
PAYLOAD = "01010003"                               # of an extension's example: one result R0, one source R3
NO_WORD = 2 ** 64 - 1                              # default of an absent string operand

TITLES = {                                         # a family without an entry is called by its module's name
    "alu": "Scalar operations", "cluster": "Clusters", "contexts": "Contexts and snapshots", "control": "Control flow",
    "deadlines_clock": "Deadlines and clocks", "devices": "Devices and placement",
    "elementwise": "Elementwise operations", "escape_ops": "Carriers of extensions", "io": "Streams and the outside",
    "kv_tiers": "Tiers of KV streams", "layout": "Moves of tensors", "learning": "Learning and retrieval",
    "memory": "Addressed memory", "reduce": "Orderings and reductions", "sampling": "Randomness and digests",
    "security": "Keys, encryption, compression", "ssm_audio": "State-space scans and audio",
    "storage_power": "Storage tiers, power", "system": "Models and the machine",
    "tensor": "Making and converting tensors", "tracing": "Trace spans", "transformer": "Transformer parts",
}


def title(family: str) -> str:
    return TITLES.get(family, family.replace("_", " ").capitalize())


# -- Markdown ---------------------------------------------------------------------------------------------------------

def prose(text: str) -> str:
    """A docstring as Markdown: characters that would become markup are escaped."""
    text = re.sub(r"(?<! )\*|\*(?! )", r"\\*", text)
    text = re.sub(r"<(?=[A-Za-z/!])", r"\\<", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    return re.sub(r"(?m)^([-+#])(?=\s)", r"\\\1", text)


def cell(text: str) -> str:
    return prose(text).replace("|", r"\|")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; cells are Markdown already."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


# -- one opcode -------------------------------------------------------------------------------------------------------

def number(row: Op) -> str:
    return f"0x{row.code:02X}" + (f".{row.sub}" if row.sub is not None else "")


def frame_bytes(row: Op) -> list[tuple[int, int, str]]:
    """(first byte, last byte, what it holds) over the whole frame; the last byte of ESCAPE forms is where 64 end."""
    if row.code in ESCAPES:
        return [(0, 0, f"{row.code:02X}"), (1, 1, "EXT"), (2, 3, "FLAGS"), (4, 7, "VERSION"), (8, 15, "total length"),
                (16, 23, "zero"), (24, 31, "xxHash64"), (32, row.size - 1, "PAYLOAD")]
    held = ["zero"] * row.size
    held[0], held[1] = f"{row.code:02X}", "FLAGS"
    for b in (*range(2, 8 if row.wide else 6), *(() if row.wide else (7,))):
        held[b] = "255"
    if row.wide:
        for first, last, name in ((8, 16, "LAMPORT"), (16, 24, "DEADLINE"), (24, 32, "EXT"), (62, 64, "BANKS")):
            held[first:last] = [name] * (last - first)
    else:
        held[6] = "BANKS"
    if row.sub is not None:
        held[row.base] = f"{row.sub:02X} (sub-operation)"
    for f in row.operands():
        for place in f.spans(row.base):
            for b in place:
                held[b] = f"`{written(f)}`"
        if isinstance(f, IntOrReg):
            held[row.base + f.reg_at] = f"`{written(f)}` register"
        elif isinstance(f, BitsEnum) or isinstance(f, FlagField) and f.in_payload:
            b = row.base + f.at
            held[b] = (held[b] + ", " if held[b] != "zero" else "bits: ") + f"`{written(f)}`"
    out: list[tuple[int, int, str]] = []
    for b, what in enumerate(held):
        single = what in ("255",) and not row.wide
        if out and out[-1][2] == what and not single:
            out[-1] = (out[-1][0], b, what)
        else:
            out.append((b, b, what))
    return out


def written(f: Field) -> str:
    """How the operand is called in text: positional registers and labels by name, the rest by their key."""
    return f.name.rstrip("_") if isinstance(f, (RegField, LabelField)) else key_of(f)


def kind(f: Field) -> str:
    """What the operand holds."""
    if isinstance(f, (RegField, PayloadReg)):
        names = {"int": "integer", "float": "float", "null": "never written"}
        kinds = " or ".join(names.get(k, k) for k in f.kinds)
        role = " — result" if f.dest else " — read and written" if f.both else ""
        return f"register: {kinds}{role}"
    if isinstance(f, (EnumField, PrecisionField)):
        bare = isinstance(f, PrecisionField) or f.bare
        return ("one word of: " if bare else f"`{key_of(f)}=` one of: ") + " ".join(f"`{w}`" for w in f.words)
    if isinstance(f, FlagField):
        off = f"; the opposite word is `{f.off_word}`" if f.off_word else ""
        return f"flag: the word alone, or `{key_of(f)}=0` / `=1`{off}"
    if isinstance(f, SymbolField):
        return {"string": 'text: `"…"`', "value": "`@name` or `@model:tensor`", "address": "`&name`"}[f.what]
    if isinstance(f, IntOrReg):
        return f"{'f32' if f.fmt == 'f' else Number(fmt=f.fmt).describe()} or a general register"
    if isinstance(f, LabelField):
        return "label (i32, bytes from this instruction)"
    if isinstance(f, RegList):
        return f"list of at most {f.count} general registers"
    if isinstance(f, ShapeField):
        return "shape: at most 5 numbers or registers"
    return f.describe()


def places(f: Field, row: Op) -> str:
    """Byte positions of the operand in the frame."""
    if isinstance(f, PrecisionField):
        return "1, bits 0–1"
    if isinstance(f, FlagField):
        return f"{f._byte(row.base)}, bit {f.bit}"
    if isinstance(f, BitsEnum):
        return f"{row.base + f.at}, bits {f.bit}–{f.bit + 1}"
    if row.code in ESCAPES:
        return span(f.at, f.at + f.width - 1)
    spans = ", ".join(span(s[0], s[-1]) for s in f.spans(row.base))
    return spans + (f"; present: byte 1, bit {f.bit}" if isinstance(f, FlaggedEnum) else "")


def default(f: Field) -> str:
    """What is encoded when the operand is left out."""
    if isinstance(f, FlagField):
        return "on" if f.default is True else "off"
    if f.default is REQUIRED:
        return "required"
    if f.default is None or isinstance(f, SymbolField) and f.default == NO_WORD:
        return "absent"
    if isinstance(f.default, float):
        return f"`{format_float(f.default, getattr(f, 'fmt', 'd'))}`"
    if isinstance(f.default, tuple):
        return "`[" + ", ".join(map(str, f.default)) + "]`"
    return f"`{f.default}`"


def operands(row: Op) -> str:
    """The table of operands."""
    rows = []
    for f in row.operands():
        aliases = [a for a, key in row.key_aliases.items() if key.rstrip("_").upper() == key_of(f)]
        name = f"`{written(f)}`" + (f" ({', '.join(f'`{a}`' for a in aliases)})" if aliases else "")
        rows.append((name, kind(f).replace("|", r"\|"), places(f, row), default(f)))
    return table(("operand", "kind", "bytes", "default"), rows) if rows else "No operands."


def tail_key(row: Op) -> str:
    """The key of the bytes behind the fields, for rows that have them."""
    return QUIRKS[row.syntax].tail if row.syntax in QUIRKS else ""


def example(row: Op) -> tuple[str, bytes]:
    """A small instruction of the row: (text, frame)."""
    parts = []
    for i, f in enumerate(row.operands()):
        if isinstance(f, (RegField, PayloadReg)):
            if f.default is REQUIRED or isinstance(f, RegField) and f.dest:
                state = isinstance(f, RegField) and f.banks[0] == STATE
                text = f"{'S' if state else 'R'}{i}"
                parts.append(text if isinstance(f, RegField) else f"{key_of(f)}={text}")
        elif isinstance(f, LabelField):
            parts.append("next" if f.default is REQUIRED else f"{key_of(f)}=next")
        elif f.name in row.sample or f.default is REQUIRED and not isinstance(f, FlagField):
            parts.append(f"{key_of(f)}={sample(f, row)}")
    tail = tail_key(row)
    if tail:
        parts.append(f'{tail}="{PAYLOAD}"')
    source = f".data\nx: .f32 [1, 2]\n.text\n    {row.name} {', '.join(parts)}\nnext:\n    HALT\n"
    program = assemble(source, f"<example of {row.name}>")
    pc, ins = program.instructions[0]
    if ins.op is not row:
        raise SystemExit(f"the example of {row.name} assembles to {ins.op.name}:\n{source}")
    text = f"{row.name} {', '.join(parts)}" if tail else instruction_text(program, pc, ins)
    return text, program.text[:ins.size]


def sample(f: Field, row: Op) -> str:
    """A value of an operand, as text."""
    if isinstance(f, SymbolField):
        return {"string": '"text"', "value": "@x", "address": "&x"}[f.what]
    if f.name in row.sample:
        value = row.sample[f.name]
        return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
    if isinstance(f, (EnumField, PrecisionField)):
        return f.words[0]
    return "[R9]" if isinstance(f, RegList) else "1"


def hexadecimal(frame: bytes) -> str:
    """Bytes in lines of 16, with their offsets."""
    return "\n".join(f"{i:02x}  " + " ".join(frame[i:i + 16][j:j + 8].hex(" ") + " " for j in (0, 8)).rstrip()
                     for i in range(0, len(frame), 16))


def section(row: Op) -> str:
    """The entry of one row."""
    fixed = ESCAPES.get(row.code, row.size)
    size = f"{fixed} bytes" if fixed else "64 bytes or more"
    first, *rest = row.doc.split("\n\n")
    text, frame = example(row)
    tail = f', [{tail_key(row)}="hexadecimal digits"]' if tail_key(row) else ""
    facts = [("Aliases", ", ".join(f"`{a}`" for a in row.aliases)), ("Result shape", cell(row.shape)),
             ("Element types", cell(row.dtypes)), ("Also reads", ", ".join(row.reads)),
             ("Also writes", ", ".join(row.writes)), ("State lives in", cell(row.state.home)),
             ("A snapshot costs", cell(row.state.snapshot)), ("ABORT", cell(row.state.abort)),
             ("Source", cell(row.source))]
    laid = frame_bytes(row)
    open_end = row.code in ESCAPES and fixed is None
    bytes_ = [span(a, b) if not (open_end and b == row.size - 1) else f"{a}…" for a, b, _ in laid]
    return "\n\n".join([
        f"## {row.name}", f"`{number(row)}` · {size} · {route(row)}", f"**{prose(' '.join(first.split()))}**",
        *(prose(p) for p in rest), f"```text\n{usage(row)}{tail}\n```",
        table(("byte", *bytes_), [("holds", *(what for _, _, what in laid))]), operands(row),
        "\n".join(f"- {name}: {value}" for name, value in facts if value),
        f"Example: `{text}`", f"```text\n{hexadecimal(frame)}\n```"]) + "\n"


# -- pages ------------------------------------------------------------------------------------------------------------

def rows_of(family: str) -> list[Op]:
    return sorted((r for r in OPS if r.family == family), key=lambda r: (r.code, r.sub or 0))


def anchor(row: Op) -> str:
    return f"{row.family}.md#{row.name.lower()}"


def page(family: str) -> str:
    """The page of a family."""
    rows = rows_of(family)
    intro = inspect.getdoc(import_module(f"m3jit.isa.{family}")) or ""
    listing = table(("number", "mnemonic", "", "in short"),
                    ((f"`{number(r)}`", f"[{r.name}](#{r.name.lower()})", "" if r.executable else "absent",
                      cell(summary(r))) for r in rows))
    absent = sum(not r.executable for r in rows)
    status = "" if not absent else "Not executable in this version: " + (
        "all of this page." if absent == len(rows) else f"{absent} of the {len(rows)} rows.") + \
        " Such an opcode assembles, disassembles and verifies; reaching it traps. Its encoding is provisional.\n\n"
    return NOTE + f"\n# {title(family)}\n\n{prose(intro)}\n\n{status}[All opcodes](README.md)\n\n{listing}\n\n" + \
        "\n".join(section(r) for r in rows)


INDEX_INTRO = """# Instruction reference

Every opcode of the M³-AVM instruction set as this version of m3jit has it: {codes} numbers in {rows} rows (a number
whose first payload byte is a sub-operation has a row for each), {reserved} numbers reserved. {executable} numbers
execute; the others assemble, disassemble, verify and are documented, and trap when they are reached. The pages are
generated from the table in `m3jit/isa`, which the assembler, disassembler, verifier, interpreter and compiler read
too; `m3jit ops NAME` prints the same facts on the terminal. The frame, the register banks and the text form are
explained in [assembly.md](../assembly.md).

How to read an entry: the first line is the value in a formula; then edge cases and what traps. *Bytes* are positions
in the frame, little-endian; `255` in a register byte means absent. *compiled* rows become native code; *slow path*
rows are executed by the interpreter between compiled regions, for the reason given. What ABORT does stands at every
row, because every instruction must say what a rollback means for it. Besides the traps an entry names, every
instruction traps on a register of another kind, a tensor of another element type, or a shape that its rule does not
admit, before it has written anything.
"""


def index() -> str:
    """The page of all 256 numbers."""
    by_code: dict[int, list[Op]] = {}
    for r in sorted(OPS, key=lambda r: (r.code, r.sub or 0)):
        by_code.setdefault(r.code, []).append(r)
    lines = []
    for code in range(256):
        rows = by_code.get(code, [])
        if code in RESERVED:
            lines.append((f"`0x{code:02X}`", "reserved", "", "", ""))
            continue
        names = " ".join(f"[{r.name}]({anchor(r)})" for r in rows)
        size = ESCAPES.get(code, rows[0].size) or "64…"
        lines.append((f"`0x{code:02X}`", names, f"[{title(rows[0].family)}]({rows[0].family}.md)", str(size),
                      "yes" if rows[0].executable else "no"))
    pages = table(("page", "numbers", "executable"), (
        (f"[{title(f)}]({f}.md)", str(len({r.code for r in rows_of(f)})),
         str(len({r.code for r in rows_of(f) if r.executable}))) for f in families.FAMILIES))
    facts = {"codes": len(by_code), "rows": len(OPS), "reserved": len(RESERVED),
             "executable": len({r.code for r in OPS if r.executable})}
    return NOTE + "\n" + INDEX_INTRO.format(**facts) + "\n" + pages + "\n\n## All numbers\n\n" + \
        table(("number", "mnemonics", "page", "bytes", "executable"), lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> text of the whole reference."""
    load_table()
    return {"README.md": index(), **{f"{f}.md": page(f) for f in families.FAMILIES}}


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of pages that are missing, out of date, or not ours."""
    want = pages()
    have = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.md")}
    return sorted({n for n, t in want.items() if have.get(n) != t} | (have.keys() - want.keys()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    wanted = parser.parse_args()
    names = stale()
    if wanted.check:
        for name in names:
            print(f"docs/reference/{name} is not current; run python tools/make_reference.py", file=sys.stderr)
        return 1 if names else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = pages()
    for name in names:
        if name in text:
            (FOLDER / name).write_text(text[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
        print(f"docs/reference/{name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
