"""`m3jit replay`."""
from __future__ import annotations

from typing import Any

import click

from m3jit.cli.options import Size, UsageError, Whole
from m3jit.cli.terminal import note


def _replay_talk(log: str, moved: tuple[str, ...], quiet: bool, **options: Any) -> int:
    """Repeat a recorded session: what was said to it on standard error, what it answered on standard output."""
    from m3jit.api.replayed import TalkReplay
    from m3jit.cli.dialogue import Dialogue
    from m3jit.cli.what import LazyModels
    from m3jit.timetravel.history import call_text

    def heard(name: str, arguments: tuple, named: dict[str, Any]) -> None:
        if name == "say":
            note(f"> {arguments[0]}")
        elif name not in ("next", "leave", "show", "close"):
            given = call_text(arguments, named)
            note(f"[{name}{': ' if given else ''}{given}]")
    again = TalkReplay(log, LazyModels().models, **options, moved=moved,
                       **({} if quiet else {"write": Dialogue._write, "heard": heard}))
    report = again.run()
    if report.error is not None and not report.torn:
        note(f"the session ended with: {report.error}")
    note(_agrees(log, report, " or a session of it was never closed"))
    if report.unclosed:
        note(f"{report.unclosed} of its sessions and forks were never closed: the log ends where their process ended")
    return 0


def _agrees(log: str, report: Any, otherwise: str = "") -> str:
    """How it compares.  otherwise: another reason why a log may have no end."""
    cut = f"agrees as far as it goes; the recording was cut off,{otherwise}" if otherwise else \
        "agrees as far as it goes; the recording was cut off"
    return (f"{log}: {cut if report.torn else 'agrees'}: "
            f"{report.events} events, {report.outputs} outputs and states compared, {report.instructions} instructions")


@click.command(epilog="Standard output gets what the recorded run wrote there.")
@click.argument("log")
@click.argument("program", required=False)
@click.option("--backend", metavar="NAME", default="auto", show_default=True, help="As of `m3jit run`.")
@click.option("--threads", "-t", type=Whole(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--model", "moved", multiple=True, metavar="FILE",
              help="A model that lies elsewhere now; it is known by its content. Repeated: several.")
@click.option("--files", metavar="FOLDER",
              help="Write the files that the run wrote to this folder [they are not kept].")
@click.option("--any-version", is_flag=True, help="Also logs that another version of m3jit wrote.")
@click.option("--quiet", "-q", is_flag=True, help="Compare only; write nothing on standard output.")
@click.option("--memory-limit", type=Size(), metavar="SIZE", help="Most memory [three quarters of what is free].")
def replay(log: str, program: str | None, moved: tuple[str, ...], quiet: bool, memory_limit: int | None,
           **options: Any) -> int:
    """Repeat the run in LOG and compare every output, and the state now and then, with what was recorded.

    The run may use another backend and another number of threads. Exit code 7: it did something else than the log says;
    where, and what was expected, is said. PROGRAM: refuse the log unless it is of this program.
    """
    from m3jit.cli import steered, what
    from m3jit.cli.debugging import quiet as hushed
    from m3jit.cli.machine import limit_memory
    from m3jit.cli.run import check_files
    from m3jit.timetravel.log_file import LogReader
    from m3jit.timetravel.replay import Replay
    limit_memory(memory_limit)
    if "talk" in LogReader(log).head:
        if program is not None or options.pop("files") is not None:
            raise UsageError(f"{log}: is a log of a session; it takes no PROGRAM, and wrote no --files")
        return _replay_talk(log, moved, quiet, **options)
    if options["files"] is not None:
        check_files(options["files"])
    given = what.open_program(what.find(program)) if program is not None else None
    again = Replay(log, what.LazyModels(), options["backend"], options["threads"], given, options["files"],
                   options["any_version"], moved, echo=not quiet)
    if quiet:
        hushed(again.vm)
    steered.again(again, again.models, quiet)
    report = again.run()
    if report.error is not None and not report.torn:
        note(f"the run ended with: {report.error}")
    note(_agrees(log, report))
    return 0
