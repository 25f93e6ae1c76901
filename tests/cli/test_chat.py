"""`m3jit chat` and `m3jit run --chat`."""
from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest

from m3jit.api.conversation import Conversation
from m3jit.api.generation import load_model
from m3jit.cli.dialogue import Dialogue
from m3jit.cli.run import chat_tokens
from m3jit.errors import UserError
from m3jit.models.provider import DEFAULT_MODEL, SourceModel
from tests.cli.command import EXAMPLES, call, process, source

TEMPLATE = ("{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}")


# One message.

@pytest.fixture
def model():
    found = SourceModel(DEFAULT_MODEL)
    found.tokenizer.chat_template = TEMPLATE
    return found


def test_a_filled_template(model):
    eos, t = model.tokenizer.eos, model.tokenizer
    ids = chat_tokens(model, "Where is she?", "Be brief.").tolist()
    assert t.decode(ids, special=True) == ("<|endoftext|>system: Be brief.\n<|endoftext|>user: Where is she?\n"
                                           "<|endoftext|>assistant:")
    assert ids.count(eos) == 3


def test_a_template_may_refuse_or_fail(model):
    for template, word in (("{{ raise_exception('no system here') }}", "no system here"), ("{{ 1 / 0 }}", "fails"),
                           ("{% for %}", "line 1"), ("{{ messages.clear() }}", "fails")):
        model.tokenizer.chat_template = template
        with pytest.raises(UserError, match=word):
            chat_tokens(model, "x", None)


def test_models_without_a_template(capfd):
    for command in (["run", "--chat", "-p", "x"], ["chat", "default"]):
        got = call(capfd, *command)
        assert got.code == 1 and got.out == "" and "has no chat template" in got.err
    assert "add --chat" in call(capfd, "run", "--system", "x", "-p", "x").err


# A conversation through pipes.

@pytest.fixture
def template(tmp_path):
    return source(tmp_path, TEMPLATE, "plain.jinja")


def chat(template, said: str, *more):
    return process("chat", "default", "--chat-template", template, "--temp", "0", "-n", "10", "--threads", "1", *more,
                   stdin=said.encode())


def test_a_line_is_a_message(template, tmp_path):
    got = chat(template, f"Hello there\n\n//slash é\n/save {tmp_path / 'talk.json'}\n/exit\nnever said\n", "--system",
               "Hm.")
    assert got.code == 0 and got.err == ""
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == ["Hm.", "Hello there", "/slash é"]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert [text in got.out for text in answers] == [True, True] and all(answers)
    assert got.out.strip().endswith(answers[1])


def test_a_mistaken_line_of_a_pipe_does_not_end_the_conversation(template):
    plain = chat(template, "Hello there\n")
    got = chat(template, "/edit a => b\nHello there\n/magic\n")
    assert got.code == 1 and got.out == plain.out
    lines = got.err.splitlines()
    assert lines[0] == "error: line 1: /edit: nothing has been said yet" and len(lines) == 2
    assert lines[1].startswith("error: line 3: no command /magic; there are /help")


@pytest.fixture(scope="module")
def language():
    return load_model("default", threads=1)


@pytest.fixture
def typed(language, capfd):
    """Lines to a new conversation: what it writes to standard output and error."""
    def type_lines(*lines: str, system: str | None = None):
        session = Dialogue(Conversation(language, system, chat_template=TEMPLATE, temperature=0, max_tokens=10), False)
        capfd.readouterr()
        for line in lines:
            session.take(line)
        return capfd.readouterr()
    return type_lines


def test_commands(typed):
    first, plain = typed("Hello").out, typed("Hello", "And you?").out
    assert plain.startswith(first) and len(plain) > len(first)
    undone = typed("Hello", "something else", "/undo", "And you?").out
    assert undone.startswith(first) and undone.endswith(plain[len(first):])
    assert typed("x", "/reset", "Hello", "And you?").out.endswith(plain)
    got = typed("/context", "Hello", "/context", "/undo", "/undo", "/help").err
    assert got.startswith("0 of 512 tokens\n") and "nothing has been said" in got and "/save FILE" in got
    plain = typed("Hello", "/context")
    other = typed("/system Shout.", "Hello", "/context")
    assert other == typed("Hello", "/context", system="Shout.") and other.err != plain.err
    assert typed("/system Shout.", "/system", "Hello", "/context") == plain


@pytest.mark.parametrize("line, words", [
    ("/fork " + "é" * 101, "/fork: a name has 200 bytes at most, and .* has 202"),
    ("/magic", "no command /magic; there are /help"), ("/save", "/save: give it the name of a file"),
    ("x " * 600, "the context holds 512; take messages back"), ("/save no/such/folder/x", "No such file")])
def test_what_goes_wrong_in_a_pipe_is_raised(typed, line, words):
    with pytest.raises((UserError, OSError), match=words):
        typed(line)


def test_a_full_context_is_said(template):
    got = process("chat", "default", "--chat-template", template, "--context", "40", "--threads", "1",
                  stdin=b"Hello there\nAnd you?\n")
    assert got.code == 1 and "[the context of 40 tokens is full: the answer ends here; /undo or /reset" in got.err
    assert "the context holds 40" in got.err and got.out.strip()


def test_a_context_larger_than_the_models_is_warned_of(template):
    plain = chat(template, "Hello there\n/context\n")
    got = chat(template, "Hello there\n/context\n", "--context", "9999")
    said = "warning: context: 9999 tokens are asked for, default has 512, which it gets\n"
    assert got.code == 0 and got.out == plain.out and said not in plain.err and got.err == said + plain.err
    assert "of 512 tokens" in got.err and "warning" not in chat(template, "Hello there\n", "--context", "512").err


def test_wrong_usage(capfd, template, tmp_path):
    for arguments, code, words in ((["default", "--context", "1"], 2, "--context"), ([], 2, "MODEL"),
                                   (["default", "--chat-template", tmp_path / "none"], 1, "none: No such"),
                                   (["default", "--chat-template", DEFAULT_MODEL], 1, "is not UTF-8; --chat-template"),
                                   ([EXAMPLES / "hello.m3asm"], 1, "is no model file")):
        got = call(capfd, "chat", *arguments)
        assert got.code == code and got.out == "" and words in got.err, got


# A terminal.

def talk(pieces, reason="stop"):
    """A conversation whose answer is `pieces`; functions among them are called."""
    def say(text):
        made.said.append(text)
        for piece in pieces:
            if callable(piece):
                piece()
                if made.stopped:
                    made.finish_reason = "cancelled"
                    return
            else:
                yield piece
    made = SimpleNamespace(said=[], stopped=False, messages=[], finish_reason=reason, context=99, used=7, say=say,
                           transcript=list)

    def stop():
        made.stopped = True
    made.stop = stop
    return made


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(capfd):
    before = signal.getsignal(signal.SIGINT)
    made = talk(["one ", press, "two"])
    session = Dialogue(made, terminal=True)
    assert session.take("Hello") and made.stopped and signal.getsignal(signal.SIGINT) is before
    out, err = capfd.readouterr()
    assert out == "one \n" and err == "[stopped]\n"
    made.stopped = False
    assert session.take("more") and made.said == ["Hello", "more"]


def test_an_answer_stopped_before_it_began(capfd):
    Dialogue(talk([press, "one"]), terminal=True).take("Hello")
    assert capfd.readouterr().err == "[stopped before the answer began: the message is taken back]\n"


def test_a_second_ctrl_c_ends_the_command(capfd):
    def twice():
        press()
        press()
    with pytest.raises(KeyboardInterrupt):
        Dialogue(talk(["one ", twice]), terminal=True).take("Hello")


def test_errors_on_a_terminal_do_not_end_the_conversation(capfd):
    def fail():
        raise UserError("that did not fit")
    session = Dialogue(talk([fail]), terminal=True)
    assert session.take("Hello") and session.take("/magic") and session.take("/save /no/such/folder/x")
    err = capfd.readouterr().err
    assert "error: that did not fit" in err and "no command /magic" in err and "/no/such/folder/x" in err
    assert not session.take("/exit") and not session.take("/quit")


def test_notes_about_the_end_of_an_answer(capfd):
    for reason, words in (("length", "--max-tokens"), ("context", "the context of 99 tokens is full"), ("stop", "")):
        Dialogue(talk(["a\n"], reason), terminal=True).take("Hello")
        out, err = capfd.readouterr()
        assert out == "a\n" and (words in err if words else err == "")


def test_a_server_wants_a_template_that_is_text_too(capfd):
    pytest.importorskip("starlette")
    got = call(capfd, "serve", "default", "--port", "0", "--chat-template", DEFAULT_MODEL)
    assert got.code == 1 and "is not UTF-8; --chat-template takes a jinja2 text" in got.err


BROKEN = [("a\n{% magic %}", "line 2: Encountered unknown tag 'magic'"),
          ("\n\n{{ x | rot13 }}", "line 3: No filter named 'rot13'"),
          ("{{ 'a' is magic }}", "line 1: No test named 'magic'"), ("a\n{% if x %}", "line 2: Unexpected end")]


@pytest.mark.parametrize("command", ["chat", "serve"])
@pytest.mark.parametrize("text, words", BROKEN)
def test_a_template_that_cannot_be_read_ends_the_command_at_its_start(capfd, tmp_path, monkeypatch, command, text,
                                                                      words):
    """With its file and line; nothing is served, listened on or written."""
    if command == "serve":
        pytest.importorskip("starlette", reason="the extra `serve` is not installed")
        pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
        from m3jit.serve.server import Server
        monkeypatch.setattr(Server, "run", lambda self: pytest.fail("it serves"))
    path = source(tmp_path, text, "broken.jinja")
    more = ("--port", "0") if command == "serve" else ("--session", tmp_path / "talk", "--record", tmp_path / "log")
    got = call(capfd, command, "default", "--chat-template", path, *more)
    assert got.code == 1 and got.out == "" and f"error: {path}: chat template, {words}" in got.err
    assert "expected jinja2 with loop controls and generation blocks" in got.err and "serving" not in got.err
    assert not (tmp_path / "talk").exists()


def test_an_empty_template(capfd, tmp_path):
    got = call(capfd, "chat", "default", "--chat-template", source(tmp_path, "\n", "empty.jinja"))
    assert got.code == 1 and "empty.jinja: is empty; --chat-template takes a jinja2 text" in got.err


def test_a_template_that_fails_at_a_message_names_its_file_and_line(template, tmp_path):
    """The message is not taken, the lines behind it are."""
    fails = "{% if messages[-1].content == 'boom' %}\n{{ nobody() }}{% endif %}"
    path = source(tmp_path, fails + TEMPLATE, "some.jinja")
    got, plain = chat(path, "Hello there\nboom\nAnd so?\n"), chat(template, "Hello there\nAnd so?\n")
    said = f"error: line 2: {path}: chat template, line 2: fails: 'nobody' is undefined.\n"
    assert got.code == 1 and got.err == said
    assert plain.code == 0 and got.out == plain.out
