"""What the exit codes of `m3jit` mean."""
from __future__ import annotations

EXIT_CODES = (
    (0, "the command did what was asked"),
    (1, "an error of a file, a model, a download or the machine m3jit runs on"),
    (2, "wrong usage, or a source or program file with errors"),
    (3, "the program trapped"),
    (4, "a limit was reached: --max-steps, --timeout, memory"),
    (5, "deadlock: every context of the program waits"),
    (6, "a backend or this machine cannot do what was asked"),
    (7, "a replayed run did not do what its log says"),
    (70, "a bug in m3jit"),
    (130, "interrupted (Ctrl-C)"),
    (141, "the reader of the output went away (a closed pipe)"),
    (143, "terminated (SIGTERM)"),
)
