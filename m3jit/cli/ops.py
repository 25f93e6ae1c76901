"""`m3jit ops`: the instruction table on the terminal."""
from __future__ import annotations

from typing import Any

import click

from m3jit.cli.terminal import table
from m3jit.cli.options import UsageError


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|NUMBER]...")
@click.option("--executable/--absent", "executable", default=None, help="Only those that run, or that do not yet.")
def ops(names: tuple[str, ...], executable: bool | None) -> int:
    """List all opcodes, or explain some: operands, defaults, formula, errors, state."""
    from m3jit.isa.table import OPS, load_table
    load_table()
    if names:
        click.echo("\n\n".join(describe(row) for name in names for row in _find(name)))
        return 0
    rows = [(f"0x{r.code:02X}", r.name, "" if r.executable else "absent", summary(r))
            for r in sorted(OPS, key=lambda r: (r.code, r.sub or 0)) if executable in (None, r.executable)]
    click.echo(table(("code", "name", "", "what it does"), rows))
    return 0


def summary(row: Any) -> str:
    """The first sentence or so of the documentation, in one line."""
    text = " ".join(row.doc.split("\n\n")[0].split())
    return text if len(text) <= 100 else text[:97].rsplit(" ", 1)[0] + " ..."


def _find(name: str) -> list[Any]:
    from m3jit.frontend.errors import suggest
    from m3jit.isa.table import BY_NAME, OPS, RESERVED
    row = BY_NAME.get(name.upper())
    if row is not None:
        return [row]
    try:
        code = int(name, 16 if name.lower().startswith("0x") else 10)
    except ValueError:
        hint = suggest(name.upper(), BY_NAME)
        raise UsageError(f"no opcode {name!r}" + (f"; {hint}" if hint else "; `m3jit ops` lists them")) from None
    found = [r for r in OPS if r.code == code]
    if not found:
        raise UsageError(f"opcode 0x{code:02X} is reserved" if code in RESERVED else
                        f"opcodes are the numbers 0 to 255, not {name}")
    return sorted(found, key=lambda r: r.sub or 0)


def describe(row: Any) -> str:
    """The reference entry of one opcode."""
    number = f"0x{row.code:02X}" + (f".{row.sub}" if row.sub is not None else "")
    head = f"{row.name}  {number}, {row.size} bytes, {route(row)}"
    facts = [("aliases", ", ".join(row.aliases)), ("shape", row.shape), ("dtypes", row.dtypes),
             ("reads", ", ".join(row.reads)), ("writes", ", ".join(row.writes)), ("state", row.state.home),
             ("snapshot", row.state.snapshot), ("on ABORT", row.state.abort), ("source", row.source)]
    lines = [head, "", row.doc, ""]
    operands = [(f.name.upper() if not f.positional else f.name, _kind(f), _bytes(f, row), _default(f))
                for f in row.operands()]
    if operands:
        lines += [_indented(table(("operand", "kind", "bytes", "default"), operands)), ""]
    width = max(len(name) for name, value in facts if value) if any(v for _, v in facts) else 0
    lines += [f"{name.ljust(width)}  {value}" for name, value in facts if value]
    return "\n".join(lines).rstrip()


def route(row: Any) -> str:
    """How it is executed, in words."""
    return {"value": "compiled", "control": "control flow", "absent": "not executable in this version"}.get(
        row.route, f"slow path: {row.why_slow}")


def _kind(f: Any) -> str:
    kinds = "/".join(getattr(f, "kinds", ()) or ())
    name = f.describe()
    role = " (result)" if getattr(f, "dest", False) else " (read and written)" if getattr(f, "both", False) else ""
    return f"{name}{f' {kinds}' if kinds else ''}{role}"


def _bytes(f: Any, row: Any) -> str:
    runs: list[list[int]] = []
    for b in sorted({b for span in f.spans(row.base) for b in span}):
        if runs and b == runs[-1][1] + 1:
            runs[-1][1] = b
        else:
            runs.append([b, b])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "flag bit"


def _default(f: Any) -> str:
    from m3jit.isa.fields import REQUIRED
    if f.default is REQUIRED:
        return "" if getattr(f, "dest", False) else "required"
    return "absent" if f.default is None else str(f.default)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
