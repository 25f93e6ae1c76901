"""`m3jit record`: `m3jit run` with a log."""
from __future__ import annotations

from typing import Any

import click

from m3jit.cli.options import Name
from m3jit.cli.run import run


def _record(log: str, **options: Any) -> int:
    from m3jit.timetravel.record import Recording
    return run.callback(recording=Recording(log), **options)       # type: ignore[misc]


record = click.Command(
    "record", callback=_record,
    params=[*run.params, click.Option(["--output", "-o", "log"], required=True, type=Name(), metavar="LOG",
                                      help="The log, a new file.")],
    epilog="`m3jit replay LOG` repeats the run; `m3jit debug LOG` looks at it forward and backward.",
    help="""Run WHAT as `m3jit run` does, with the same options, and write everything it gets from outside to a log:
input, clocks, the seed, interrupts; the program itself; and what left it, for comparison. Models are known by their
content.

A recording that is killed can be replayed as far as it came.""")
