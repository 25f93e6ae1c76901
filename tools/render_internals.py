#!/usr/bin/env python3
"""Put the present output of every compiler stage into docs/internals.md.

    python tools/render_internals.py            rewrite the stages that changed
    python tools/render_internals.py --check    change nothing; exit code 1 and the stages that are not current

A stage stands between `<!-- stage: NAME -->` and `<!-- end -->`.  The program is the document's own layer.m3asm.
Stages that LLVM prints name the version they were made with; with another version they are not compared.
"""
from __future__ import annotations

import argparse
import re
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import check_docs  # noqa: E402  (found through the path set above)
from make_reference import hexadecimal  # noqa: E402
from m3jit.cli import explain  # noqa: E402
from m3jit.cli.bindings import parse_binding  # noqa: E402
from m3jit.frontend import Cfg, assemble_file  # noqa: E402
from m3jit.frontend.disassembler import instruction_text  # noqa: E402

DOCUMENT = ROOT / "docs" / "internals.md"
SOURCE, BINDING = "layer.m3asm", "rX=f32[2, 4]"
LEVEL, ARCH = "avx512", "sm_80"
BY_LLVM = ("asm", "ptx")                          # texts that the version of LLVM decides
_STAGE = re.compile(r"<!-- stage: (\w+)( \(LLVM ([\d.]+)\))? -->\n(.*?)<!-- end -->", re.S)


def excerpt(text: str, needle: str, first: str, last: str) -> str:
    """The lines around the first one that holds `needle`: from the line that matches `first` at or before it to the
    line that matches `last` behind it (regular expressions)."""
    lines = text.split("\n")
    at = next(i for i, line in enumerate(lines) if needle in line)
    a = next(i for i in range(at, -1, -1) if re.search(first, lines[i]))
    b = next(i for i in range(at + 1, len(lines)) if re.search(last, lines[i]))
    return "\n".join([*(["..."] if a else []), *lines[a:b + 1], *(["..."] if b + 1 < len(lines) else [])])


class Stages:
    """Every stage of the document's program, each made when it is asked for."""

    def __init__(self, path: Path):
        self.path, self.program = path, assemble_file(str(path))

    @cached_property
    def machine(self):
        vm = explain._machine(self.program, None, LEVEL)
        vm.set(*parse_binding(BINDING))
        return vm

    @cached_property
    def compiled(self):
        return explain._by_lifting(self.machine, None)

    @cached_property
    def engine(self):
        return self.machine.regions.compiler.engine

    def kernel(self, stage: str) -> str:
        """A text of the region's first kernel."""
        first = self.compiled.region.plan.kernels()[0]
        return explain._kernel_text(stage, first, self.engine, ARCH).rstrip()

    def frame(self) -> str:
        """The bytes of the first instruction that is not a constant."""
        pc, ins = next((pc, i) for pc, i in self.program.instructions if "constant" not in i.op.reads)
        return f"{instruction_text(self.program, pc, ins)}\n\n{hexadecimal(self.program.text[pc:pc + ins.size])}"

    def cfg(self) -> str: return Cfg(self.program).dump()
    def lifted(self) -> str: return self.compiled.lifted
    def optimised(self) -> str: return self.compiled.passes["dce"]

    def groups(self) -> str:
        return "\n".join(explain.group_text(i, g) for i, g in enumerate(self.compiled.groups))

    def plan(self) -> str: return str(self.compiled.region.plan)
    def loop(self) -> str: return excerpt(self.kernel("loop"), "grid", "^kernel", "div 1.0")
    def python(self) -> str: return self.kernel("python")
    def llvm(self) -> str: return excerpt(self.kernel("llvm"), "fmul <", r"^loop\d+:", r"^  br i1")
    def asm(self) -> str: return excerpt(self.kernel("asm"), "vmulps", r"^\.LBB", r"^\s+j\w+\s")
    def ptx(self) -> str: return excerpt(self.kernel("ptx"), "mul.rn.f32", r"^\$L", r"\sbra\.uni")
    def opencl(self) -> str: return excerpt(self.kernel("opencl"), "for (long", r"^    for", r"^    }")

    def region(self) -> str:
        return excerpt(self.engine.llvm_ir(self.compiled.region.plan), "define void @region", "^define", "^}")

    def body(self) -> str:
        return excerpt(self.engine.llvm_ir(self.compiled.region.plan), "@m3_run(ptr %pool", r"^block\d+:", "^  ")


LANGUAGE = {"python": "python", "opencl": "c", "llvm": "llvm", "region": "llvm", "body": "llvm", "asm": "asm",
            "ptx": "ptx"}


def llvm_version() -> str:
    import llvmlite.binding as llvm
    return ".".join(map(str, llvm.llvm_version_info[:2]))


def current(document: Path = DOCUMENT) -> tuple[str, list[str]]:
    """(the document with every stage as it is now, names of the stages that differ)."""
    text = document.read_text(encoding="utf-8")
    source = next(b for b in check_docs.blocks(text) if b.file == SOURCE)
    stale: list[str] = []
    with tempfile.TemporaryDirectory(prefix="m3jit-docs-") as folder:
        path = Path(folder) / SOURCE
        path.write_text(source.text, encoding="utf-8")
        stages = Stages(path)

        def one(m: re.Match) -> str:
            name = m[1]
            make: Callable[[], str] = getattr(stages, name)
            version = f" (LLVM {llvm_version()})" if name in BY_LLVM else ""
            body = "\n".join(line.rstrip() for line in make().expandtabs(4).rstrip().split("\n"))
            new = f"<!-- stage: {name}{version} -->\n```{LANGUAGE.get(name, 'text')}\n{body}\n```\n<!-- end -->"
            if new != m[0] and (m[3] is None or not version or m[3] == llvm_version()):
                stale.append(name)
            return new
        return _STAGE.sub(one, text), stale


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a stage is not current")
    wanted = parser.parse_args()
    text, stale = current()
    for name in stale:
        print(f"docs/internals.md: stage {name} " + ("is not current; run python tools/render_internals.py"
                                                     if wanted.check else "rewritten"), file=sys.stderr)
    if not wanted.check:
        DOCUMENT.write_text(text, encoding="utf-8")
    return 1 if stale and wanted.check else 0


if __name__ == "__main__":
    sys.exit(main())
