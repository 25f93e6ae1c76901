"""`m3jit run`."""
from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from m3jit.cli.options import SECONDS, STEPS, Name, Size, UsageError, Whole, register_of
from m3jit.cli.sampling import refuse_for_programs, sampling_options
from m3jit.cli.steered import given, steering_options
from m3jit.cli.terminal import keep_inputs
from m3jit.errors import Interrupted, UserError

DEFAULT_PROMPT = "The carriage stopped at the door, and"


@click.command(epilog="Standard output gets the program's stream and nothing else.")
@click.argument("what", required=False)
@click.option("--prompt", "-p", "prompts", multiple=True, metavar="TEXT",
              help="What the program reads as USER_INPUT: a model's prompt. Repeated: one item each.")
@click.option("--input", "-i", "inputs", multiple=True, metavar="FILE",
              help="The same from a file; - is standard input, which is also read when nothing is given.")
@click.option("--lines", is_flag=True, help="Each line of standard input is an item of its own.")
@sampling_options
@steering_options
@click.option("--context", type=Whole(1), metavar="N",
              help="Tokens a prompt and its text may have [the model's].")
@click.option("--seed", type=Whole(-2 ** 63, 2 ** 64 - 1), metavar="N",
              help="Seed of the random stream [the same each time].")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message for --chat.")
@click.option("--bind", "-b", "bindings", multiple=True, metavar="rX=VALUE",
              help='Set a register first: 5, 0.5, "text", [[1, 2], [3, 4]], f32[4, 8] (zeros), @FILE.npy.')
@click.option("--show", "shown", multiple=True, metavar="rX", help="Print a register afterwards, on standard error.")
@click.option("--files", metavar="FOLDER", default=".", help="Folder the program may read and write [.].")
@click.option("--store", type=Name(), metavar="FOLDER",
              help="Keep versions there that FORK PERSIST commits; a run that was stopped or killed goes on at the "
              "last one when it is started again.")
@click.option("--checkpoint-every", type=Whole(1, 2 ** 31 - 1), metavar="N",
              help="With --store, of a model: commit a version every N tokens, for runs that are killed [never].")
@click.option("--search", "-I", multiple=True, metavar="FOLDER", help="Look here too for FILE= and .import.")
@click.option("--threads", "-t", type=Whole(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--backend", metavar="NAME", default="auto", show_default=True,
              help="auto, cpu, cpu:LEVEL (baseline avx2 avx512 native), numba, python or interpreter.")
@click.option("--max-steps", type=STEPS, metavar="N", help="Stop after N instructions (exit code 4).")
@click.option("--timeout", type=SECONDS, metavar="SECONDS",
              help="Stop after this time (exit code 4).")
@click.option("--memory-limit", type=Size(), metavar="SIZE",
              help="Most memory, such as 512M or 2G [three quarters of what is free].")
@click.option("--snapshot-window", type=Whole(0), metavar="N",
              help="Keep the newest N snapshots though no register names them [64].")
@click.option("--snapshot-memory", type=Size(of="snapshots"), metavar="SIZE",
              help="Most memory that snapshots alone may hold [4G].")
@click.option("--context-limit", type=Whole(1), metavar="N", help="Most contexts at one time [1024].")
@click.option("--stats", is_flag=True, help="Print counts, times and memory afterwards.")
@click.option("--profile", is_flag=True, help="Print a table of time by opcode and by region.")
@click.option("--trace", metavar="FILE", help="Write regions and slow instructions as a trace for ui.perfetto.dev.")
@click.option("--print-ir-after", "print_after", metavar="PASS",
              help='Print each region\'s IR after a pass ("lift": before all, "all": after each).')
@click.option("--checked", is_flag=True, help="Verify IR after each pass; run each region on the interpreter as well.")
def run(what: str | None, sampling: dict[str, Any], **options: Any) -> int:
    """Run WHAT: a program (.m3b or .m3asm), a model file (.gguf), a model's folder (with a config.json) or the name of
    a model (`m3jit model list`).

    Without WHAT, the embedded default model continues the prompt.
    """
    from m3jit.cli import what as whats
    from m3jit.cli.machine import limit_memory
    from m3jit.vm.regions import check as check_backend
    options.setdefault("recording", None)              # of `m3jit record` and `m3jit debug`: what runs the machine
    options.setdefault("checkpoint_every", None)
    if options["checkpoint_every"] is not None and options["store"] is None:
        raise UsageError("--checkpoint-every: versions go to a store; give --store FOLDER too")
    limit = options["memory_limit"]
    limit_memory(limit)
    check_files(options["files"])
    check_backend(options["backend"])                  # before a model is loaded, a log begun or a store made
    if options["store"] is not None and options["recording"] is not None and options["recording"].path is None:
        raise UsageError("--store: the debugger goes forward and back, a store forward only; leave it out")
    found = whats.find(what)
    log = options["recording"] and options["recording"].path
    for output in (options["trace"], log):
        keep_inputs(output, found.reference, *options["inputs"])
    if log and options["trace"] and os.path.realpath(log) == os.path.realpath(options["trace"]):
        raise UsageError(f"--trace {options['trace']}: is the log too; give one of them another name")
    models = whats.LazyModels()
    prompts: list[Any] = [os.fsencode(text).decode("utf-8", "replace") for text in options["prompts"]]
    if found.kind == "model":
        return _run_model(found, models, sampling, prompts, limit, options)
    else:
        refuse_for_programs(sampling, found.reference, {
            "--chat": options["chat"], "--system": bool(options["system"]), "--context": options["context"] is not None,
            "--checkpoint-every": options["checkpoint_every"] is not None,
            **dict.fromkeys(given(options), True)})
        bound = tuple(b.partition("=")[0].strip() for b in options["bindings"])
        program = whats.open_program(found, options["search"], bound)
        if not program.instructions:
            raise UsageError(f"{found.reference}: error: no instructions; a program with one at least was expected")
        from m3jit.cli.machine import read_text
        prompts += [read_text(path) for path in options["inputs"]]
    vm = _machine(program, models, limit, options)
    return _run(vm, program, prompts, options)


def check_files(folder: str) -> None:
    """The folder of --files is there.  UsageError otherwise."""
    if not os.path.isdir(folder):
        raise UsageError(f"--files {folder or repr(folder)}: "
                         f"{'is no folder' if os.path.exists(folder) else 'no such folder'}; create it first")


def _run_model(found: Any, models: Any, sampling: dict[str, Any], prompts: list[str], limit: int | None,
               options: dict[str, Any]) -> int:
    """Compile a model and run it on its prompt, which must fit."""
    import numpy as np

    from m3jit.api.generation import LanguageModel
    from m3jit.cli import steered
    from m3jit.cli.sampling import model_options, warn_of_context
    model = models.load(found.reference)
    models.models.compiler(model)                      # an architecture that is not there, before its tokeniser is
    compiled = model_options(sampling, context=options["context"], checkpoint_every=options["checkpoint_every"] or 0)
    if not model.generates:
        if sys.stdout.isatty():
            raise UserError(f"{found.reference}: gives vectors, not text; `m3jit embed {found.reference} TEXT` prints "
                            "them (run writes an array, .npy, to a file or a pipe)")
        text = _prompt(found, prompts, options)
        program = models.models.program(model, found.reference, compiled)
        return _run(_machine(program, models, limit, options), program, [text], options, text)
    warn_of_context(options["context"], model, found.reference)
    language = LanguageModel(found.reference, models.models, options["backend"], options["threads"], options=compiled)
    text = _prompt(found, prompts, options)
    ids = chat_tokens(model, text, options["system"]) if options["chat"] else np.array(model.encode(text), np.int64)
    settings = steered.settings(sampling, options)
    if not steered.given(options):
        language.check(len(ids), settings)
        program = models.models.program(model, found.reference, compiled)
        return _run(_machine(program, models, limit, options), program, [ids], options, text)
    if options["store"] is not None:
        outside = ", ".join(steered.given(options))
        raise UsageError(f"--store: {outside} are decided outside the program, token by token; a store holds what a "
                         "program does by itself. Leave them out")
    machine = {"max_steps": options["max_steps"], "timeout": options["timeout"], "profile": options["profile"]}
    recording = options["recording"]
    if recording is not None:
        from m3jit.timetravel.steering import Steering
        machine["record"], recording.steering = recording.recorder, Steering.made(found.reference, settings.checked())
    generated = language.start(ids.tolist(), settings, **machine, **({"memory_limit": limit} if limit else {}))
    steering = steered.Steered(generated)
    if recording is not None:
        recording.finish = steering.finish             # what it says at the end is part of the log
    try:
        _run(generated.vm, generated.vm.image.program, None, options)
    except Interrupted as stopped:
        if recording is None:
            steering.finish(stopped)                   # what was held back, as a stop string might have come of it
        raise
    if recording is None:
        steering.finish()
    return 0


def _prompt(found: Any, prompts: list[str], options: dict[str, Any]) -> str:
    """The one text a model is given.  UsageError, UserError: several, or none."""
    from m3jit.cli.machine import read_standard_input, read_text
    if len(prompts) + len(options["inputs"]) > 1:
        raise UsageError("a model takes one prompt; give one --prompt or one --input")
    if options["system"] and not options["chat"]:
        raise UsageError("--system: is a part of the chat template; add --chat")
    text = prompts[0] if prompts else read_text(options["inputs"][0]) if options["inputs"] else read_standard_input()
    if not text and found.is_default and not prompts and not options["inputs"]:
        text = DEFAULT_PROMPT
        if sys.stderr.isatty():
            from m3jit.cli.terminal import note
            note(f"prompt: {text}")
    if not text:
        raise UserError(f"{found.reference}: no prompt; give one with --prompt, --input FILE or on standard input")
    return text


def chat_tokens(model: Any, prompt: str, system: str | None) -> Any:
    """Token ids of a message in the model's chat template.  UserError: it has none, or one that fails."""
    import numpy as np

    from m3jit.models.chat_template import ChatTemplate
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return np.array(ChatTemplate(model.tokenizer).tokens(messages), np.int64)


BOUNDS = ("snapshot_window", "snapshot_memory", "context_limit")


def _machine(program: Any, models: Any, limit: int | None, options: dict[str, Any]) -> Any:
    from m3jit.cli.store import opened
    from m3jit.vm.context import DEFAULT_SEED
    from m3jit.vm.vm import VM
    seed = options["seed"]
    disk = click.get_current_context().with_resource(opened(options["store"]))
    more: dict[str, Any] = {"memory_limit": limit} if limit else {}
    more |= {name: options[name] for name in BOUNDS if options[name] is not None}
    if options["recording"] is not None:
        more["record"] = options["recording"].recorder
    return VM(program, options["backend"], options["threads"], options["max_steps"], timeout=options["timeout"],
              models=models, files=options["files"], profile=options["profile"], checkpoints=disk,
              seed=DEFAULT_SEED if seed is None else (seed + 2 ** 63) % 2 ** 64 - 2 ** 63, **more)


def _run(vm: Any, program: Any, prompts: list[Any] | None, options: dict[str, Any], text: str | None = None) -> int:
    """Run a machine under the eyes of the options.  prompts None: it has its input already.  text: a model's prompt."""
    from m3jit.cli import machine, output, store
    from m3jit.cli.bindings import bind
    from m3jit.cli.terminal import Progress
    keep_inputs(options["trace"], *program.files)
    bind(vm, options["bindings"])
    for name in options["shown"]:
        register_of(vm, "--show", name)                # a name that is not there is said before the run
    if options["store"] is not None:
        vm.checkpoints.given = store.given(vm, prompts or [] if text is None else text, options)
    if prompts is not None:
        machine.give_input(vm, prompts, options["lines"], getattr(options["recording"], "takes_input", False))
    progress = Progress()
    machine.show_progress(vm, progress)
    observers = output.observe(vm, options)
    began = time.perf_counter()
    try:
        if options["recording"] is None:
            with store.kept(vm, options["store"]):
                vm.run()
        else:
            with store.kept(vm, options["store"], fresh=True):
                options["recording"].run(vm, output.command_line())
    finally:
        observers.finish(time.perf_counter() - began)
    return 0
