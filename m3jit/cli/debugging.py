"""`m3jit debug`: a run forward and backward, on a terminal or from a script."""
from __future__ import annotations

import sys
from typing import Any, Iterator

import click

from m3jit.cli.options import UsageError
from m3jit.cli.run import DEFAULT_PROMPT, run
from m3jit.cli.terminal import note
from m3jit.errors import Divergence, InternalError, UserError

PROMPT = "(m3jit) "


class Debugging:
    """What `m3jit run` does with a machine when it is looked at: nothing is printed by the program itself."""

    path = None                                        # no log is written
    takes_input = True                                 # standard input is the debugger's
    steering: Any = None
    finish: Any = None                           # as a `Recording` has them

    def __init__(self, commands: tuple[str, ...], adapter: bool = False):
        from m3jit.timetravel.history import History, Watcher
        self.commands, self.adapter, self.recorder = commands, adapter, Watcher(History(), live=True)

    def run(self, vm: Any, command: str = "") -> None:
        """Let someone go through the run of a machine that stands before its first instruction."""
        from m3jit.timetravel.debugger import Debugger
        quiet(vm)
        self.recorder.tape.steered = self.steering is not None
        debugger = Debugger(vm, self.recorder)
        try:
            converse(debugger, self.commands, self.adapter)
        finally:
            vm.close(complete=debugger.engine.ended == "the program has ended")


def quiet(vm: Any) -> None:
    """The program's standard output and error are shown by the debugger."""
    from m3jit.vm.streams import StandardSink

    class Quiet(StandardSink):
        """Takes what standard output takes, and writes nothing."""

        def write(self, item: Any, blocking: bool) -> bool:
            return True

        def flush(self) -> None:
            """Nothing is held back."""

        def close(self, complete: bool) -> None:
            """Nothing to close."""
    for name, said, attribute in (("OUTPUT", "standard output", "stdout"), ("ERROR", "standard error", "stderr")):
        vm.sinks[name] = Quiet(said, attribute)


def converse(debugger: Any, commands: tuple[str, ...], adapter: bool = False) -> None:
    """Execute the commands given, or those that are typed until the end.  adapter: an editor's requests instead."""
    if adapter:
        from m3jit.cli.debug_adapter import Adapter
        # A reader of its own: a thread may be in it when a signal ends the process, which closes sys.stdin.
        Adapter(debugger, open(sys.stdin.fileno(), "rb", closefd=False), sys.stdout.buffer).serve()
        return
    from m3jit.cli.debug_commands import Commands
    executor = Commands(debugger)
    interactive = not commands and sys.stdin.isatty()
    if interactive:
        print("`help` lists the commands; `back` goes back.")
    _show(executor.begin())
    for line in iter(commands) if commands else _typed(interactive):
        if not interactive:
            print(f"{PROMPT}{line}")
        try:
            _show(executor.run(line))
        except (Divergence, InternalError):
            raise
        except UserError as error:
            print(f"error: {error}")
        except KeyboardInterrupt:
            print("stopped")
        if executor.done:
            return


def _show(lines: Iterator[str]) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()


def _typed(interactive: bool) -> Iterator[str]:
    if interactive:
        try:
            import readline                            # noqa: F401  (input() has a history then)
        except ImportError:                            # a Python built without it: no history
            pass
    while True:
        try:
            yield input(PROMPT) if interactive else input()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()


def _debug(commands: tuple[str, ...], moved: tuple[str, ...], adapter: bool, any_version: bool, **options: Any) -> int:
    from m3jit.timetravel.debugger import is_log, open_log
    name = options["what"]
    if name is not None and is_log(name):
        given = [p.opts[0] for p in run.params if p.name not in ("what", "backend", "threads", "memory_limit")
                 and p.name in options and options[p.name] not in (None, (), False, p.default)]
        if given:
            raise UsageError(f"{', '.join(given)}: a log has the options of the run it recorded; only --backend, "
                             "--threads, --model and --any-version apply")
        from m3jit.cli.machine import limit_memory
        from m3jit.cli.what import LazyModels
        limit_memory(options["memory_limit"])
        debugger = open_log(name, LazyModels(), options["backend"], options["threads"], moved, any_version)
        if debugger.torn:
            note(f"{name}: the recording was cut off, or goes on: the log has no end")
        quiet(debugger.vm)
        converse(debugger, commands, adapter)
        return 0
    if moved:
        raise UsageError("--model: says where a log's model lies now; name a model as WHAT")
    if any_version:
        raise UsageError("--any-version: is of logs, and WHAT is none")
    return run.callback(recording=Debugging(commands, adapter), **_with_input(options))     # type: ignore[misc]


def _with_input(options: dict[str, Any]) -> dict[str, Any]:
    """Standard input is the debugger's: what the program reads is given by options."""
    from m3jit.cli.what import find
    if "-" in options["inputs"]:
        raise UsageError("--input -: standard input is where the debugger's commands come from; give --prompt or a "
                         "file")
    found = find(options["what"])
    if found.kind == "model" and not options["prompts"] and not options["inputs"]:
        if not found.is_default:
            raise UsageError(f"{found.reference}: give the prompt with --prompt or --input")
        options["prompts"] = (DEFAULT_PROMPT,)
    return options


debug = click.Command(
    "debug", callback=_debug,
    params=[*run.params,
            click.Option(["--command", "-x", "commands"], multiple=True, metavar="COMMAND",
                         help="Execute a command instead of those typed. Repeated: in order."),
            click.Option(["--dap", "adapter"], is_flag=True,
                         help="Speak the Debug Adapter Protocol on standard input and output, for editors."),
            click.Option(["--model", "moved"], multiple=True, metavar="FILE",
                         help="A log's model that lies elsewhere now."),
            click.Option(["--any-version"], is_flag=True, help="Also a log that another version of m3jit wrote.")],
    epilog="`help` in the debugger lists its commands. Standard input that is no terminal is a script of commands.",
    help="""Go through a run forward and backward: of a LOG that `m3jit record` wrote, or of WHAT, which is run with the
options of `m3jit run`. Every step back is exact: the machine goes back to a state that was put aside and runs from
there, with what came from outside answered from what was noted.""")
