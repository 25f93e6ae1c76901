"""Ctrl-C in `m3jit chat` between Enter and the next prompt, at chosen moments; signals that come in a finaliser."""
from __future__ import annotations

import _thread
import itertools
import os
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from m3jit.api.conversation import Conversation
from m3jit.api.generation import load_model
from m3jit.cli import chat, dialogue, interrupts, keys
from m3jit.cli.chat import NO_END, take_lines, typed_lines
from m3jit.cli.dialogue import Dialogue
from m3jit.cli.interrupts import Interrupts, raised_again
from tests.cli.command import finish, start

TEMPLATE = ("{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}")
TAKEN_BACK = "[stopped before the answer began: the message is taken back]"
LONG = 120                         # seconds until a test gives up


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def typed(line: str, *lines: str):
    """A function that reads lines; the first comes with Ctrl-C: in C, as `input`, so that no handler runs before it has
    returned."""
    pressed = map({None: line}.__getitem__, map(_thread.interrupt_main, [signal.SIGINT]))
    return partial(next, itertools.chain(pressed, lines))              # next(lines, prompt)


def conversed(made: Dialogue, read) -> int:
    """What `m3jit chat` does on a terminal."""
    with made.interrupts.handled():
        return take_lines(made, typed_lines(made.interrupts, read))


def talk(pieces):
    """A conversation whose answers are `pieces`, as `Conversation` gives them: a stop counts from `say` on."""
    def say(text):
        made.stopped = False
        return answer(text)

    def answer(text):
        for piece in pieces:
            if made.stopped:
                made.finish_reason = "cancelled"
                return
            yield piece
        made.finish_reason = "stop"

    def stop():
        made.stopped = True
    made = SimpleNamespace(stopped=False, messages=[], finish_reason=None, context=99, used=7, say=say, stop=stop,
                           transcript=list, close=lambda: None)
    return made


# Behind Enter.

def test_ctrl_c_behind_enter_takes_the_message_back(capfd):
    """With a model: the interrupt is there before the answer's first instruction."""
    with_model = Conversation(load_model("default", threads=1), chat_template=TEMPLATE, temperature=0, max_tokens=8)
    made = Dialogue(with_model, True, single=False)
    assert conversed(made, typed("Hello there", "/context", "Hello there", "/exit")) == 0
    out, err = capfd.readouterr()
    assert err.count(TAKEN_BACK) == 1 and "0 of 512 tokens" in err and NO_END not in err
    assert len(with_model.messages) == 2 and with_model.messages[1]["content"] in out
    made.close()


def test_ctrl_c_behind_a_command_is_said_to_end_nothing(capfd):
    assert conversed(Dialogue(talk(["a\n"]), True, single=False), typed("/context", "Hello", "/exit")) == 0
    out, err = capfd.readouterr()
    assert err.count(NO_END) == 1 and TAKEN_BACK not in err and out.endswith("a\n")


def test_ctrl_c_at_the_prompt(capfd):
    lines = iter([None, "Hello", "/exit"])

    def read(prompt):
        line = next(lines)
        if line is None:
            press()
            assert threading.Event().wait(LONG), "nothing was raised"
        return line
    assert conversed(Dialogue(talk(["a\n"]), True, single=False), read) == 0
    out, err = capfd.readouterr()
    assert err.count(NO_END) == 1 and out.endswith("a\n")


def test_two_of_them_end_the_command(capfd):
    def say(text):
        press()
        press()
    made = talk([])
    made.say = say
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        conversed(Dialogue(made, True, single=False), lambda _: "Hello")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_anywhere_is_answered_once(capfd):
    """At each bytecode of the loop from the first prompt to /exit: nothing ends, and one thing is said of it."""
    watched = {module.__file__ for module in (chat, dialogue, interrupts)}
    before, answers = signal.getsignal(signal.SIGINT), set()
    for at in itertools.count(1):
        left, lines, read, late = [at], iter(["Hello", "/context", "/exit"]), [], []

        def tracer(frame, event, _):
            if frame.f_code.co_filename not in watched:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and signal.getsignal(signal.SIGINT) == made.interrupts._pressed:
                left[0] -= 1
                if left[0] == 0:
                    late.append(read[-1:] == ["/exit"] or made.interrupts._stop is not None)
                    press()
            return tracer

        def typed_line(_):
            read.append(next(lines))
            return read[-1]
        made = Dialogue(talk(["one ", "two\n"]), True, single=False)
        sys.settrace(tracer)
        try:
            code = conversed(made, typed_line)
        finally:
            sys.settrace(None)
        assert code == 0 and signal.getsignal(signal.SIGINT) is before
        err = capfd.readouterr().err
        found = [words for words in (NO_END, TAKEN_BACK, "[stopped]") if words in err]
        if left[0] > 0:
            break                                      # it never came: all places have been
        assert len(found) == 1 or not found and late[0]      # behind the answer's last piece, or the last prompt
        answers.update(found[:1])
    assert answers == {NO_END, TAKEN_BACK, "[stopped]"} and at > 300


# Keys.

@pytest.fixture
def editor():
    """Keys of a pipe, what is typed into it, and Ctrl-C as a key."""
    made, (end, begin) = Interrupts(), os.pipe()
    yield SimpleNamespace(interrupts=made, reader=keys.KeyReader(end, interrupted=made.file),
                          type=lambda text: os.write(begin, text))
    made.close()
    os.close(end)
    os.close(begin)


def test_ctrl_c_is_a_key(editor):
    with editor.interrupts.taking(), editor.interrupts.as_keys():
        editor.type(b"ab")
        assert editor.reader.key() == "a"
        press()
        assert editor.reader.key() == keys.INTERRUPT and editor.reader.key() == "b"
    assert editor.interrupts.presses == 0


def test_ctrl_c_behind_the_editors_enter_stops_the_answer(editor):
    stopped = []
    with editor.interrupts.taking():
        with editor.interrupts.as_keys():
            editor.type(b"\r")
            assert editor.reader.key() == keys.ENTER
            press()
        assert editor.interrupts.presses == 1
        with editor.interrupts.answering(lambda: stopped.append(True)):
            assert stopped
        press()                                        # behind the answer, before the editor
        with editor.interrupts.as_keys():
            assert editor.reader.key() == keys.INTERRUPT


def test_ctrl_c_in_a_paste_ends_it(editor):
    with editor.interrupts.taking(), editor.interrupts.as_keys():
        editor.type(b"\x1b[200~a\r")
        assert [editor.reader.key() for _ in range(3)] == ["", "a", "\n"]
        press()
        editor.type(b"\r")
        assert [editor.reader.key() for _ in range(2)] == [keys.INTERRUPT, keys.ENTER]


# In a finaliser.

class Pressing:
    """Presses Ctrl-C as it goes."""

    def __del__(self) -> None:
        press()
        for _ in range(100):                           # the handler has run in here
            pass


def test_ctrl_c_in_a_finaliser_is_not_lost(capfd):
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), raised_again():
        Pressing()
        assert threading.Event().wait(LONG), "it was lost"
    assert sys.unraisablehook is before and capfd.readouterr().err == ""


def test_ctrl_c_in_a_finaliser_leaves_the_prompt():
    """It comes again while the line is still waited for; the next answer is not stopped for it."""
    def read(prompt: str) -> str:
        Pressing()
        threading.Event().wait(LONG)
        return "it was lost"
    made, stopped = Interrupts(), []
    with raised_again(), made.handled():
        with pytest.raises(KeyboardInterrupt):
            made.line(read, "> ")
        assert made.presses == 0 and made.line(lambda prompt: "Hello", "> ") == "Hello"
        with made.taking(), made.answering(lambda: stopped.append(True)):
            pass
    assert not stopped


def test_other_errors_of_a_finaliser_are_said(monkeypatch):
    class Failing:
        def __del__(self) -> None:
            raise ValueError("that failed")
    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: said.append(str(dropped.exc_value)))
    with raised_again():
        Failing()
    assert said == ["that failed"]


def test_ctrl_c_in_a_finaliser_ends_a_command():
    code = ("import os, signal, sys\nfrom m3jit.cli import commands, main\n"
            "class Pressing:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGINT)\n"
            "        for _ in range(100): pass\n"
            "def run(*_, **__):\n    import threading\n    Pressing()\n    threading.Event().wait(120)\n"
            "commands.group.invoke = run\nsys.exit(main(['ops']))")
    got = finish(start(command=[sys.executable, "-c", code]))
    assert got.code == 130 and got.err == "interrupted\n", got
