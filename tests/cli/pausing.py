"""A child process for tests: `m3jit chat` whose first answer waits, once it has shown a few tokens, until it is
stopped.

    python tests/cli/pausing.py TEMPLATE [job | record LOG]

job: as the foreground job of a parent that does what a shell does: when it is put to sleep it says what mode the
terminal has, and wakes it up.
"""
from __future__ import annotations

import os
import signal
import sys
import termios
import threading

from m3jit.api import conversation
from m3jit.cli import main

TOKENS = 12


class Waiting(conversation.Conversation):
    """The first answer goes on behind its twelfth token only when `stop` was called."""
    waits = True

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.stopped = threading.Event()

    def stop(self) -> None:
        super().stop()
        self.stopped.set()

    def _resume(self):
        for number, piece in enumerate(super()._resume(), 1):
            yield piece
            if number == TOKENS and self.waits:
                self.waits = False
                if not self.stopped.wait(120):
                    raise SystemExit("nobody stopped the answer")


def talk() -> int:
    conversation.Conversation = Waiting
    return main(["chat", "default", "--chat-template", sys.argv[1], "--temp", "0", "--threads", "1", "--max-tokens",
                 "30", *(["--record", sys.argv[3]] if sys.argv[2:3] == ["record"] else [])])


def shell() -> int:
    """The job's exit status.  Sleeping needs a parent in the same session: a process without one is not stopped."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.read(ready, 1)
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os._exit(talk())
    os.setpgid(child, child)
    os.tcsetpgrp(0, child)
    os.write(go, b"x")
    while True:
        status = os.waitpid(child, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        os.tcsetpgrp(0, os.getpgrp())
        print(f"asleep, echo {bool(termios.tcgetattr(0)[3] & termios.ECHO)}", flush=True)
        os.tcsetpgrp(0, child)
        os.kill(child, signal.SIGCONT)


sys.exit(shell() if sys.argv[2:] == ["job"] else talk())
