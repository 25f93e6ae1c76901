"""What can be wrong with a source, a container or a program, and how it is said."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

from m3jit.errors import UserError, brief, printable

MAX_WORD, MAX_CHOICES = 80, 2000   # beyond them a suggestion would cost too much
MAX_SHOWN = 160                    # characters of a source line in a message


@dataclass(frozen=True)
class SourceError:
    """One finding in a source text.  Column and width count characters from 1; severity is "error" or "warning"."""
    file: str
    line: int
    column: int
    message: str
    source: str = ""               # the physical line
    width: int = 1
    hint: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        out = f"{self.file}:{self.line}:{self.column}: {self.severity}: {printable(brief(self.message))}"
        if self.hint:
            out += f"; {printable(brief(self.hint))}"
        if self.source:
            shown, column = _window(self.source, self.column)
            # One character for each, so that the mark stands below its column.
            shown = "".join(c if c.isprintable() else " " if c == "\t" else "\ufffd" for c in shown)
            mark = " " * (column - 1) + "^" + "~" * max(0, min(self.width, len(shown) - column + 1) - 1)
            out += f"\n    {shown}\n    {mark}"
        return out


def _window(line: str, column: int) -> tuple[str, int]:
    """The part of a long line around a column, and the column in it."""
    if len(line) <= MAX_SHOWN:
        return line, column
    start = max(0, min(column - MAX_SHOWN // 2, len(line) - MAX_SHOWN))
    part = line[start:start + MAX_SHOWN]
    before, after = "..." if start else "", "..." if start + MAX_SHOWN < len(line) else ""
    return before + part + after, column - start + len(before)


class AssemblyError(UserError):
    """A source with errors; `errors` holds all of them in line order, `warnings` what was noticed besides."""
    exit_code = 2

    def __init__(self, errors: Iterable[SourceError], warnings: Iterable[SourceError] = ()):
        self.errors = sorted(errors, key=lambda e: (e.file, e.line, e.column))
        self.warnings = list(warnings)
        n = len(self.errors)
        super().__init__("\n".join(str(e) for e in self.errors) + f"\n{n} error{'s' if n != 1 else ''}")


class ContainerError(UserError):
    """A file that is not a sound program; the message says which file, at which byte, and what was expected."""
    exit_code = 2

    def __init__(self, file: str, offset: int, message: str, findings: Iterable["Finding"] = ()):
        self.file, self.offset, self.problem, self.findings = file, offset, message, list(findings)
        super().__init__(f"{file}: byte {offset}: {message}")


class LinkError(UserError):
    """Programs that do not fit together; `problems` holds every reason."""
    exit_code = 2

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Finding:
    """One finding of the verifier: section, byte offset in it, what is wrong and what was expected."""
    section: str
    offset: int
    message: str
    line: tuple[str, int] | None = None

    def __str__(self) -> str:
        where = f" ({self.line[0]}:{self.line[1]})" if self.line else ""
        return f"{self.section}+0x{self.offset:04x}{where}: {self.message}"


def suggest(word: str, choices: Iterable[str], noun: str = "") -> str:
    """"did you mean X?" for the closest choice, or ""."""
    import difflib                  # late: only mistakes need it
    from itertools import islice
    if len(word) > MAX_WORD:
        return ""
    pool = list(islice(choices, MAX_CHOICES))
    near = difflib.get_close_matches(word, pool, 1, 0.6)
    if not near:
        folded = {c.upper(): c for c in pool}
        near = [folded[m] for m in difflib.get_close_matches(word.upper(), folded, 1, 0.6)]
    return f"did you mean {noun}{near[0]}?" if near else ""
