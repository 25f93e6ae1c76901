#!/usr/bin/env python3
"""Check the documentation: run its commands, assemble its programs, follow its links.

    python tools/check_docs.py [FILE...]            check (default: README.md and docs/**/*.md)
    python tools/check_docs.py --write [FILE...]    put the present output under commands whose output changed

What a fenced block means is said by its first line:

    ```console              `$ ` commands, run by one shell for each document, in a fresh folder with a copy of
                            examples/, each followed by its output (both streams); `...` stands for any part of a line,
                            alone on a line for any lines
    ```console slow         the same, but run only with --slow (minutes, a network, a downloaded model)
    ```m3asm NAME.m3asm     a file of that folder (any language word and any file name); it is formatted if it is .m3asm
    ```m3asm                a fragment: it must assemble
    ```m3asm wrong          a fragment that must not assemble
    any other               text
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300                                      # seconds for one document's commands
_FENCE = re.compile(r"^```(.*)$")
_MARK = "\x01"                                     # printed between commands


@dataclass
class Command:
    """A `$ ` line (with the lines its backslashes continue it on), and the output that stands below it."""
    text: str
    line: int                                      # of the document, from 1
    expected: list[str] = field(default_factory=list)


@dataclass
class Block:
    """A fenced block: info string, first line of content (from 1), content."""
    info: list[str]
    line: int
    lines: list[str]

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""

    @property
    def file(self) -> str | None:
        """The file the block is, if its info string names one."""
        return self.info[1] if len(self.info) > 1 and "." in self.info[1] else None

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def commands(self) -> list[Command]:
        out: list[Command] = []
        for n, line in enumerate(self.lines, self.line):
            if line.startswith("$ "):
                out.append(Command(line[2:], n))
            elif out and out[-1].text.endswith("\\"):
                out[-1].text += "\n" + line
            elif out:
                out[-1].expected.append(line)
        return out


def documents() -> list[Path]:
    """Everything that is documentation (generated reference pages too: their links are checked)."""
    found = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [p for p in found if p.exists() and "dev" not in p.relative_to(ROOT).parts]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    out: list[Block] = []
    open_block: Block | None = None
    for n, line in enumerate(text.split("\n"), 1):
        m = _FENCE.match(line)
        if open_block is not None:
            if line == "```":
                out.append(open_block)
                open_block = None
            else:
                open_block.lines.append(line)
        elif m:
            open_block = Block(m[1].split(), n + 1, [])
    if open_block is not None:
        raise ValueError(f"the block in line {open_block.line - 1} has no end")
    return out


# -- commands ---------------------------------------------------------------------------------------------------------

def environment(folder: Path) -> dict[str, str]:
    """What commands see: `m3jit` and `python` of this interpreter, caches of their own."""
    shims = folder / ".bin"
    shims.mkdir(exist_ok=True)
    for name, command in (("m3jit", f'"{sys.executable}" -m m3jit'), ("python", f'"{sys.executable}"')):
        shim = shims / name
        shim.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        shim.chmod(0o755)
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("M3", "PYTEST"))}
    cache = os.environ.get("M3JIT_DOCS_CACHE") or str(folder / ".cache")
    return keep | {"PATH": f"{shims}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                   "M3JIT_CACHE_DIR": cache, "COLUMNS": "110", "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def run(commands: list[Command], folder: Path) -> list[list[str]]:
    """Output lines of each command; one shell runs them all, so that `$?` and variables last."""
    script = "".join(f"{c.text}\n__rc=$?; printf '{_MARK}'; (exit $__rc)\n" for c in commands)
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT)
    parts = done.stdout.decode("utf-8", "replace").split(_MARK)
    return [p.rstrip("\n").split("\n") if p.strip("\n") else [] for p in parts[:len(commands)]]


def matches(expected: list[str], found: list[str]) -> bool:
    """Whether output is what a document shows."""
    def strip(lines: list[str]) -> list[str]:
        return [line.rstrip() for line in lines]
    pattern = ""
    for line in strip(expected):
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.split("...")) + "\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in strip(found))) is not None


@dataclass
class Problem:
    """Something a document says that is not so."""
    document: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}: {self.message}"


def check_commands(document: Path, slow: bool = False, write: bool = False) -> list[Problem]:
    """Run a document's commands in a fresh folder that holds its files."""
    text = document.read_text(encoding="utf-8")
    found = blocks(text)
    commands = [c for b in found if b.language == "console" and (slow or "slow" not in b.info) for c in b.commands]
    if not commands:
        return []
    with tempfile.TemporaryDirectory(prefix="m3jit-docs-") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        for b in found:
            if b.file:
                (folder / b.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / b.file).write_text(b.text, encoding="utf-8")
        outputs = run(commands, folder)
    problems, lines = [], text.split("\n")
    for c, out in reversed(list(zip(commands, outputs))):
        if matches(c.expected, out):
            continue
        first = c.line + c.text.count("\n")        # index of the line behind the command
        if write:
            lines[first:first + len(c.expected)] = out
        shown = "\n".join(f"        {line}" for line in out) or "        (nothing)"
        problems.append(Problem(document, c.line, f"$ {c.text}\n    gave\n{shown}"))
    if write and problems:
        document.write_text("\n".join(lines), encoding="utf-8")
    return problems[::-1]


def check_programs(document: Path) -> list[Problem]:
    """Assemble a document's fragments; its files must be in the canonical layout."""
    from m3jit.frontend import AssemblyError, assemble, format_source
    problems = []
    for b in blocks(document.read_text(encoding="utf-8")):
        if b.language != "m3asm":
            continue
        try:
            if b.file is None:
                assemble(b.text, f"<{document.name}:{b.line}>", allow_undefined=True)
                if "wrong" in b.info:
                    problems.append(Problem(document, b.line, "this fragment assembles, and should not"))
            elif b.file.endswith(".m3asm") and "wrong" not in b.info and format_source(b.text) != b.text:
                problems.append(Problem(document, b.line, f"{b.file} is not in the layout of `m3jit fmt`"))
        except AssemblyError as error:
            if "wrong" not in b.info:
                problems.append(Problem(document, b.line, f"this does not assemble:\n{error}"))
    return problems


# -- links ------------------------------------------------------------------------------------------------------------

_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def outside_fences(text: str) -> list[tuple[int, str]]:
    """(number, line) of what is prose; code spans are blanked."""
    out, inside = [], False
    for n, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            out.append((n, re.sub(r"`[^`]*`", lambda m: " " * len(m[0]), line)))
    return out


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    out: set[str] = set()
    inside = False
    for line in text.split("\n"):
        inside ^= line.startswith("```")
        m = re.match(r"#{1,6} (.*)", line)
        if m and not inside:
            slug = re.sub(r"[^\w\- ]", "", m[1].strip().lower()).replace(" ", "-")
            n = 0
            while (name := slug if not n else f"{slug}-{n}") in out:
                n += 1
            out.add(name)
    return out


def links(line: str) -> list[str]:
    """The targets of a line's links."""
    return _LINK.findall(line)


def check_links(document: Path) -> list[Problem]:
    """Relative links must name files of the repository, and anchors headings of them."""
    problems = []
    for n, line in outside_fences(document.read_text(encoding="utf-8")):
        for target in links(line):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (document.parent / path).resolve() if path else document
            if not there.exists() or ROOT not in (there, *there.parents):
                problems.append(Problem(document, n, f"{target} leads nowhere"))
            elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                problems.append(Problem(document, n, f"{path or document.name} has no heading for #{anchor}"))
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="put the present output into the documents")
    parser.add_argument("--slow", action="store_true", help="run slow blocks too")
    wanted = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    problems = []
    for document in [p.resolve() for p in wanted.files] or documents():
        problems += check_commands(document, wanted.slow, wanted.write)
        problems += check_programs(document) + check_links(document)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems and not wanted.write else 0


if __name__ == "__main__":
    sys.exit(main())
