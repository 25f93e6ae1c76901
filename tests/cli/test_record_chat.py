"""m3jit chat --record, and m3jit replay and debug of what it wrote."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.command import call, environment, process, source

TEMPLATE = ("{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}{{ eos_token }}assistant:{% endif %}")
LINES = b"""Hello there
/edit => Emma
/undo-correction
/fork other
And you?
/switch other
/edit nowhere => x
/system Be brief.
/continue
Who?
/undo
//
"""


@pytest.fixture
def chat(tmp_path):
    options = ("chat", "default", "--chat-template", source(tmp_path, TEMPLATE, "plain.jinja"), "--max-tokens", "10",
               "--seed", "4", "--threads", "1")
    return lambda lines, *more: process(*options, *more, stdin=lines, timeout=300)


def test_a_chat_is_repeated_byte_for_byte(chat, capfd, tmp_path):
    log = tmp_path / "chat.log"
    first = chat(LINES, "--record", log)
    assert first.code == 1 and "is not in the text" in first.err and len(first.out.splitlines()) >= 5
    assert chat(LINES)[1:] == first[1:]
    for options in ((), ("--backend", "cpu:baseline", "--threads", "1")):
        again = call(capfd, "replay", log, *options)
        assert again.code == 0 and again.out == first.out
    assert "[resume]\n[undo_correction]\n[fork]\n> And you?\n" in again.err and again.err.startswith("> Hello there\n[")
    assert "[correct: ' Emma']\n" in again.err and "> Who?\n[undo]\n> /\n" in again.err
    assert again.err.rstrip().endswith("instructions")
    hushed = call(capfd, "replay", log, "--quiet")
    assert hushed.out == "" and hushed.err.startswith(f"{log}: agrees: ")
    seen = call(capfd, "debug", log, "-x", "t 2", "-x", "bt", "-x", "c", "-x", "snapshots")
    assert seen.code == 0 and seen.out.startswith("  say('Hello there')\n@0 context 1 ")
    assert "turn 1: " in seen.out and "say('Who?')" in seen.out and "recorded run was ended here" in seen.out
    for more, words in ((("prog.m3asm",), "it takes no PROGRAM"), (("--files", tmp_path), "wrote no --files")):
        found = call(capfd, "replay", log, *more)
        assert found.code == 2 and words in found.err


def test_a_chat_that_is_killed_and_one_that_is_damaged(chat, capfd, tmp_path):
    log = tmp_path / "chat.log"
    first = chat(b"Hello there\nAnd you?\n", "--record", log)
    data = log.read_bytes()
    log.write_bytes(data[:-20])
    again = call(capfd, "replay", log)
    assert again.code == 0 and first.out.startswith(again.out) and "the recording was cut off" in again.err
    log.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    for command in ("replay", "debug"):
        found = call(capfd, command, log)
        assert found.code == 1 and "is damaged; the file was changed after it was written" in found.err


def test_a_recorded_chat_begins_with_nothing(chat, tmp_path):
    assert chat(b"Hello there\n", "--session", tmp_path / "talk").code == 0
    log = tmp_path / "log"
    runs = ("run", source(tmp_path, "FORK rS PERSIST\nSTOP:\nJUMP STOP\n"), "--store", tmp_path / "runs")
    assert process(*runs, "--max-steps", 100).code == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for folder, words in ((tmp_path / "talk", "--record: a recorded conversation begins with nothing"),
                          (tmp_path / "runs", "is a store of runs"), (tmp_path / "other", "other: ")):
        found = chat(b"And you?\n", "--session", folder, "--record", log)
        assert found.code == 1 and found.out == "" and words in found.err
        assert not log.exists()                        # the next try may have it
    kept = chat(b"Hello there\n/switch old\nAnd you?\n", "--session", tmp_path / "new", "--record", log)
    assert kept.code == 1 and "no conversation 'old'" in kept.err and len(kept.out.splitlines()) >= 2
    assert process("replay", log, timeout=300).out == kept.out
    for target, words in ((tmp_path / "no" / "log", f"there is no folder {tmp_path / 'no'}; make it"),
                          (tmp_path, "is a folder, and a log is a file"), ("", "'' names nothing")):
        found = chat(b"Hello\n", "--record", target)
        assert found.code in (1, 2) and words in found.err and found.out == ""
    no = tmp_path / "no"
    found = chat(f"/save {tmp_path}\n/save {no / 'talk.json'}\n/save-session {no / 'talk'}\n".encode())
    assert found.code == 1 and found.err.splitlines() == [
        f"error: line 1: /save: {tmp_path}: cannot be written: Is a directory; give the name of another file",
        f"error: line 2: /save: {no / 'talk.json'}: cannot be written: No such file or directory; give the name of "
        "another file",
        f"error: line 3: {no / 'talk'}: there is no folder {no}; make it, or name another place"]
    template = tmp_path / "plain.jinja"
    found = chat(b"Hello\n", "--record", template)
    assert found.code == 2 and "overwritten; give the output another name" in found.err
    assert template.read_text() == TEMPLATE


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_an_answer_that_ctrl_c_stops_on_a_terminal(tmp_path):
    """The place where it took effect is part of the log."""
    template, log = source(tmp_path, TEMPLATE, "plain.jinja"), tmp_path / "chat.log"
    keys, there = os.openpty()
    child = subprocess.Popen([sys.executable, Path(__file__).parent / "pausing.py", template, "record", log],
                             stdin=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                             env=environment(TERM="dumb"))
    timer = threading.Timer(300, child.kill)           # of a chat that hangs
    timer.start()
    try:
        os.close(there)
        os.write(keys, b"Hello there\n/continue\n\x04")
        came = child.stdout.read1(1)                   # the answer has begun; it waits behind its twelfth token
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    finally:
        timer.cancel()
        os.close(keys)
    assert child.returncode == 0 and "[stopped; /edit OLD => NEW corrects it" in err.decode()
    again = process("replay", log, timeout=300)
    assert again.code == 0 and again.out == (came + out).decode() and "[resume]" in again.err
