"""`m3jit chat`."""
from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Callable, Iterable, Iterator

import click

from m3jit.cli import exit_code, explained
from m3jit.cli.dialogue import MAIN, Dialogue
from m3jit.cli.interrupts import Interrupts
from m3jit.cli.options import Name, Size, Whole
from m3jit.cli.sampling import sampling_options
from m3jit.cli.terminal import keep_inputs, note
from m3jit.errors import UserError

NO_END = "(Ctrl-D or /exit ends the conversation)"


@click.command(epilog="Without a terminal, each line of standard input is a message. Lines that begin with / are "
                      "commands; /help lists them. A line that cannot be obeyed is said on standard error; those "
                      "behind it are taken, and the exit code is 1. On a terminal Esc or Ctrl-C pauses an answer: the "
                      "arrow keys pick a place, what is typed goes there, and Enter lets the answer go on from it.")
@click.argument("model")
@sampling_options
@click.option("--seed", type=Whole(-2 ** 63, 2 ** 64 - 1), metavar="N",
              help="Seed of the random stream [the same each time].")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End an answer before this text. Repeated: any.")
@click.option("--context", type=Whole(2), metavar="N", help="Tokens the conversation may have [the model's].")
@click.option("--chat-template", metavar="FILE", help="A jinja2 template in place of the model's.")
@click.option("--session", "folder", type=Name(), metavar="FOLDER",
              help="Keep the conversation in this folder, and go on with the one that is there.")
@click.option("--record", "log", type=Name(), metavar="LOG",
              help="Record all that is said and done in a new file; m3jit replay LOG proves it, m3jit debug LOG goes "
              "through it.")
@click.option("--threads", "-t", type=Whole(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--backend", metavar="NAME", default="auto", show_default=True, help="As m3jit run.")
@click.option("--memory-limit", type=Size(), metavar="SIZE", help="Most memory [three quarters of what is free].")
def chat(model: str, sampling: dict[str, Any], seed: int | None, system: str | None, stops: tuple[str, ...],
         context: int | None, chat_template: str | None, folder: str | None, log: str | None, threads: int | None,
         backend: str, memory_limit: int | None) -> int:
    """Talk with MODEL (a file, a folder or a model's name); an answer goes on from the state of the conversation."""
    from m3jit.api.generation import LanguageModel
    from m3jit.cli.machine import limit_memory, show_progress
    from m3jit.cli.sampling import model_options, warn_of_context
    from m3jit.cli.terminal import Progress
    from m3jit.cli.what import find
    from m3jit.models.provider import Models
    limit_memory(memory_limit)
    what = find(model)
    if what.kind != "model":
        raise UserError(f"{model}: is no model file; `m3jit run` runs programs")
    options = model_options(sampling)
    keep_inputs(log, what.reference, chat_template or "")
    language = LanguageModel(what.reference, Models(), backend, threads, chat_template=template_text(chat_template),
                             options=options)
    warn_of_context(context, language, what.reference)
    with contextlib.ExitStack() as ends:
        store = ends.enter_context(_kept(folder, log)) if folder is not None else None
        talk = _made(log)(language, system, seed=seed, stop=stops, context=context,
                          max_tokens=sampling.get("max_tokens"), temperature=options.temperature, top_k=options.top_k,
                          top_p=options.top_p, min_p=options.min_p, repeat_penalty=options.repeat_penalty)
        ends.callback(talk.close)
        show_progress(talk.machine, Progress())
        return _hold(talk, system, store)


def _hold(talk: Any, system: str | None, store: Any) -> int:
    """Hold a conversation; the exit code."""
    terminal = sys.stdin.isatty()
    dialogue = Dialogue(talk, terminal, store=store)
    if terminal:
        pauses = "Esc or Ctrl-C pauses an answer and lets you correct it" if dialogue.single else \
            "Ctrl-C stops an answer, /edit OLD => NEW corrects it (keys cannot be read one by one here)"
        note(f"{talk.model.name}: a context of {talk.context} tokens. /help lists commands, {pauses}, Ctrl-D ends.")
    try:
        dialogue.begin()
        if system is not None and talk.system != system:
            talk.system = system
        with dialogue.interrupts.handled() if terminal else contextlib.nullcontext():
            return take_lines(dialogue, typed_lines(dialogue.interrupts) if terminal else piped_lines())
    finally:
        dialogue.close()


@contextlib.contextmanager
def _kept(folder: str, log: str | None) -> Iterator[Any]:
    """The store of --session.  UserError: it is one of runs, or has a conversation, and --record is given too."""
    from m3jit.cli.store import check_content
    from m3jit.durable import Store
    with Store.open(folder) as store:
        check_content(store, "conversations")
        if log is not None and MAIN in store.names():  # before there is a log, which would be left
            raise UserError(f"--record: a recorded conversation begins with nothing, since its log has no states of "
                            f"others, and {folder} has one; leave --record out, or give --session a new folder")
        yield store


def take_lines(dialogue: Dialogue, lines: Iterable[str]) -> int:
    """Take lines until one ends the conversation; the exit code."""
    code = 0
    for number, line in enumerate(lines, 1):
        try:
            if not dialogue.take(line):
                break
        except BrokenPipeError:                        # nobody reads the answers
            raise
        except (UserError, OSError) as error:          # without a terminal; the lines behind it are taken too
            note(f"error: line {number}: {explained(error)}")
            code = code or exit_code(error)
    return code


def _made(log: str | None) -> Any:
    """What makes a conversation; log: recorded there."""
    if log is None:
        from m3jit.api.conversation import Conversation
        return Conversation
    from m3jit.api.recorded import RecordedConversation
    return functools.partial(RecordedConversation, log, shown=True)


def template_text(path: str | None) -> str | None:
    """The template in the file of --chat-template; None when the option is not given.  OSError; UserError: it is empty,
    or no UTF-8."""
    if path is None:
        return None
    from m3jit.models.chat_template import TemplateFile
    return TemplateFile.read(path)


def typed_lines(interrupts: Interrupts, read: Callable[[str], str] = input) -> Iterator[str]:
    """Lines of a terminal, until Ctrl-D.  Ctrl-C that came for none of them, or behind an answer, is said to end
    nothing."""
    with contextlib.suppress(ImportError):
        import readline                                # gives input() its line editing
        if "libedit" not in (readline.__doc__ or ""):  # Esc alone begins no key there: what follows it is typed
            for line in ("$if mode=emacs", r'"\e": ""', "$endif"):
                readline.parse_and_bind(line)
    while True:
        if interrupts.presses:
            interrupts.presses = 0
            note(NO_END)
        try:
            if not sys.stdout.isatty():
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = interrupts.line(read, "> " if sys.stdout.isatty() else "")
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note(f"\n{NO_END}")
            continue
        yield line


def piped_lines() -> Iterator[str]:
    """Lines of standard input, as UTF-8."""
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace").rstrip("\r\n")
