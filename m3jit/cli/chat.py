"""`m3jit chat`."""
from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from typing import Any, Callable, Iterator

import click

from m3jit.cli.options import Size
from m3jit.cli.sampling import sampling_options
from m3jit.cli.terminal import note, write_file
from m3jit.errors import UserError, brief

HELP = """/undo          take the last message and its answer back
/reset         forget all messages
/system TEXT   another system message, for the messages so far too; without TEXT: none
/save FILE     write the messages as JSON
/context       how much of the context is taken
/exit          end (as Ctrl-D does)
//...          a message that begins with /"""
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")


@click.command(epilog="Without a terminal, each line of standard input is a message. Lines that begin with / are "
                      "commands; /help lists them. Ctrl-C stops an answer.")
@click.argument("model")
@sampling_options
@click.option("--seed", type=click.IntRange(-2 ** 63, 2 ** 64 - 1), metavar="N",
              help="Seed of the random stream [the same each time].")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End an answer before this text. Repeated: any.")
@click.option("--context", type=click.IntRange(2), metavar="N", help="Tokens the conversation may have [the model's].")
@click.option("--chat-template", metavar="FILE", help="A jinja2 template in place of the model's.")
@click.option("--threads", "-t", type=click.IntRange(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--backend", metavar="NAME", default="auto", show_default=True, help="As m3jit run.")
@click.option("--memory-limit", type=Size(), metavar="SIZE", help="Most memory [three quarters of what is free].")
def chat(model: str, sampling: dict[str, Any], seed: int | None, system: str | None, stops: tuple[str, ...],
         context: int | None, chat_template: str | None, threads: int | None, backend: str, memory_limit: int | None) -> int:
    """Talk with MODEL (a file, a folder or a model's name); an answer goes on from the state of the conversation."""
    from m3jit.api.conversation import Conversation
    from m3jit.cli.machine import limit_memory, show_progress
    from m3jit.cli.sampling import model_options
    from m3jit.cli.terminal import Progress
    from m3jit.cli.what import find
    limit_memory(memory_limit)
    what = find(model)
    if what.kind != "model":
        raise UserError(f"{model}: is no model file; `m3jit run` runs programs")
    options = model_options(sampling)
    talk = Conversation(what.reference, system, options=options, backend=backend, threads=threads, seed=seed,
                        chat_template=template_text(chat_template), stop=stops,
                        context=context, max_tokens=sampling.get("max_tokens"), temperature=options.temperature,
                        top_k=options.top_k, top_p=options.top_p, min_p=options.min_p,
                        repeat_penalty=options.repeat_penalty)
    show_progress(talk.machine, Progress())
    terminal = sys.stdin.isatty()
    if terminal:
        note(f"{talk.model.name}: a context of {talk.context} tokens. /help lists commands, Ctrl-C stops an answer, "
             "Ctrl-D ends.")
    session = Session(talk, terminal)
    for line in typed_lines() if terminal else piped_lines():
        if not session.take(line):
            break
    talk.close()
    return 0


def template_text(path: str | None) -> str | None:
    """The template in the file of --chat-template; None when the option is not given.  OSError; UserError: no UTF-8."""
    if path is None:
        return None
    with open(path, "rb") as file:
        raw = file.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; --chat-template takes a jinja2 text") from None


class Session:
    """Takes lines, writes answers to standard output and everything else to standard error.

    terminal: somebody is there to read messages about a failed turn and to go on; otherwise it is raised."""

    def __init__(self, talk: Any, terminal: bool):
        self.talk, self.terminal = talk, terminal
        self.commands: dict[str, Callable[[str], bool | None]] = {
            "help": lambda _: note(HELP), "exit": lambda _: False, "quit": lambda _: False, "reset": self._reset,
            "undo": self._undo, "system": self._system, "save": self._save, "context": self._context}

    def take(self, line: str) -> bool:
        """Answer a message or obey a command; False ends the conversation.  UserError, without a terminal."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._obey(line)
            text = line[1:] if line.startswith("//") else line
            if text.strip():
                self._answer(text)
        except (UserError, OSError) as error:
            if not self.terminal:
                raise
            note(f"error: {error}")
        return True

    def _obey(self, line: str) -> bool:
        word, _, rest = line[1:].partition(" ")
        command = self.commands.get(word)
        if command is None:
            raise UserError(f"no command /{brief(word)}; there are {', '.join('/' + name for name in self.commands)} "
                            "(a message that begins with / is written with //)")
        return command(rest.strip()) is not False

    def _answer(self, text: str) -> None:
        last = "\n"
        with self._stoppable():
            for piece in self.talk.say(text):
                last = piece
                sys.stdout.write(_CONTROLS.sub("\ufffd", piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
        if not last.endswith("\n") or not self.terminal:
            sys.stdout.write("\n")
            sys.stdout.flush()
        reason = self.talk.finish_reason
        if reason == "context":
            note(f"[the context of {self.talk.context} tokens is full: the answer ends here; /undo or /reset makes room]")
        elif reason == "cancelled":
            note("[stopped]")
        elif reason == "length" and self.terminal:
            note("[as many tokens as --max-tokens allows]")

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """While inside, Ctrl-C stops the answer; a second one ends the command."""
        if not self.terminal:
            yield
            return
        pressed = 0

        def stop(*_: Any) -> None:
            nonlocal pressed
            pressed += 1
            if pressed > 1:
                raise KeyboardInterrupt
            self.talk.stop()
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # Commands.

    def _reset(self, _: str) -> None:
        self.talk.reset()

    def _undo(self, _: str) -> None:
        if not self.talk.undo():
            note("nothing has been said")

    def _system(self, text: str) -> None:
        self.talk.system = text or None

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save: give it the name of a file")
        write_file(name, (json.dumps(self.talk.transcript(), ensure_ascii=False, indent=1) + "\n").encode())

    def _context(self, _: str) -> None:
        note(f"{self.talk.used} of {self.talk.context} tokens")


def typed_lines() -> Iterator[str]:
    """Lines of a terminal, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() its line editing)
    while True:
        try:
            if not sys.stdout.isatty():
                sys.stderr.write("> ")
                sys.stderr.flush()
            yield input("> " if sys.stdout.isatty() else "")
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /exit ends the conversation)")


def piped_lines() -> Iterator[str]:
    """Lines of standard input, as UTF-8."""
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace").rstrip("\r\n")
