"""Recorded sessions and conversations: repeated byte for byte elsewhere, gone through forward and back, or refused."""
from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from m3jit.api.checkpoints import EverySentence, EveryToken, EveryTokens
from m3jit.api.generation import load_model
from m3jit.api.recorded import RecordedConversation, RecordedSession
from m3jit.api.replayed import TalkReplay
from m3jit.api.session import ContextFull, Session
from m3jit.errors import Divergence, Interrupted, UserError
from m3jit.models.grammar import Grammar
from m3jit.models.provider import DEFAULT_MODEL, Models
from m3jit.timetravel import log_file
from m3jit.timetravel.debugger import open_log
from m3jit.timetravel.log_file import LogError
from m3jit.timetravel.replay import Replay
from m3jit.timetravel.turns import tree
from m3jit.vm.digest import digest
from m3jit.vm.recording import Recorder
from tests.api.sessions import change, model, recurrent  # noqa: F401  (fixtures)

TEMPLATE = ("{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}")
BACKENDS = (("auto", 2), ("cpu:baseline", 1))          # the interpreter: with -m slow, it takes long
ALL = (*BACKENDS, ("interpreter", None))
MODELS = Models()                  # one provider: machines share what they compile


def replay(path: Path, backend: str = "auto", threads: int | None = None, **more: Any) -> tuple[Any, str]:
    """(report, what was shown)."""
    shown: list[str] = []
    return TalkReplay(str(path), MODELS, backend, threads, write=shown.append, **more).run(), "".join(shown)


def whole(path: Path, backends: Any = BACKENDS, instructions: int | None = None) -> str:
    """What every replay shows; each must agree to the end."""
    said = set()
    for backend, threads in backends:
        report, text = replay(path, backend, threads)
        assert report.error is None and not report.torn and report.instructions == (instructions or report.instructions)
        said.add(text)
    assert len(said) == 1
    return said.pop()


def chat(path: Path, model: Any) -> tuple[list[str], int]:
    """A conversation with everything in it; the answers, and how many instructions that took."""
    answers = []
    with RecordedConversation(path, model, chat_template=TEMPLATE, seed=3, max_tokens=12, stop=["zebra"]) as talk:
        answers.append("".join(talk.say("Hello there")))
        word = answers[0].split()[3]
        talk.correct("Emma", to_text=word, which=1)
        answers.append("".join(talk.resume()))
        assert talk.undo_correction()
        other = talk.fork()
        answers += ["".join(talk.say("And you?")), "".join(other.say("Who?"))]
        with pytest.raises(UserError, match="is not in the text"):
            talk.correct("x", to_text="nowhere at all")
        pieces = talk.say("Again?")
        answers.append(next(pieces) + next(pieces))
        talk.stop()                                    # seen before the next token
        answers[-1] += "".join(pieces)
        assert talk.finish_reason == "cancelled"
        pieces = talk.resume()
        answers.append(next(pieces))
        pieces.close()                                 # nobody listens any more
        talk.undo()
        talk.system = "Be brief."
        answers.append("".join(talk.say("So?")))
        other.close()
        return answers, talk.machine.retired


def test_a_conversation_is_repeated_on_every_backend(model, tmp_path):
    answers, instructions = chat(tmp_path / "log", model)
    assert whole(tmp_path / "log", instructions=instructions) == "".join(answer + "\n" for answer in answers)
    assert (tmp_path / "log").stat().st_size < 16_000
    heard: list[str] = []
    replay(tmp_path / "log", heard=lambda name, arguments, named: heard.append(name))
    assert [n for n in heard if n not in ("next", "leave")] == [
        "say", "correct", "resume", "undo_correction", "fork", "say", "say", "correct", "say", "resume", "undo",
        "system", "say", "close", "close"]


def test_the_recorded_conversation_is_the_one_that_is_not(model, tmp_path):
    from m3jit.api.conversation import Conversation
    plain = Conversation(model, chat_template=TEMPLATE, seed=3, max_tokens=12)
    with RecordedConversation(tmp_path / "log", model, chat_template=TEMPLATE, seed=3, max_tokens=12) as talk:
        for message in ("Hello there", "And you?"):
            assert list(talk.say(message)) == list(plain.say(message))
        assert talk.transcript() == plain.transcript() and talk.session.tokens == plain.session.tokens


def test_a_conversation_is_gone_through_both_ways(model, tmp_path):
    """The states met going back are those met going forward, over corrections, forks and what was taken back."""
    chat(tmp_path / "log", model)
    debugger = open_log(str(tmp_path / "log"), MODELS, "cpu", 1)
    engine, met = debugger.engine, {}

    def here() -> tuple[str, int, list[str]]:
        return digest(debugger.vm.main), engine.history.at, tree(engine.history)
    while debugger.outputs(1):
        met[engine.time] = here()
    assert len(met) > 60 and "the log ends after" in str(engine.ended)
    turns = tree(engine.history)
    assert len(turns) == 7 and turns[1].startswith("    turn 2: ") and "correct('Emma'" in turns[1]
    assert turns[-1].startswith("*") and "say('So?')" in turns[-1] and ", 2 written: say('Again?')" in turns[4]
    times = list(met)
    for at in [*times[:3], *reversed(times[::9]), *Random(1).sample(times, 5)]:
        engine.go(at)
        assert here() == met[at]
    engine.go(times[20])
    for back in range(1, 9):                           # over the correction, a token at a time
        assert debugger.outputs(-1) and engine.time == times[20 - back] and here() == met[engine.time]
    engine.go(times[14] + 3)
    engine.step(5)
    engine.back(5)
    assert engine.time == times[14] + 3


def wander(session: Any, steps: int, random: Random) -> None:
    """Random operations on a session and its forks."""
    made, kept = [session], []
    for _ in range(steps):
        one = random.choice(made)
        size, what = len(one.tokens), random.choice(("generate", "generate", "rollback", "inject", "fork", "undo",
                                                     "snapshot", "restore", "append", "become", "nonsense", "leave"))
        if what == "generate" and size:
            list(one.generate(random.randint(1, 7)))
        elif what == "leave" and size:
            for number, _ in enumerate(one.generate(5)):
                if number == 2:
                    break
        elif what == "become" and size > 3:
            one.become([*one.tokens[:random.randint(1, size - 1)], 7])
        elif what == "nonsense":
            for wrong in (lambda: one.rollback(to_token=size + 1), lambda: one.inject(""),
                          lambda: one.append([10 ** 9])):
                with pytest.raises(UserError):
                    wrong()
        else:
            change(what, made, one, kept, random, forks=4, appended=40)
        one.waiting, one.evaluated                     # looking changes nothing
    for one in made:
        one.close()


def repeated(path: Path, made: RecordedSession, steps: int, seed: int, backends: Any) -> None:
    wander(made, steps, Random(seed))
    whole(path, backends, made.machine.retired)
    debugger = open_log(str(path), MODELS, "cpu", 1)
    debugger.engine.run()
    assert all(len(line) < 200 for line in tree(debugger.engine.history))
    end = digest(debugger.vm.main)
    assert "the log ends after" in str(debugger.engine.ended) and debugger.engine.time == made.machine.retired
    debugger.engine.go(debugger.engine.time // 2)
    debugger.engine.run()
    assert digest(debugger.vm.main) == end


@pytest.mark.parametrize("seed, settings", [(0, {"repeat_penalty": 1.2}), (1, {"logprobs": 2, "stop": "the"})])
def test_any_order(model, tmp_path, seed, settings):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7], temperature=1.0, seed=5, **settings)
    repeated(tmp_path / "log", made, 20, seed, BACKENDS[:1])


@pytest.mark.parametrize("policy", [EveryTokens(4), EverySentence()])
def test_any_order_with_recurrent_states(recurrent, tmp_path, policy):
    made = RecordedSession(tmp_path / "log", recurrent[0], [9, 8, 7], temperature=1.0, checkpoints=policy)
    repeated(tmp_path / "log", made, 16, 3, BACKENDS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_orders(model, recurrent, tmp_path, seed):
    """pytest -m slow tests/api/test_recorded.py -k many_orders"""
    for number, one in enumerate((model, recurrent[0])):
        path = tmp_path / str(number)
        policy = (EveryToken(keep=3), EveryTokens(1 + seed % 9))[seed % 2]
        made = RecordedSession(path, one, [9, 8, 7], temperature=1.0, checkpoints=policy)
        repeated(path, made, 80, seed, ALL)


def test_a_grammar(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, [9, 8], grammar=Grammar("regex", "(yes|no), maybe"))
    said = "".join(piece.text for piece in made.generate())
    made.rollback(to_text="maybe")
    with pytest.raises(UserError, match="inject: the grammar does not allow token"):
        made.inject(" perhaps")
    assert said in ("yes, maybe", "no, maybe") and "".join(piece.text for piece in made.generate()) == "maybe"
    made.close()
    assert whole(tmp_path / "log", ALL[2:]) == said + "\nmaybe\n"
    debugger = open_log(str(tmp_path / "log"), MODELS)
    debugger.engine.run()
    assert debugger.engine.time == made.machine.retired


def test_a_stop_in_the_middle_of_a_prompt(model, tmp_path):
    """From another thread, wherever the machine is; the log knows where that was."""
    with RecordedSession(tmp_path / "log", model, list(range(5, 305)), max_tokens=20) as made:
        def stop() -> None:
            late = time.monotonic() + 60
            while made.machine.retired < 30 and time.monotonic() < late:
                pass
            made.stop()
        thread = threading.Thread(target=stop)
        thread.start()
        first = list(made.generate())
        thread.join()
        rest = list(made.generate())
        retired = made.machine.retired
    said = ["".join(piece.text for piece in pieces) + "\n" for pieces in (first, rest)]
    assert whole(tmp_path / "log", BACKENDS[:1], retired) == "".join(said)


def test_a_machine_that_fails_ends_the_log(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, "Emma was", max_tokens=30)
    pieces = made.generate()
    next(pieces)
    made.machine.stop()
    with pytest.raises(Interrupted):
        list(pieces)
    with pytest.raises(UserError, match="recording of this session has ended with an error; make another session"):
        list(made.generate())
    made.close()
    report, _ = replay(tmp_path / "log")
    assert not report.torn and report.instructions == made.machine.retired


@pytest.mark.parametrize("what", ["call", "gave"])
def test_ctrl_c_beside_a_call_ends_the_log(model, tmp_path, monkeypatch, what):
    """A log with half of a call in its middle would be one of something else."""
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7], max_tokens=9)
    list(made.generate(3))
    note = Recorder.note

    def interrupted(self: Recorder, kind: str, value: Any) -> None:
        if kind == what:
            raise KeyboardInterrupt
        note(self, kind, value)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "note", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.inject([5])
    for going_on in (lambda: made.inject([6]), lambda: list(made.generate())):
        with pytest.raises(UserError, match="the recording of this session has ended"):
            going_on()
    made.close()
    whole(tmp_path / "log", BACKENDS[:1], made.machine.retired)


def test_another_thread_is_refused_in_the_middle_of_a_call(model, tmp_path, monkeypatch):
    """What it does there would not be in the log."""
    made, met = RecordedSession(tmp_path / "log", model, [9, 8, 7], max_tokens=5), []
    append = Session.append

    def other() -> None:
        try:
            made.inject([5])
        except UserError as error:
            met.append(str(error))

    def appended(self: Session, prompt: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        append(self, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "append", appended)
        made.append([6])
    assert len(met) == 1 and "inject: the session is in use in another thread" in met[0]
    assert made.tokens == (9, 8, 7, 6)
    list(made.generate())
    made.close()
    whole(tmp_path / "log", BACKENDS[:1], made.machine.retired)


def test_a_log_that_cannot_be_written_ends(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7], max_tokens=5)
    writer = made.course.recording.writer
    writer._error = OSError(28, "No space left on device")
    with pytest.raises(log_file.LogFailed, match="cannot be written: No space left on device"):
        list(made.generate())
    with pytest.raises(UserError, match="the recording of this session has ended"):
        made.inject([5])
    assert writer._file.closed and not writer._thread.is_alive()
    made.close()


def test_cut_logs_are_repeated_as_far_as_they_go(model, tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "CHUNK", 64)
    answers, _ = chat(tmp_path / "log", model)
    data = (tmp_path / "log").read_bytes()
    for at in sorted(Random(4).sample(range(len(data) // 2, len(data)), 6)):
        (tmp_path / "cut").write_bytes(data[:at])
        report, text = replay(tmp_path / "cut")
        assert report.torn and "".join(answer + "\n" for answer in answers).startswith(text.rstrip("\n"))
    (tmp_path / "cut").write_bytes(data[:300])
    with pytest.raises(LogError, match="ends before it says what was run; the recording was killed as it began"):
        replay(tmp_path / "cut")
    damaged = bytearray(data)
    damaged[len(data) * 2 // 3] ^= 16
    (tmp_path / "cut").write_bytes(damaged)
    for opened in (replay, lambda path: open_log(str(path), MODELS)):
        with pytest.raises(LogError, match="is damaged; the file was changed after it was written"):
            opened(tmp_path / "cut")


def test_what_is_not_the_recorded_conversation_is_said(model, tmp_path, monkeypatch):
    from m3jit.api import conversation
    chat(tmp_path / "log", model)
    from m3jit.models.chat_template import ChatTemplate
    of = ChatTemplate.tokens
    with monkeypatch.context() as patch:               # the message is read otherwise
        patch.setattr(ChatTemplate, "tokens", lambda self, *a, **k: [*of(self, *a, **k), 5])
        with pytest.raises(Divergence, match="is put by its host to .*; the log has "):
            replay(tmp_path / "log")
    from m3jit.models.tokenizer import StreamDecoder
    feed = StreamDecoder.feed
    with monkeypatch.context() as patch:               # the tokens agree, their text does not
        patch.setattr(StreamDecoder, "feed", lambda self, token: feed(self, token).upper())
        with pytest.raises(Divergence, match="next gives ' .*'; the log has ' "):
            replay(tmp_path / "log")
    with monkeypatch.context() as patch:               # a correction takes back something else
        patch.setattr(conversation.Conversation, "undo", lambda self: False)
        with pytest.raises(Divergence, match="undo gives False; the log has True"):
            replay(tmp_path / "log")


def test_where_a_stop_string_began_is_compared(model, tmp_path, monkeypatch):
    from m3jit.api.stop_strings import StopStrings
    free = Session(model, "Emma was", temperature=0)
    follows = next(p.text for p in free.generate(1))
    with RecordedSession(tmp_path / "log", model, "Emma was", temperature=0, stop="s" + follows) as made:
        made.rollback(to_token=made.start - 1)
        made.inject(" was")
        assert [piece.back for piece in made.generate(2)][-1] == 1
    whole(tmp_path / "log", BACKENDS[:1])
    monkeypatch.setattr(StopStrings, "back", property(lambda self: 0, lambda self, back: None), raising=False)
    with pytest.raises(Divergence, match=r"next gives \('', \(\), 'stop', 0\); the log has \('', \(\), 'stop', 1\)"):
        replay(tmp_path / "log")


def test_other_models_versions_and_heads(model, tmp_path, monkeypatch):
    import m3jit
    moved = tmp_path / "m.gguf"
    moved.write_bytes(DEFAULT_MODEL.read_bytes())
    with RecordedSession(tmp_path / "log", load_model(str(moved)), "Emma was", max_tokens=3) as made:
        said = "".join(piece.text for piece in made.generate())
    data = bytearray(moved.read_bytes())
    data[-1000] ^= 1
    moved.write_bytes(data)
    with pytest.raises(UserError, match="was recorded with another model under the name"):
        TalkReplay(str(tmp_path / "log"), Models())
    shown: list[str] = []
    TalkReplay(str(tmp_path / "log"), Models(), moved=(str(DEFAULT_MODEL),), write=shown.append).run()
    assert "".join(shown) == said + "\n"
    other = f"was recorded by m3jit {re.escape(m3jit.__version__)}, this is 9.9"
    monkeypatch.setattr(m3jit, "__version__", "9.9")
    with pytest.raises(UserError, match=other):
        replay(tmp_path / "log")
    with pytest.raises(UserError, match=other):
        open_log(str(tmp_path / "log"), MODELS, moved=(str(DEFAULT_MODEL),))
    assert not open_log(str(tmp_path / "log"), MODELS, moved=(str(DEFAULT_MODEL),), any_version=True).torn
    monkeypatch.undo()
    with pytest.raises(UserError, match="is a log of a session, not of a program"):
        Replay(str(tmp_path / "log"), MODELS)


@pytest.mark.parametrize("change", [{"settings": 5}, {"settings": {"heat": 5}}, {"policy": ("Never", {})},
                                    {"limit": "x"}, {"conversation": {"system": 5}}, {"reference": None}])
def test_heads_that_say_something_else(model, tmp_path, monkeypatch, change):
    init = log_file.LogWriter.__init__
    monkeypatch.setattr(log_file.LogWriter, "__init__",
                        lambda self, path, head: init(self, path, head | {"talk": head["talk"] | change}))
    RecordedSession(tmp_path / "log", model).close()
    with pytest.raises(UserError, match="does not say what session it is of|no setting 'heat'"):
        replay(tmp_path / "log")


@pytest.mark.parametrize("calls", [[(0, "save", (), {})], [(4, "undo", (), {})], [(0, "undo", (1, 2), {})],
                                   [(0, "next", (7,), {})], [(0, "close", (), {}), (0, "__init__", ("x",), {})]])
def test_calls_that_are_none(model, tmp_path, monkeypatch, calls):
    """A file that somebody made obeys no other calls than those of a session."""
    made = RecordedSession(tmp_path / "log", model)
    for call in calls:
        made.course.recorder.note("call", call)
        made.course.recorder.note("gave", None)
    made.close()
    with pytest.raises(Divergence, match="which is none|cannot be made"):
        replay(tmp_path / "log")


@pytest.mark.parametrize("change, words", [
    ({"mark": (7, 7, 7)}, "put back that nobody took out"), ({"registers": {"rNone": 1}}, "no register"),
    ({"total": 4}, "is put by its host to"), ({"random": 9}, "is put by its host to")])
def test_entries_that_are_none(model, tmp_path, monkeypatch, change, words):
    """A file that somebody made: a replay computes them anew, and the debugger believes only what it has seen."""
    from m3jit.timetravel.hosting import Entry
    host = Recorder.host
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "host", lambda self, value: host(
            self, (value[0], *Entry(*value[1:])._replace(**change))))
        made = RecordedSession(tmp_path / "log", model, [9, 8, 7], max_tokens=3)
        list(made.generate())
        made.close()
    with pytest.raises(Divergence, match="is put by its host to .*; the log has"):
        replay(tmp_path / "log")
    if "put by" not in words:
        with pytest.raises(UserError, match=words):
            open_log(str(tmp_path / "log"), MODELS).engine.run()


def test_what_a_recorded_session_does_not_do(model, tmp_path):
    class Mine:
        """A policy that no log can name."""
        keep = 1

        def due(self, since: int, text: str) -> bool:
            return True
    made = RecordedSession(tmp_path / "log", model, "Emma was", max_tokens=5)
    with pytest.raises(UserError, match="load: a recorded session begins with nothing"):
        made.load(tmp_path / "store")
    with pytest.raises(UserError, match="takes snapshots of its own and of its forks"):
        made.restore(Session(model, "x").snapshot())
    for call, words in ((lambda: made.append(object()), "append: argument 1: a value of class object cannot be recor"),
                        (lambda: made.inject([5, 2 ** 70]), f"inject: argument 1: item 1: {2 ** 70} does not fit"),
                        (lambda: made.rollback(to_text={"a": [3, object]}), "rollback: to_text: a: item 1: a value of "
                         "class type cannot be recorded")):
        with pytest.raises(UserError, match=words):
            call()
    with pytest.raises(UserError, match="a log knows EveryToken, EveryTokens, EverySentence, not Mine"):
        RecordedSession(tmp_path / "other", model, checkpoints=Mine())
    with pytest.raises(UserError, match="cannot be written"):
        RecordedSession(tmp_path / "no" / "log", model)
    other = made.fork()
    for _ in made.generate():
        with pytest.raises(UserError, match="share one machine, and a loop goes over the text of another one"):
            list(other.generate())
        break
    list(other.generate())
    with pytest.raises(ContextFull):
        made.append([7] * (made.context + 1))
    made.close()
    other.close()
    assert not (tmp_path / "other").exists() and len(whole(tmp_path / "log").splitlines()) >= 2
