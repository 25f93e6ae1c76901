"""m3jit record, replay and debug on the command line."""
from __future__ import annotations

import os
import signal

import pytest

from tests.cli.command import EXAMPLES, call, finish, process, source, start
from tests.durable.holders import held_by

CLOCK = "SENSE rN, USER_INPUT\nSTREAM rN, LINE\nCYCLES_COUNT rT\nSTREAM rT, LINE\nHALT\n"


def test_a_run_is_recorded_and_repeated(capfd, tmp_path):
    prog, log = source(tmp_path, CLOCK), tmp_path / "run.log"
    first = call(capfd, "record", prog, "--prompt", "hello", "-o", log)
    assert first.code == 0 and first.out.startswith("hello\n") and first.err == ""
    prog.unlink()                                      # the log holds the program
    for options in ((), ("--backend", "interpreter"), ("--threads", "1")):
        again = call(capfd, "replay", log, *options)
        assert again.out == first.out and again.code == 0
        assert again.err == f"{log}: agrees: 4 events, 3 outputs and states compared, 5 instructions\n"
    assert call(capfd, "replay", log, "--quiet").out == ""


def test_the_default_model_is_recorded_on_one_backend_and_repeated_on_others(capfd, tmp_path):
    log = tmp_path / "run.log"
    first = call(capfd, "record", "-p", "Emma was", "--max-tokens", "4", "--seed", "5", "--threads", "2", "-o", log)
    assert first.code == 0 and log.stat().st_size < 8000
    for options in (("--threads", "1"), ("--backend", "cpu:baseline")):
        again = call(capfd, "replay", log, *options)
        assert again.out == first.out and "agrees" in again.err and again.code == 0


def test_registers_inputs_and_files_are_in_the_log(capfd, tmp_path):
    prog = source(tmp_path, 'SENSE rA, USER_INPUT\nSENSE rB, USER_INPUT\nSENSE rC, rS, USER_INPUT\nSTREAM rA, LINE\n'
                            'STREAM rB, LINE\nSTREAM rS, LINE\nSTREAM rX, LINE\nSENSE rF, FILE, NAME="in.txt"\n'
                            'STREAM rF\nHALT\n')
    (tmp_path / "in.txt").write_text("file")
    (tmp_path / "one").write_text("from a file\n")
    log = tmp_path / "run.log"
    first = call(capfd, "record", prog, "-p", "text", "-i", tmp_path / "one", "--bind", "rX=[1, 2]", "--files",
                 tmp_path, "-o", log)
    (tmp_path / "in.txt").unlink()
    assert first.out == "text\nfrom a file\n-1\n[1, 2]\nfile" and call(capfd, "replay", log).out == first.out


def test_a_trap_is_repeated(capfd, tmp_path):
    prog, log = source(tmp_path, "LOADI r1, 5\nSTREAM r1, LINE\nGETELEM r2, r1\nHALT\n"), tmp_path / "run.log"
    first = call(capfd, "record", prog, "-o", log)
    assert first.code == 3 and "trap" in first.err
    again = call(capfd, "replay", log)
    assert again.out == "5\n" and again.code == 0 and "the run ended with:" in again.err and "GETELEM" in again.err


def test_a_killed_recording_is_repeated_as_far_as_it_came(capfd, tmp_path):
    """SIGKILL in the middle of an endless run."""
    prog = source(tmp_path, "LOADI r1, 0\nloop:\nADDI r1, r1, 1\nSTREAM r1, LINE\nJUMP loop\n")
    log = tmp_path / "run.log"
    child = start("record", prog, "-o", log, "--backend", "interpreter")
    while not (log.exists() and log.stat().st_size > 4_000):
        assert child.poll() is None
        child.stdout.read1(1 << 16)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    again = call(capfd, "replay", log, "--quiet")
    assert again.code == 0 and "agrees as far as it goes; the recording was cut off" in again.err
    looked = call(capfd, "debug", log, "-x", "c", "-x", "back 3", "-x", "print r1")
    assert looked.code == 0 and "the log ends after" in looked.out and "r1 = " in looked.out
    assert looked.err == f"{log}: the recording was cut off, or goes on: the log has no end\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_recording_is_whole(capfd, tmp_path, number):
    prog = source(tmp_path, "LOADI r1, 0\nloop:\nADDI r1, r1, 1\nSTREAM r1, LINE\nJUMP loop\n")
    log = tmp_path / "run.log"
    child = start("record", prog, "-o", log, "--backend", "interpreter")
    while not (log.exists() and log.stat().st_size > 4_000):
        assert child.poll() is None
        child.stdout.read1(1 << 16)
    at_once = call(capfd, "record", prog, "-o", log)
    assert at_once.code == 1 and not at_once.out
    holder = held_by(child.pid, tmp_path)
    assert f"{log}: is in use by {holder}, which records into it; give this log another name" in at_once.err
    child.send_signal(number)
    done = finish(child)
    assert done.code in (130, 143)
    later = call(capfd, "record", prog, "-o", log)
    assert later.code == 1 and not later.out
    assert f"{log}: is there already, and a log is not written over another file; give the log another" in later.err
    again = call(capfd, "replay", log, "--quiet")
    assert again.code == 0 and "agrees: " in again.err


def test_a_log_is_not_what_it_should_be(capfd, tmp_path):
    prog, log = source(tmp_path, CLOCK), tmp_path / "run.log"
    call(capfd, "record", prog, "--prompt", "hello", "-o", log)
    other = source(tmp_path, "HALT\n", "other.m3asm")
    found = call(capfd, "replay", log, other)
    assert found.code == 1 and "is a log of another program than" in found.err
    assert call(capfd, "replay", log, prog).code == 0
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "bad.log").write_bytes(data)
    for command in ("replay", "debug"):
        found = call(capfd, command, tmp_path / "bad.log")
        assert found.code == 1 and "is damaged; the file was changed after it was written" in found.err
    (tmp_path / "torn.log").write_bytes(log.read_bytes()[:-10])
    assert "cut off" in call(capfd, "replay", tmp_path / "torn.log").err
    found = call(capfd, "replay", prog)
    assert found.code == 1 and "is no log of a run; `m3jit record` makes one" in found.err
    found = call(capfd, "replay", tmp_path / "gone.log")
    assert found.code == 1 and "No such file" in found.err


def test_a_model_with_other_content_is_refused(capfd, tmp_path, monkeypatch):
    """The log names it relative to the folder; another file lies there now."""
    from m3jit.models.provider import DEFAULT_MODEL
    data = bytearray(DEFAULT_MODEL.read_bytes())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").write_bytes(data)
    assert call(capfd, "record", "m.gguf", "-p", "It is", "--max-tokens", "3", "-o", "run.log").code == 0
    data[-1000] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    found = call(capfd, "replay", "run.log")
    assert found.code == 1 and "was recorded with another model under the name 'm.gguf'" in found.err
    assert call(capfd, "replay", "run.log", "--model", DEFAULT_MODEL).code == 0
    (tmp_path / "m.gguf").unlink()
    found = call(capfd, "replay", "run.log")
    assert found.code == 1 and "m.gguf" in found.err
    assert call(capfd, "replay", "run.log", "--model", DEFAULT_MODEL).code == 0


def test_a_log_of_another_version_is_refused_by_both(capfd, tmp_path, monkeypatch):
    import m3jit
    log = tmp_path / "run.log"
    call(capfd, "record", source(tmp_path, CLOCK), "--prompt", "hello", "-o", log)
    version = m3jit.__version__
    monkeypatch.setattr(m3jit, "__version__", "9.9")
    for command in ("replay", "debug"):
        found = call(capfd, command, log)
        assert found.code == 1 and found.out == ""
        assert found.err == (f"error: {log}: was recorded by m3jit {version}, this is 9.9; results of another version "
                             "may differ. --any-version tries it, and says where they do\n")
    assert "agrees" in call(capfd, "replay", log, "--any-version").err
    assert "the end: the program has ended" in call(capfd, "debug", log, "--any-version", "-x", "c").out


def test_a_run_that_differs_says_where(capfd, tmp_path, monkeypatch):
    from m3jit.vm.recording import Output
    prog, log = source(tmp_path, "LOADI r1, 7\nSTREAM r1, LINE\nHALT\n"), tmp_path / "run.log"
    of = Output.of.__func__
    monkeypatch.setattr(Output, "of",
                        classmethod(lambda cls, sink, item: of(cls, sink, item)._replace(head=b"8\n", digest=1)))
    call(capfd, "record", prog, "-o", log)
    monkeypatch.undo()
    found = call(capfd, "replay", log)
    assert found.code == 7 and "context 1 after 1 instructions" in found.err and "prog.m3asm:2" in found.err
    assert r"writes '7\n' to OUTPUT; the log has '8\n' to OUTPUT" in found.err


@pytest.mark.parametrize("args, message", [
    (("record", "hello"), "Missing option '--output'"),
    (("debug", "default", "-i", "-"), "standard input is where the debugger's commands come from"),
    (("debug", "log", "--prompt", "x"), "a log has the options of the run it recorded"),
    (("debug", "default", "--model", "x"), "says where a log's model lies now"),
    (("debug", "default", "--any-version"), "--any-version: is of logs, and WHAT is none"),
    (("replay", "log", "--files", "nowhere"), "no such folder")])
def test_wrong_usage(capfd, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    call(capfd, "record", source(tmp_path, "HALT\n"), "-o", "log")
    found = call(capfd, *args)
    assert found.code == 2 and message in found.err


def test_a_log_is_not_written_over_what_is_read(capfd, tmp_path):
    prog = source(tmp_path, "HALT\n")
    assert call(capfd, "record", prog, "-o", prog).code == 2 and prog.read_text() == "HALT\n"
    folder = tmp_path / "no"
    for log, code, words in ((folder / "log", 1, f"{folder / 'log'}: cannot be written: there is no folder {folder}; "
                              "make it, or write the log to another place"),
                             (tmp_path, 1, f"{tmp_path}: is a folder, and a log is a file; give the name of a file in"),
                             ("", 2, "'' names nothing; give the name of a file or folder")):
        found = call(capfd, "record", prog, "-o", log)
        assert found.code == code and words in found.err and found.out == ""
    found = call(capfd, "run", prog, "--store", "")
    assert found.code == 2 and "'' names nothing" in found.err
    found = call(capfd, "run", prog, "--store", folder / "store")
    assert found.code == 1 and f"there is no folder {folder}; make it, or name another place" in found.err


@pytest.mark.parametrize("more, code, words", [
    (["--show", "rNope"], 2, "no register rNope"), (["--bind", "rNope=3"], 2, "no register rNope"),
    (["--print-ir-after", "magic"], 2, "no such pass"), (["--backend", "magic"], 6, "no backend 'magic'"),
    (["--files", "no-such-folder"], 2, "no such folder"), (["--input", "no-such-file"], 1, "No such file"),
    (["--trace", "no-such-folder/trace"], 1, "there is no such folder"), (["--trace", "log"], 2, "is the log too"),
    (["--store", "prog.m3asm"], 1, "is not a folder"), (["--temp", "0"], 2, "--temp: belongs to model files"),
    (["--store", "versions"], 1, "the log of a run begins at its beginning")])
def test_a_refused_command_leaves_no_log(capfd, tmp_path, monkeypatch, more, code, words):
    monkeypatch.chdir(tmp_path)
    source(tmp_path, "FORK rS PERSIST\nSTOP:\nJUMP STOP\n")
    assert call(capfd, "run", "prog.m3asm", "--store", "versions", "--max-steps", 100).code == 4
    before = {path.name for path in tmp_path.iterdir()}
    found = call(capfd, "record", "prog.m3asm", "-o", "log", "--max-steps", 50, *more)
    assert found.code == code and words in found.err and found.out == "", found
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("more, code, words", [
    (["--chat"], 1, "has no chat template"), (["--lora", "no-such-file"], 1, "no such file"),
    (["--context", "1"], 1, "context"), (["--stop", "x", "--store", "versions"], 2, "decided outside the program"),
    (["--regex", "("], 1, "regex parse error"), (["--json-schema", "prog.m3asm"], 1, "is no JSON")])
def test_a_refused_recording_of_a_model_leaves_no_log(capfd, tmp_path, monkeypatch, more, code, words):
    if more[0] == "--regex":
        pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    monkeypatch.chdir(tmp_path)
    source(tmp_path, "HALT\n")
    found = call(capfd, "record", "default", "-p", "She had been", "-o", "log", *more)
    assert found.code == code and words in found.err and found.out == "", found
    assert [path.name for path in tmp_path.iterdir()] == ["prog.m3asm"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_log_that_cannot_even_begin_says_that_nothing_ran(capfd, tmp_path):
    found = call(capfd, "record", source(tmp_path, CLOCK), "--prompt", "hello", "-o", "/dev/full")
    assert found.code == 1 and found.out == "" and found.err == (
        "error: /dev/full: cannot be written: No space left on device; nothing was recorded, and nothing ran. Make "
        "room there, or write the log to another place\n")


def test_the_debugger_takes_commands_from_a_script(tmp_path):
    commands = b"break fits\nc\nwatch rSum\nc\nback 5\nc\nrc\nsnapshots\nnonsense\nquit\nnever\n"
    found = process("debug", EXAMPLES / "rollback.m3asm", stdin=commands)
    assert found.code == 0 and "(m3jit) break fits" in found.out and "error: no command 'nonsense'" in found.out
    assert "watchpoint 2: rSum has changed: " in found.out and "never" not in found.out.splitlines()


def test_the_debugger_shows_a_recorded_run(capfd, tmp_path):
    prog, log = source(tmp_path, CLOCK), tmp_path / "run.log"
    wrote = call(capfd, "record", prog, "--prompt", "hello", "-o", log).out.splitlines()
    found = call(capfd, "debug", log, "-x", "c", "-x", "bt", "-x", "bt", "-x", "t", "-x", "output")
    assert found.code == 0 and "wrote 'hello\\n' to OUTPUT" in found.out and wrote[1] in found.out
    assert "the end: the program has ended" in found.out


def test_the_debugger_and_the_default_model(capfd):
    found = call(capfd, "debug", "-p", "Emma was", "--max-tokens", "4", "--temp", "0", "-x", "t 2", "-x", "bt", "-x",
                 "l", "-x", "diff @40", "-x", "state S0 0")
    assert found.code == 0 and "wrote ' " in found.out and "<layer_0>" in found.out and "rows" in found.out
    assert "keys [" in found.out


def test_a_program_that_traps_at_once(capfd, tmp_path):
    found = call(capfd, "debug", source(tmp_path, "GETELEM r1, r0\nHALT\n"), "-x", "s", "-x", "back", "-x", "where",
                 "-x", "list")
    assert found.code == 0 and "the end: " in found.out and "never written" in found.out
    assert "@0 context 1 0x0000 prog.m3asm:1" in found.out
