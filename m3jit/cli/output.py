"""What is said about a run: registers, counts and times, the profile, the trace, IR as it is made."""
from __future__ import annotations

import sys
import time
from typing import Any

from m3jit.cli.terminal import note, table
from m3jit.cli.options import UsageError
from m3jit.vm.streams import Item, StandardSink


class Output(StandardSink):
    """Standard output that remembers when something came, and whether the last line is complete."""

    def __init__(self) -> None:
        super().__init__("standard output", "stdout")
        self.first = self.latest = 0.0
        self.items = self.bytes = 0
        self.last = b"\n"

    def write(self, item: Item, blocking: bool) -> bool:
        super().write(item, blocking)
        self.latest = time.perf_counter()
        self.first = self.first or self.latest
        self.items += 1
        if item.form in ("TEXT", "RAW") and item.data:
            self.bytes += len(item.data)
            self.last = bytes(item.data[-1:])
        return True


class Observers:
    """Everything that watches one run; `finish` prints it."""

    def __init__(self, vm: Any, options: dict[str, Any]):
        self.vm, self.options = vm, options
        self.began = time.perf_counter()
        self.output = vm.sinks["OUTPUT"] = Output()
        self.trace: Any = None

    def finish(self, seconds: float) -> None:
        """Print what was asked for, also of a run that failed."""
        if sys.stdout.isatty() and sys.stderr.isatty() and self.output.last != b"\n":
            note("")
        if self.trace is not None:
            self.trace.write()
        for name in self.options["shown"]:
            note(f"{name} = {value_text(self.vm.get(name))}")
        if self.options["stats"]:
            note(statistics(self.vm, self.output, seconds, self.began))
        if self.options["profile"]:
            from m3jit.cli.profile import profile_text
            note(profile_text(self.vm))


def observe(vm: Any, options: dict[str, Any]) -> Observers:
    """Attach what the options ask for."""
    observers = Observers(vm, options)
    if options["print_after"]:
        print_ir(vm, options["print_after"])
    if options["checked"]:
        if vm.regions is None:
            raise UsageError("--checked: compares compiled code with the interpreter; give a backend that compiles")
        from m3jit.vm.checked import check_regions
        check_regions(vm)
    if options["profile"]:
        from m3jit.cli.profile import time_launches
        time_launches(vm)
    if options["trace"] is not None:
        from m3jit.cli.trace import Trace
        observers.trace = Trace(vm, options["trace"])
    return observers


def print_ir(vm: Any, name: str) -> None:
    """Print the IR of every region as it is compiled, after pass `name` ("lift": as lifted, "all": everywhere)."""
    from m3jit.ir.passes import PASSES, PassLog
    known = ("lift", *(p.name for p in PASSES), "all")
    if name not in known:
        raise UsageError(f"--print-ir-after {name}: no such pass; there are {', '.join(known)}")
    if vm.regions is None:
        raise UsageError("--print-ir-after: the interpreter compiles nothing; give a backend that does")
    compiler = vm.regions.compiler
    compile_region = compiler.compile
    log = compiler.log = PassLog(keep=frozenset({name}), check=compiler.checked)

    def printing(function: Any, region: str) -> Any:
        if name in ("lift", "all"):
            note(f"; IR of {region} as lifted\n{function}")
        log.texts.clear()
        done = compile_region(function, region)
        for after, text in log.texts.items():
            note(f"; IR of {region} after {after}\n{text}")
        return done
    compiler.compile = printing


def command_line() -> str:
    """What was typed, in one line."""
    import shlex
    return "m3jit " + shlex.join(sys.argv[1:])


def value_text(value: Any) -> str:
    """A register's value in a line or a few."""
    if value is None:
        return "(never written)"
    if hasattr(value, "dtype") and hasattr(value, "numpy"):
        import numpy as np
        with np.printoptions(threshold=64, linewidth=110):
            shown = "packed" if value.dtype.is_block else np.array2string(value.numpy(), separator=", ")
        return f"{value.dtype.name.lower()}[{', '.join(map(str, value.shape))}] {shown}"
    return repr(value)


def statistics(vm: Any, output: Output, seconds: float, began: float) -> str:
    """The table of --stats."""
    facts = vm.stats
    n = facts["instructions"]
    rows: list[tuple[str, str]] = [("instructions", f"{n:,}"), ("seconds", f"{seconds:.3f}"),
                                   ("instructions per second", f"{n / seconds:,.0f}" if seconds else "-")]
    if output.items:
        rows.append(("first output after", f"{output.first - began:.3f} s"))
    rows += _tokens(vm, output)
    if vm.regions is not None and vm.regions.regions:
        regions, compiler = vm.regions.regions, vm.regions.compiler
        rows.append(("regions", f"{len(regions)} compiled, entered {sum(r.entries for r in regions):,} times"))
        rows.append(("compiled", f"{vm.regions.retired:,} of {n:,} instructions, {vm.regions.retired / max(n, 1):.1%}"))
        rows.append(("compiling", ", ".join(f"{k} {1e3 * v:.0f} ms" for k, v in compiler.timings.items())))
        made = getattr(compiler.engine, "statistics", None)
        if made is not None:
            rows.append(("code", str(made)))
        weights = compiler.weights
        if weights.mapped or weights.in_memory:
            rows.append(("repacked weights", f"{weights.mapped / 1e6:.1f} MB mapped from the cache, "
                                             f"{weights.in_memory / 1e6:.1f} MB in memory" +
                         (f" ({weights.reason})" if weights.in_memory and weights.reason else "")))
    try:
        import resource
        rows.append(("peak memory", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, "
                                    "mapped files included"))
    except ImportError:                                # Windows: the row is left out
        pass
    rows += [(f"dropped by {name}", str(count)) for name, count in facts["dropped"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _tokens(vm: Any, output: Output) -> list[tuple[str, str]]:
    """Counts of a model's program: it keeps them in rCount and rMade."""
    names = {s.name for s in vm.image.program.symbols if s.kind.name == "REGISTER"}
    if not {"rCount", "rMade", "rToken"} <= names:
        return []
    prompt, made = vm.get("rCount"), vm.get("rMade")
    if not isinstance(prompt, int) or not isinstance(made, int):
        return []
    rows = [("tokens", f"{prompt} of the prompt, {made} generated")]
    if made > 1 and output.latest > output.first:
        rows.append(("tokens per second", f"{(made - 1) / (output.latest - output.first):.1f} after the first"))
    return rows
