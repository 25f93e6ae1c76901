"""Recorded texts and sessions that nobody closes: the collector ends a text at any moment, and the log has it where it
ended; the end of the process ends the log."""
from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import pytest

from m3jit.api import recorded
from m3jit.api.conversation import Conversation
from m3jit.api.generation import load_model
from m3jit.api.recorded import LEAVE, InUse, Journal, RecordedConversation, RecordedSession
from m3jit.api.replayed import TalkReplay
from m3jit.api.session import Session
from m3jit.errors import UserError
from m3jit.models.provider import Models
from m3jit.timetravel import log_file
from m3jit.vm.recording import Recorder
from tests.api.test_recorded import TEMPLATE

MODELS = Models()


@pytest.fixture(scope="module")
def model():
    return load_model("default", threads=1)


@pytest.fixture(autouse=True)
def collected_by_hand():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Ring:
    """What only the collector can let go: it holds itself."""

    def __init__(self, held: Any):
        self.held, self.itself = held, self


def drop_begun(pieces: Any) -> None:
    """Begin a text, and let go of it."""
    next(pieces)
    Ring(pieces)


def calls(path: Path) -> list[str]:
    """What a replay hears, in order; it agrees with the log."""
    heard: list[str] = []
    report = TalkReplay(str(path), MODELS, "auto", 1, heard=lambda name, *_: heard.append(name)).run()
    assert report.error is None and not report.torn
    return heard


def collect_once(patch: pytest.MonkeyPatch, where: Any, name: str, when: Callable[..., bool] = lambda *_: True,
                 collect: Callable[[], Any] = gc.collect) -> None:
    """The collector runs at the first call of a function; when: .. with such arguments."""
    of, done = getattr(where, name), []

    def collecting(*arguments: Any, **named: Any) -> Any:
        if not done and when(*arguments):
            done.append(collect())
        return of(*arguments, **named)
    patch.setattr(where, name, collecting)


PLACES = {
    "before the call is noted": (Recorder, "note", lambda self, what, value: what == "call"),
    "in the call": (Session, "_settled", lambda *_: True),
    "behind the call": (Recorder, "note", lambda self, what, value: what == "gave"),
    "while the log is written": (log_file, "put_int", lambda *_: True)}


@pytest.mark.parametrize("place", PLACES)
def test_a_text_that_is_collected_in_another_call_ends_behind_it(model, tmp_path, monkeypatch, place):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    drop_begun(made.generate())
    with monkeypatch.context() as patch:
        collect_once(patch, *PLACES[place])
        other = made.fork()
    assert "".join(piece.text for piece in other.generate(2))              # no loop goes over the first one now
    made.close()
    other.close()
    heard = calls(tmp_path / "log")
    assert heard[heard.index("fork"):][:3] == ["fork", LEAVE, "generate"]


def test_a_text_that_is_collected_between_calls_ends_there(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    drop_begun(made.generate())
    gc.collect()
    made.append([5])
    made.close()
    assert calls(tmp_path / "log")[1:] == ["generate", "next", LEAVE, "append", "close"]


def test_a_text_that_is_collected_by_a_look_ends_behind_it(model, tmp_path, monkeypatch):
    """`save` is no call of the log, but notes where states are."""
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    for _ in made.generate(2):
        pass
    drop_begun(made.generate())
    with monkeypatch.context() as patch:
        collect_once(patch, log_file, "put_int")
        made.save(tmp_path / "store")
    made.append([5])
    made.close()
    assert calls(tmp_path / "log")[-3:] == [LEAVE, "append", "close"]


@pytest.mark.parametrize("busy", [False, True])
def test_a_text_that_another_thread_collects_ends_at_the_next_call(model, tmp_path, monkeypatch, busy):
    """Such a thread may be one that writes the log, or that holds anything else."""
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    drop_begun(made.generate())

    def collect() -> None:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    with monkeypatch.context() as patch:
        if busy:
            collect_once(patch, Session, "append", collect=collect)
        else:
            collect()
        made.append([5])
    made.close()
    heard = calls(tmp_path / "log")[3:]
    assert heard == (["append", LEAVE, "close"] if busy else [LEAVE, "append", "close"])


def in_thread(do: Callable[[], Any]) -> Any:
    """What a call in another thread gives or raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result(timeout=300)


@pytest.mark.parametrize("look", ["save", "messages", "answer", "finish_reason", "transcript"])
def test_a_text_of_another_thread_that_is_closed_here_is_there_at_once(model, tmp_path, look):
    """As a server with an event loop does it: pieces come from a thread, and the loop closes the text."""
    given = {"chat_template": TEMPLATE, "seed": 3, "max_tokens": 9}
    with RecordedConversation(tmp_path / "log", model, **given) as talk:
        pieces = talk.say("Hello there")
        said = in_thread(lambda: [next(pieces) for _ in range(3)])
        pieces.close()
        text = "".join(said).strip()
        if look == "save":
            talk.save(tmp_path / "store")
            again = Conversation(model, **given)
            again.load(tmp_path / "store")
            assert again.messages[-1]["content"] == text and again.finish_reason == "cancelled"
        elif look == "transcript":
            assert talk.transcript()[-1]["content"] == text
        else:
            found = getattr(talk, look)
            assert (found[-1]["content"] if look == "messages" else found.strip()) == \
                ("cancelled" if look == "finish_reason" else text)
        assert not talk.course._left
        list(talk.say("And then?"))
    assert calls(tmp_path / "log") == ["say", "next", "next", "next", LEAVE, "say"] + ["next"] * (
        len(calls(tmp_path / "log")) - 7) + ["close"]


def test_a_text_that_is_refused_ends_in_the_log(model, tmp_path, monkeypatch):
    """Its loop ended with the refusal, which is no part of the log; that the text ended is."""
    made, met = RecordedSession(tmp_path / "log", model, [9, 8, 7]), []
    pieces = made.generate()
    next(pieces)

    def other() -> None:
        with pytest.raises(InUse, match="next: the session is in use in another thread") as refused:
            in_thread(lambda: next(pieces))
        met.append(refused)
    with monkeypatch.context() as patch:
        collect_once(patch, Session, "snapshot", collect=other)
        made.snapshot()
    assert len(met) == 1 and not list(pieces)
    other_text = made.fork()
    assert "".join(piece.text for piece in other_text.generate(2))         # no loop goes over the first one now
    made.close()
    other_text.close()
    heard = calls(tmp_path / "log")
    assert heard[:4] == ["append", "generate", "next", "snapshot"] and heard[4:6] == [LEAVE, "fork"]


def test_a_look_refuses_no_call(model, tmp_path, monkeypatch):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    pieces = made.generate()
    next(pieces)
    with monkeypatch.context() as patch:
        collect_once(patch, Session, "_left", collect=lambda: in_thread(lambda: next(pieces)))
        assert made.waiting >= 0
    made.close()
    assert calls(tmp_path / "log") == ["append", "generate", "next", "next", "close"]


def test_a_look_in_the_middle_of_a_call_notes_nothing(model, tmp_path, monkeypatch):
    made, noted = RecordedSession(tmp_path / "log", model, [9, 8, 7]), []
    pieces = made.generate()
    for _ in range(3):
        next(pieces)

    def look() -> None:
        assert in_thread(lambda: made.waiting) >= 0 and noted == ["call"]
    with monkeypatch.context() as patch:
        note = Recorder.note
        patch.setattr(Recorder, "note", lambda self, what, value: (noted.append(what), note(self, what, value))[1])
        collect_once(patch, Session, "append", collect=look)
        made.append([5])
    assert noted == ["call", "host", "gave"], "where the call takes the states out"
    made.close()
    assert calls(tmp_path / "log")[-2:] == ["append", "close"]


def test_a_save_in_the_middle_of_a_call_is_refused(model, tmp_path, monkeypatch):
    made, met = RecordedSession(tmp_path / "log", model, [9, 8, 7]), []

    def save() -> None:
        with pytest.raises(InUse, match=r"save: the session is in use in another thread: call stop\(\)") as refused:
            in_thread(lambda: made.save(tmp_path / "store"))
        met.append(refused)
    with monkeypatch.context() as patch:
        collect_once(patch, Session, "append", collect=save)
        made.append([5])
    assert len(met) == 1 and not (tmp_path / "store").exists()
    made.save(tmp_path / "store")
    made.close()
    assert calls(tmp_path / "log") == ["append", "append", "close"]


def test_a_call_waits_while_another_thread_ends_texts(model, tmp_path, monkeypatch):
    talk = RecordedConversation(tmp_path / "log", model, chat_template=TEMPLATE, seed=3, max_tokens=9)
    pieces = talk.say("Hello there")
    in_thread(lambda: next(pieces))
    pieces.close()
    waits, pool, made = threading.Event(), ThreadPoolExecutor(1), []
    with monkeypatch.context() as patch, pool:
        patch.setattr(recorded.time, "sleep", lambda seconds: waits.set())

        def call() -> None:
            made.append(pool.submit(talk.undo))
            assert waits.wait(300), "it was refused, or did not come"
        patch.setattr(recorded, "PATIENCE", 300.0)
        collect_once(patch, Recorder, "note", lambda self, what, value: what == "call" and value[1] == LEAVE, call)
        assert talk.messages
        assert made[0].result(timeout=300)
    talk.close()
    assert calls(tmp_path / "log") == ["say", "next", LEAVE, "undo", "close"]


def test_ctrl_c_before_the_end_of_a_text_is_noted_leaves_it_to_end(model, tmp_path, monkeypatch):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    drop_begun(made.generate())
    in_thread(gc.collect)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_do", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.append([5])
    made.append([5])
    made.close()
    assert calls(tmp_path / "log")[3:] == [LEAVE, "append", "close"]


def test_an_answer_that_is_collected_in_another_call_is_kept_as_it_was_said(model, tmp_path, monkeypatch):
    with RecordedConversation(tmp_path / "log", model, chat_template=TEMPLATE, seed=3, max_tokens=9) as talk:
        drop_begun(talk.say("Hello there"))
        with monkeypatch.context() as patch:
            collect_once(patch, Session, "_settled")
            other = talk.fork()
        assert talk.answer and talk.messages[-1]["content"] == talk.answer.strip()
        other.close()
    assert LEAVE in calls(tmp_path / "log")


def test_a_log_that_has_ended_is_left_alone(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    drop_begun(made.generate())
    made.close()
    gc.collect()
    assert calls(tmp_path / "log")[-1] == "close"


def test_a_call_in_the_middle_of_noting_one_is_refused(model, tmp_path, monkeypatch):
    """As a signal handler would make it."""
    made, met = RecordedSession(tmp_path / "log", model, [9, 8, 7]), []

    def call() -> None:
        try:
            made.append([6])
        except UserError as error:
            met.append(str(error))
    with monkeypatch.context() as patch:
        collect_once(patch, Recorder, "note", collect=call)
        made.append([5])
    assert len(met) == 1 and "append: the session is in use" in met[0] and made.tokens == (9, 8, 7, 5)
    made.close()
    assert calls(tmp_path / "log") == ["append", "append", "close"]


UNCLOSED = """
import os, sys
import m3jit
made = m3jit.RecordedSession(sys.argv[1], "default", [9, 8, 7], threads=1)
print(next(made.generate()).text)
other = made.fork()
print("".join(piece.text for piece in other.generate(2)))
made.close()
{}
"""


@pytest.mark.parametrize("last, ends", [("", True), ("1 / 0", True), ("sys.stdout.flush(); os._exit(3)", False)])
def test_a_fork_that_is_never_closed(tmp_path, capfd, last, ends):
    """An orderly end of the process is one of the log; anything else is a log that was cut off."""
    from tests.cli.command import call
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", UNCLOSED.format(last), log], capture_output=True, text=True,
                          timeout=300)
    assert len(done.stdout.splitlines()) == 2, done.stderr
    report = TalkReplay(str(log), MODELS, "auto", 1).run()
    assert report.torn is not ends and report.unclosed == int(ends)
    said = call(capfd, "replay", log)
    assert said.code == 0 and (said.out == done.stdout if ends else done.stdout.startswith(said.out))
    assert ("1 of its sessions and forks were never closed: the log ends where their process ended" in said.err) is ends
    assert ("the recording was cut off, or a session of it was never closed" in said.err) is not ends
    seen = call(capfd, "debug", log, "-x", "c")
    assert seen.code == 0 and "the log ends after" in seen.out
    assert (f"{log}: the recording was cut off, or goes on: the log has no end" in seen.err) is not ends


def test_a_log_whose_fork_is_open_can_be_repeated_so_far(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    other = made.fork()
    made.close()
    with pytest.raises(UserError, match="the session is closed"):
        made.append([5])
    other.append([5])
    other.course.recording.writer._flush(0.0)
    report = TalkReplay(str(tmp_path / "log"), MODELS, "auto", 1).run()
    assert report.torn and report.unclosed == 0
    other.close()
    assert calls(tmp_path / "log") == ["append", "fork", "close", "append", "append", "close"]


def test_a_session_that_the_collector_takes_leaves_a_log_without_an_end(model, tmp_path):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    made.append([5])
    course, writer = weakref.ref(made.course), made.course.recording.writer
    del made
    gc.collect()
    assert course() is None
    writer._at_exit()
    report = TalkReplay(str(tmp_path / "log"), MODELS, "auto", 1).run()
    assert report.torn and report.unclosed == 0 and report.error is None


def test_the_process_ends_in_the_middle_of_a_call_of_another_thread(model, tmp_path, monkeypatch):
    made = RecordedSession(tmp_path / "log", model, [9, 8, 7])
    with monkeypatch.context() as patch:
        collect_once(patch, Session, "append", collect=made.course._at_exit)
        made.append([5])
    assert not made.course.ended
    made.course._at_exit()
    assert made.course.ended and calls(tmp_path / "log") == ["append", "append"]
    made.close()
