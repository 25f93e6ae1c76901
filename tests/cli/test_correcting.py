"""Correcting answers in `m3jit chat`: by lines of standard input, and with the keys of a terminal."""
from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from m3jit.api.conversation import Conversation
from m3jit.api.generation import load_model
from m3jit.cli import keys
from m3jit.cli.dialogue import Dialogue
from m3jit.cli.picker import ACCEPT, CANCEL, HINTS, Picker, hint, wrap
from m3jit.errors import UserError
from m3jit.models.program import Options
from tests.cli.command import call, process, source

TEMPLATE = ("{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}")
PATIENCE = 120                     # seconds until a test gives up


@pytest.fixture(scope="module")
def language():
    return load_model("default", threads=1)


@pytest.fixture
def dialogue(language, capfd):
    """A dialogue without a terminal, and what a line writes to standard output and error."""
    made = Dialogue(Conversation(language, chat_template=TEMPLATE, temperature=0, max_tokens=16), False)

    def take(*lines: str):
        capfd.readouterr()
        for line in lines:
            made.take(line)
        return capfd.readouterr()
    take.made = made
    return take


# By lines.

def test_a_place_behind_a_stop_string_is_none(language, capfd):
    def made(**more):
        return Dialogue(Conversation(language, chat_template=TEMPLATE, temperature=0, max_tokens=16, **more), False)
    made().take("Hello there")
    said = capfd.readouterr().out
    word = next(w for w in said.split()[2:] if len(w) > 3 and said.count(w[1:]) == 1)
    dialogue = made(stop=word[1:])
    dialogue.take("Hello there")
    shown = capfd.readouterr().out.rstrip("\n")
    assert word[1:] not in shown and word[1:] in dialogue.talk.session.text
    for line in (f"/edit {word[1:]} => Emma", f"/edit {word} => Emma", f"/edit {word[1:]} =>"):
        with pytest.raises(UserError, match="is not in the text, which is"):
            dialogue.take(line)
        assert dialogue.talk.answer == shown and capfd.readouterr().out == ""


def test_a_place_is_edited(dialogue):
    said = dialogue("Hello there").out.rstrip("\n")
    talk = dialogue.made.talk
    kept, _, behind = said.partition(said.split()[5])
    out, err = dialogue(f"/edit {said.split()[5]} {behind.split()[0]} => Emma")
    assert out.startswith(kept + "Emma") and len(out) > len(kept + "Emma\n")
    assert talk.messages[-1]["content"] == out.strip()
    found = re.fullmatch(r"\[corrected: (\d+) tokens of the answer kept, (\d+) taken back, (\d+) put in; (\d+) "
                         r"to compute before it goes on\]\n", err)
    assert found and int(found[1]) + int(found[2]) == 16 and int(found[4]) <= int(found[3]) + 1
    assert dialogue("/undo-correction").out == said + "\n" and talk.messages[-1]["content"] == said.strip()
    assert "nothing has been corrected" in dialogue("/undo-correction").err
    more = dialogue("And you?").out
    other = Conversation(talk.model, chat_template=TEMPLATE, temperature=0, max_tokens=16)
    assert "".join(other.say("Hello there")) == said and "".join(other.say("And you?")) + "\n" == more


def test_what_follows_an_edit_is_what_the_text_from_the_start_gives(dialogue):
    said = dialogue("Hello there").out.rstrip("\n")
    word = said.split()[7]
    dialogue(f"/edit@{said.split()[:8].count(word)} {word} => a very fine")
    session = dialogue.made.talk.session
    given = next(n for n in range(session.start, len(session.tokens) + 1)
                 if session.model.decode(session.tokens[session.start:n]).endswith("a very fine"))
    fresh = session.model.generate(session.tokens[:given], temperature=0, max_tokens=len(session.tokens) - given)
    assert session.text.endswith("a very fine" + fresh.result())


def test_an_answer_goes_on_behind_a_text(dialogue):
    said = dialogue("Hello there").out.rstrip("\n")
    out = dialogue("/edit => She left.").out
    assert out.rstrip("\n").startswith(said.rstrip()) and "She left." in out
    first = said.split()[0]
    assert dialogue(f"/edit@1 {first} => Then").out.startswith(said[:said.index(first)] + "Then")
    again = dialogue(f"/undo-correction", f"/edit@1 {said.split()[4]} =>").out
    assert again.rstrip("\n").endswith(said)           # taken back without a text: the same words come again


def test_forks(dialogue):
    dialogue("Hello there")
    one = dialogue("/fork one", "And you?").out
    dialogue("/switch one")
    assert dialogue("And you?").out == one and dialogue("/switch one").out == ""
    dialogue("Why?", "/switch main")
    assert len(dialogue.made.talk.messages) == 4
    for line, words in (("/switch two", "no conversation 'two'; there are main, one"), ("/fork", "give it a name"),
                        ("/fork one", "there is a conversation 'one' already"),
                        ("/fork main", "there is a conversation 'main' already")):
        with pytest.raises(UserError, match=words):
            dialogue(line)
    dialogue.made.close()


def test_continuing(dialogue, monkeypatch):
    talk = dialogue.made.talk
    said = []
    for piece in talk.say("Hello there"):
        said.append(piece)
        if len(said) == 6:
            talk.stop()
    begun = "".join(said)
    out = dialogue("/continue").out
    assert talk.messages[-1]["content"] == (begun + out).strip() and len(talk.session.tokens) == talk.session.start + 16
    none = dialogue("/continue")
    assert none.out == "" and none.err == "[nothing more: the answer has as many tokens as --max-tokens allows]\n"


@pytest.mark.parametrize("line, words", [
    ("/edit a => b", "/edit: nothing has been said yet"), ("/edit x", "write /edit OLD => NEW"),
    ("/continue", "/continue: nothing has been said yet"), ("/correct", "/correct: nothing has been said yet"),
    ("/edit@x a => b", r"/edit@N OLD => NEW has a number"), ("/undo@2", r"/undo@2: /edit@N OLD"),
    ("/undo-correction", "")])
def test_before_anything_was_said(dialogue, line, words):
    if words:
        with pytest.raises(UserError, match=words):
            dialogue(line)
    else:
        assert "nothing has been corrected" in dialogue(line).err


def test_what_cannot_be_edited(dialogue):
    said = dialogue("Hello there").out.strip()
    for line, words in (("/edit xyzzy => b", "'xyzzy' is not in the text, which is"),
                        ("/edit => ", "neither a place nor"),
                        ("/edit e => b", "give more of the text, or say which of them"),
                        ("/correct", "needs a terminal"),
                        (f"/edit {said[:5]} => " + "x " * 600, "the context holds 512")):
        with pytest.raises(UserError, match=words):
            dialogue(line)
    assert dialogue.made.talk.messages[-1]["content"] == said and not dialogue.made.talk.undo_correction()


# Sessions on disk.

def test_a_session_is_saved_and_reopened(language, capfd, tmp_path):
    """What was said is there again, nothing is computed for it, and the next answer is the same."""
    from m3jit.durable import Store, StoreError, StoreInUse

    def opened(folder: Path, **more) -> Dialogue:
        talk = Conversation(language, chat_template=TEMPLATE, temperature=0, max_tokens=16, **more)
        made = Dialogue(talk, False, store=Store.open(folder))
        made.begin()
        return made

    def end(dialogue: Dialogue) -> None:
        dialogue.close()
        dialogue.store.close()
    first = opened(tmp_path / "one")
    first.take("Hello there")
    word = first.talk.session.text.split()[4]
    first.take(f"/edit@1 {word} => Emma")
    first.take("/fork other")
    first.take("/save")
    with pytest.raises(StoreInUse):
        opened(tmp_path / "one")
    first.take(f"/save-session {tmp_path / 'two'}")
    first.take("And you?")
    said, tokens = first.talk.messages, first.talk.session.tokens
    end(first)
    capfd.readouterr()
    again = opened(tmp_path / "one")
    assert capfd.readouterr().err == (f"[4 messages, {len(tokens)} tokens; 1 to compute before the last "
                                      f"answer could go "
                                      "on]\n")
    assert again.talk.messages == said and again.talk.session.tokens == tokens and again.talk.session.evaluated == 0
    again.take("/switch other")
    assert again.talk.messages == said[:2]
    again.take("And you?")
    assert again.talk.messages == said and again.talk.session.tokens == tokens
    again.take("/switch main")
    again.take("/undo")
    again.take("And you?")
    assert again.talk.messages == said
    end(again)
    other = opened(tmp_path / "two")
    assert other.talk.messages == said[:2] and other.talk.session.evaluated == 0
    other.take("And you?")
    assert other.talk.session.tokens == tokens
    end(other)
    with pytest.raises(StoreError, match="kv_type = F16, and here it is F32"):
        opened(tmp_path / "one", options=Options(kv_type="F32"))


def test_a_session_by_the_command(tmp_path):
    template, folder = source(tmp_path, TEMPLATE, "plain.jinja"), tmp_path / "talk"
    command = ("chat", "default", "--chat-template", template, "--temp", "0", "-n", "8", "--threads", "1", "--session",
               folder)
    one = process(*command, stdin=b"Hello there\n")
    two = process(*command, stdin=b"And you?\n/save\n")
    both = process(*command[:-2], stdin=b"Hello there\nAnd you?\n/save\n")
    assert one.code == two.code == 0 and one.out + two.out == both.out
    assert two.err.startswith("[2 messages, ") and "1 to compute before" in two.err
    assert both.code == 1 and "begin with m3jit chat --session FOLDER" in both.err


def test_a_folder_that_cannot_hold_a_session(capfd, tmp_path):
    file = source(tmp_path, "x", "file")
    got = call(capfd, "chat", "default", "--chat-template", source(tmp_path, TEMPLATE, "plain.jinja"), "--session",
               file)
    assert got.code == 1 and got.out == "" and str(file) in got.err


# Keys.

def test_picking_a_place():
    text = " He came. She left!  “Why?” he asked\nand went"
    picker = Picker(text)
    assert picker.place == len(text) and not picker.moved
    for key, rest in ((keys.LEFT, "went"), (keys.LEFT, "and went"), (keys.UP, "he asked\nand went"),
                      (keys.UP, "“Why?”"),
                      (keys.UP, "She left"), (keys.UP, "He came"), (keys.UP, "He came"), (keys.RIGHT, "came."),
                      (keys.DOWN, "She"), (keys.HOME, "He"), (keys.LEFT, "He"), (keys.END, ""), (keys.RIGHT, "")):
        assert picker.key(key) is None and text[picker.place:].startswith(rest), key
    for key in "a", " ", "é", keys.BACKSPACE, "b", "":
        picker.key(key)
    assert picker.typed == "a b" and picker.key(keys.ENTER) == ACCEPT
    assert [picker.key(key) for key in (keys.ESC, keys.INTERRUPT, keys.EOF)] == [CANCEL] * 3
    assert Picker("").place == 0 and Picker("").lines(40)


def test_what_is_shown():
    picker = Picker("one two three " * 30 + "end")
    lines = picker.lines(40)
    plain = [re.sub("\x1b\\[[0-9;]*m", "", line) for line in lines]
    assert len(lines) == 9 and all(len(line) <= 40 for line in plain) and plain[-1] == HINTS[2]
    assert plain[-2].endswith("end▏")
    picker.key(keys.HOME)
    picker.key("X")
    assert re.sub("\x1b\\[[0-9;]*m", "", picker.lines(40)[0]).startswith("Xone two")
    wide, where = wrap([("日本" * 12, ""), ("x", ""), ("\x1b[31m\n", "")], 20)
    assert [len(line) for line in wide] == [9, 9, 6 + 1 + 5, 0] and where == 2 and "\x1b" not in "".join(wide)


def test_what_keys_do_fits_the_terminal():
    for width in range(19, 100):
        assert len(hint(width)) <= width and "Esc" in hint(width) and "Enter" in hint(width)
    assert "Esc: end" in hint(59) and "sentence" in hint(59)


# A terminal.

class Child:
    """A process on a terminal of its own."""

    def __init__(self, *command: str, term: str = "xterm"):
        pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
        self.fd, other = pty.openpty()
        environment = {**os.environ, "TERM": term, "COLUMNS": "80", "LINES": "24", "PYTHONUNBUFFERED": "1",
                       "PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = subprocess.Popen([sys.executable, *command], stdin=other, stdout=other, stderr=other,
                                        env=environment, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(other)
        self.seen, self.at = "", 0

    def wait(self, pattern: str) -> re.Match:
        """What it wrote since the last call, up to what matches."""
        end = time.monotonic() + PATIENCE
        while True:
            found = re.search(pattern, self.seen[self.at:])
            if found:
                self.at += found.end()
                return found
            left = end - time.monotonic()
            if left < 0 or not select.select([self.fd], [], [], left)[0]:
                raise AssertionError(f"waited for {pattern!r}; it wrote {self.seen[self.at:]!r}")
            try:
                data = os.read(self.fd, 4096)
            except OSError:                            # Linux: nobody has the other side open any more
                data = b""
            if not data:
                raise AssertionError(f"ended before {pattern!r}; it wrote {self.seen[self.at:]!r}")
            self.seen += data.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, line by line: its usual mode."""
        import termios
        return bool(termios.tcgetattr(self.fd)[3] & termios.ECHO)

    def end(self) -> int:
        """Wait for the end, when the terminal must be as it was; the exit status."""
        try:
            code = self.process.wait(PATIENCE)
            assert self.echoes()
            return code
        finally:
            self.process.kill()
            os.close(self.fd)


@pytest.fixture
def child(tmp_path):
    made: list[Child] = []

    def start(*arguments: str, **more) -> Child:
        template = str(source(tmp_path, TEMPLATE, "plain.jinja"))
        made.append(Child(str(Path(__file__).parent / "pausing.py"), template, *arguments, **more))
        made[0].wait("lets you correct it|cannot be read one by one")
        made[0].wait("> ")
        return made[0]
    yield start
    for child in made:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait(PATIENCE)


def test_escape_at_the_prompt_takes_no_key_with_it(child):
    pytest.importorskip("readline", reason="this Python is built without readline")
    screen = child()
    screen.type("\x1b/context\r")
    screen.wait("0 of 512 tokens")
    screen.wait("> ")                                  # before, the terminal's line mode makes an end of input of ^D,
    screen.type("\x04")                                # which the mode that follows reads as NUL
    assert screen.end() == 0


@pytest.mark.parametrize("key", ["\x1b", "\x03"], ids=["esc", "ctrl-c"])
def test_a_paused_answer_is_corrected(child, key):
    """Esc, two words back, a text, Enter: the answer goes on behind it; the correction is undone."""
    made = child()
    made.type("Hello there\r")
    answer = made.wait(r"((?: \w+){6})")[1]
    assert not made.echoes()
    made.type(key)
    made.wait("Enter: go on")
    made.type("\x1b[D\x1b[DEmma")
    made.wait("Emma")
    made.wait("Enter: go on")
    made.type("\r")
    kept, back, put, compute = map(int, made.wait(
        r"\[corrected: (\d+) tokens of the answer kept, (\d+) taken back, (\d+) put in; (\d+) to compute").groups())
    assert 6 <= kept + back <= 13 and back >= 2 and compute <= put + 1
    corrected = made.wait(r"goes on\]\r\n(.*Emma.*)\r\n")[1]
    assert corrected.startswith(answer[:8]) and not corrected.endswith("Emma")
    made.wait("> ")
    made.type("/undo-correction\r")
    assert made.wait(r"\n( .+)\r\n")[1].startswith(answer)
    made.wait("> ")
    made.type("/exit\r")
    assert made.end() == 0


def test_lines_are_pasted_into_a_correction(child):
    """The terminal is asked to mark what is pasted while the editor is open, and no longer."""
    made = child()
    made.type("Hello there\r")
    made.wait(r"( \w+){6}")
    made.type("\x1b")
    made.wait(r"\x1b\[\?2004h")
    made.wait("Enter: go on")
    made.type("\x1b[200~one\rtwo\tthree\x1b[201~")
    made.wait("two three")
    made.wait("Enter: go on")
    made.type(" four\r")
    made.wait(r"\x1b\[\?2004l")
    made.wait(r"goes on\]\r\n.*one\r\ntwo\s+three four")
    made.wait("> ")
    made.type("\x04")
    assert made.end() == 0


def test_sleeping_waking_up_and_leaving_an_answer_as_it_is(child):
    """Ctrl-Z gives the terminal back as it was; awake again, the place is shown again."""
    made = child("job")
    made.type("Hello there\r")
    made.wait(r"( \w+){6}")
    made.type("\x1b")
    made.wait("Enter: go on")
    made.type("\x1a")
    made.wait("asleep, echo True")
    made.wait("Enter: go on")
    assert not made.echoes()
    made.type("\x1b")
    made.wait(r"\[stopped; /continue goes on\]")
    made.wait("> ")
    made.type("/continue\r")
    made.wait(r"/continue\r\n .+\r\n")
    made.wait("> ")
    made.type("/correct\r")
    made.wait("Enter: go on")
    made.type("\x03")
    made.wait("> ")
    made.type("\x04")
    assert made.end() == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_mode_comes_back_when_the_process_is_ended(child, number):
    made = child()
    made.type("Hello there\r")
    made.wait(r"( \w+){6}")
    made.type("\x1b")
    made.wait("Enter: go on")
    assert not made.echoes()
    made.process.send_signal(number)
    assert made.process.wait(PATIENCE) in (-number, 128 + number) and made.echoes()


def test_a_terminal_that_cannot_draw(child):
    """No keys one by one: that is said, Ctrl-C stops, and lines correct."""
    made = child(term="dumb")
    made.type("Hello there\r")
    made.wait(r"( \w+){6}")
    made.type("\x03")
    made.wait(r"\[stopped; /edit OLD => NEW corrects it, /continue goes on\]")
    made.type("/correct\r")
    made.wait("/correct: needs a terminal whose keys can be read one by one")
    made.type("/edit => Emma\r")
    made.wait(r"goes on\]\r\n.*Emma")
    made.wait("> ")
    made.type("\x04")
    assert made.end() == 0
