"""`m3jit explain`: a program at every stage of compilation."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import click

from m3jit.cli.options import UsageError
from m3jit.cli.terminal import note
from m3jit.errors import UserError

STAGES = {"cfg": "control-flow graph with live registers", "lifted": "tensor IR as lifted from bytecode",
          "passes": "tensor IR after each pass", "optimised": "tensor IR after the passes",
          "groups": "fused groups", "plan": "launch plan of the region", "kernels": "names of the region's kernels",
          "loop": "loop IR", "llvm": "LLVM IR", "asm": "assembly", "ptx": "PTX (NVIDIA)", "opencl": "OpenCL C",
          "python": "Python"}
OF_A_KERNEL = ("loop", "llvm", "asm", "ptx", "opencl", "python")
USUAL = ("cfg", "lifted", "optimised", "groups", "plan", "kernels")
RUN_STEPS = 20_000


@dataclass
class Compiled:
    """One region on its way to native code."""
    place: str
    lifted: str
    passes: dict[str, str]
    region: Any
    groups: list[Any] = field(default_factory=list)


@click.command()
@click.argument("prog")
@click.option("--bind", "-b", "bindings", multiple=True, metavar="rX=TYPE",
              help="What a register holds at the start: a type such as f32[4, 8], or a value as `run --bind` takes.")
@click.option("--at", metavar="LABEL", help="Begin there [the program's entry].")
@click.option("--run", "execute", is_flag=True,
              help="Run the program and explain the regions it compiles (models: always).")
@click.option("--prompt", "-p", metavar="TEXT", help="Input of that run.")
@click.option("--stage", "-s", "stages", multiple=True, metavar="STAGE", type=click.Choice([*STAGES, "all"]),
              help=f"What to show [{', '.join(USUAL)}]; also {', '.join(s for s in STAGES if s not in USUAL)}, all.")
@click.option("--kernel", "-k", metavar="NAME", help="The stages of one kernel only (names: --stage kernels).")
@click.option("--level", default="native", show_default=True, metavar="LEVEL",
              help="CPU level of llvm and asm: baseline, avx2, avx512, native.")
@click.option("--arch", default="sm_80", show_default=True, metavar="SM", help="GPU architecture of ptx.")
def explain(prog: str, bindings: tuple[str, ...], at: str | None, execute: bool, prompt: str | None,
            stages: tuple[str, ...], kernel: str | None, level: str, arch: str) -> int:
    """Show PROG (.m3asm, .m3b or a model) at every stage between bytecode and native code.

    A region is compiled for the types its registers have when it is entered, so registers the program does not set
    itself need --bind.
    """
    program, models, is_model = _open(prog, tuple(b.partition("=")[0].strip() for b in bindings))
    wanted = tuple(STAGES) if "all" in stages else stages or (("loop",) if kernel else USUAL)
    shown: list[tuple[str, str]] = []
    if "cfg" in wanted:
        from m3jit.frontend import Cfg
        shown.append(("control-flow graph", Cfg(program).dump()))
    if set(wanted) - {"cfg"}:
        from m3jit.cli.bindings import bind
        vm = _machine(program, models, level)
        bind(vm, bindings)
        found = _by_running(vm, prompt) if execute or is_model else [_by_lifting(vm, at)]
        for compiled in found:
            shown += _sections(compiled, vm, wanted, kernel, arch)
    click.echo("\n\n".join(f"=== {title} ===\n{text.rstrip()}" for title, text in shown))
    return 0


def _open(prog: str, bound: tuple[str, ...]) -> tuple[Any, Any, bool]:
    """(program, models, is it a model?)."""
    from m3jit.cli import what as whats
    found, models = whats.find(prog), whats.LazyModels()
    if found.kind != "model":
        program = whats.open_program(found, bound=bound)
        return program, models, False
    from m3jit.cli.sampling import model_options
    model = models.load(found.reference)
    return models.models.program(model, found.reference, model_options({"temp": 0.0, "max_tokens": 2})), models, True


def _machine(program: Any, models: Any, level: str) -> Any:
    """A machine that compiles everything it can, writes nowhere and reads no files."""
    from m3jit.vm.vm import VM
    vm = VM(program, f"cpu:{level}", 1, RUN_STEPS, models=models, files=None)
    for name in ("OUTPUT", "ERROR"):
        vm.set_sink(name, lambda item: None)
    return vm


def _watch(vm: Any) -> list[Compiled]:
    """The list that regions are added to as the machine compiles them."""
    from m3jit.cli.machine import place
    from m3jit.ir.passes import PassLog
    from m3jit.ir.passes.fuse import Group
    compiler, found = vm.regions.compiler, []
    compile_region = compiler.compile
    log = compiler.log = PassLog(keep=frozenset({"all"}))

    def watched(function: Any, name: str) -> Any:
        lifted = str(function)
        log.texts.clear()
        region, native = compile_region(function, name)
        groups = [s for b in function.blocks for s in b.body if isinstance(s, Group)]
        found.append(Compiled(place(vm, function.entry_pc), lifted, dict(log.texts), region, groups))
        return region, native
    compiler.compile = watched
    return found


def _by_lifting(vm: Any, at: str | None) -> Compiled:
    """The region that begins at a label, with the registers as they are."""
    from m3jit.cli.machine import place
    from m3jit.frontend.disassembler import instruction_text
    from m3jit.vm.jit import ContextRegisters
    program = vm.image.program
    pc = program.entry
    if not vm.image.instructions:
        raise UserError(f"{program.name}: has no instructions to compile")
    if at is not None:
        symbol = next((s for s in program.symbols if s.name == at and s.kind.name in ("LABEL", "FUNC")), None)
        if symbol is None:
            labels = [s.name for s in program.symbols if s.kind.name in ("LABEL", "FUNC")]
            raise UsageError(f"--at {at}: no such label; there are {', '.join(labels) or 'none'}")
        pc = symbol.value
    found = _watch(vm)
    vm.machine.ctx = vm.main
    lifted = vm.regions._lift(ContextRegisters(vm.main, vm.machine), pc)
    if lifted is None:
        ins = vm.image.at(pc)
        raise UserError(f"nothing is compiled at {place(vm, pc)}: {instruction_text(program, pc, ins)} "
                        f"{_why_not(ins)}; begin elsewhere with --at, give live registers with --bind, or explain what "
                        "a run compiles with --run")
    vm.regions.compiler.compile(lifted[0], f"r{pc:x}")
    return found[0]


def _why_not(ins: Any) -> str:
    if ins.op.route == "machine":
        return f"takes the slow path ({ins.op.why_slow})"
    if ins.op.route == "absent":
        return "is not executable in this version"
    return "ends compiled code" if ins.op.route == "control" else "cannot be compiled with these registers"


def _by_running(vm: Any, prompt: str | None) -> list[Compiled]:
    """What a run compiles; a run that fails is explained up to there."""
    from m3jit.errors import InternalError
    found = _watch(vm)
    vm.push_input(prompt or "Hello")
    try:
        vm.run()
    except UserError as error:
        note(f"the run ended early: {error}")
    except InternalError:
        raise
    if not found:
        raise UserError("the run compiled nothing: every instruction took the slow path")
    return found


def _sections(c: Compiled, vm: Any, wanted: tuple[str, ...], only: str | None, arch: str) -> Iterator[tuple[str, str]]:
    """(title, text) of the stages asked for."""
    plan = c.region.plan
    kernels = _named(plan.kernels())
    if only is not None and only not in kernels:
        from m3jit.frontend.errors import suggest
        raise UsageError(f"--kernel {only}: the region at {c.place} has none of that name; it has "
                        f"{', '.join(kernels) or 'none'}; {suggest(only, kernels)}".rstrip("; "))
    stages: dict[str, Callable[[], str]] = {
        "lifted": lambda: c.lifted,
        "passes": lambda: "\n\n".join(f"after {name}:\n{text}" for name, text in c.passes.items() if name != "fuse"),
        "optimised": lambda: c.passes["dce"],
        "groups": lambda: "\n".join(group_text(i, g) for i, g in enumerate(c.groups)) or "none",
        "plan": lambda: str(plan),
        "kernels": lambda: "\n".join(kernels) or "none: the region is scalar code",
    }
    for stage in STAGES:
        if stage in wanted and stage in stages:
            yield f"{STAGES[stage]}, region at {c.place}", stages[stage]()
    for name, k in kernels.items():
        if only in (None, name):
            for stage in OF_A_KERNEL:
                if stage in wanted:
                    yield f"{STAGES[stage]} of kernel {name}", _kernel_text(stage, k, vm.regions.compiler.engine, arch)
    if only is None:
        engine = vm.regions.compiler.engine
        if "llvm" in wanted:
            yield f"LLVM IR of the region at {c.place}", engine.llvm_ir(plan)
        if "asm" in wanted:
            yield f"assembly of the region at {c.place}", engine.assembly(plan)


def _named(kernels: list[Any]) -> dict[str, Any]:
    """Kernels by name; several of one name are told apart by their digest."""
    names = [k.name for k in kernels]
    return {k.name if names.count(k.name) == 1 else f"{k.name}.{k.digest()[:6]}": k for k in kernels}


def _kernel_text(stage: str, kernel: Any, engine: Any, arch: str) -> str:
    if stage == "loop":
        from m3jit.ir.loop_text import print_kernel
        return print_kernel(kernel)
    if stage == "llvm":
        return engine.llvm_ir(kernel)
    if stage == "asm":
        return engine.assembly(kernel)
    try:
        if stage == "python":
            from m3jit.backends.python.render import render_python
            return render_python(kernel)
        if stage == "opencl":
            from m3jit.backends.opencl.render import render_opencl
            return render_opencl(kernel)
        from m3jit.backends.cuda.render import render_ptx
        return render_ptx(kernel, arch)
    except (UserError, NotImplementedError) as error:
        return f"refused: {error}"


def group_text(number: int, g: Any) -> str:
    """A fused group: its domain, members, and what goes in and out."""
    how = "elementwise, flat" if g.flat else "row by row"
    by_instruction: dict[tuple[int, str], list[str]] = {}
    for n in g.nodes:
        by_instruction.setdefault(n.where, []).append(n.op)
    members = "".join(f"\n    0x{pc:04x} {name}: {', '.join(ops)}" for (pc, name), ops in by_instruction.items())
    inputs = ", ".join(f"{n.op} {n.type} read {how_read}" for n, how_read in g.inputs)
    lead = " x ".join(map(str, g.lead))
    return (f"group {number}: {how}, {lead + ' rows x ' if lead else ''}{g.columns}{members}\n"
            f"  reads: {inputs or 'nothing'}\n"
            f"  gives: {', '.join(f'{n.op} {n.type}' for n in g.outputs) or 'nothing'}")
