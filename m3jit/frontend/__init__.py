"""Text, containers and linking: `assemble`, `disassemble`, `load`, `link`, `verify`, and the control-flow graph."""
from __future__ import annotations

from typing import Iterable

from m3jit.frontend.assembler import assemble, assemble_file
from m3jit.frontend.cfg import Cfg, Liveness, liveness
from m3jit.frontend.disassembler import disassemble, instruction_text
from m3jit.frontend.errors import AssemblyError, ContainerError, Finding, LinkError, SourceError
from m3jit.frontend.formatter import format_source
from m3jit.frontend.linker import link
from m3jit.frontend.program import Program, load
from m3jit.frontend.records import Import, Line, Reloc, RelocKind, Symbol, SymbolKind
from m3jit.frontend.verify import verify

__all__ = ["link", "format_source", "Cfg", "Liveness", "liveness", "assemble", "assemble_file", "load", "disassemble",
           "instruction_text", "verify", "AssemblyError", "ContainerError", "Finding", "LinkError", "SourceError",
           "Import", "Line", "Program", "Reloc", "RelocKind", "Symbol", "SymbolKind"]
