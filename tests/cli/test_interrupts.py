"""Ctrl-C, SIGTERM and readers that go away: a quiet end with its own exit code, at once, nothing half written."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.cli.command import COMMAND, EXAMPLES, LONG, Result, environment, finish, source, start

GENERATE = ["run", "--max-tokens", "400", "-p", "The carriage stopped at the door, and", "--temp", "0"]
TICK = "LOADI r1, 0\nloop:\nSTREAM r1 LINE\nADDI r1, r1, 1\nJUMP loop\n"
SAY_THEN_LOOP = ("LOADS r1, \"ready\\n\"\nSTREAM r1\nLOADS r2, \"half\"\nSTREAM r2, FILE NAME=\"out.txt\"\n"
                 "LOADI r3, 0\nloop:\nADDI r3, r3, 1\nJUMP loop\n")
# A text can be complete before a test hears of its beginning, so the command itself sees to it that something happens
# then.
FIRST = """
import os, select, signal, sys, threading, time
from m3jit.cli import main, output
real = output.Output.write
def write(self, *given):
    done = real(self, *given)
    if self.items == 1:
        happens()
    return done
output.Output.write = write
def happens():
    {}
sys.exit(main(sys.argv[1:]))
"""
AT_A_TOKEN = """
import os, signal, sys
from m3jit.cli import main, steered
real = steered.Steered._take
def take(self, item):
    real(self, item)
    if len(self.text.tokens) == {}:
        os.kill(os.getpid(), signal.SIGINT)
steered.Steered._take = take
sys.exit(main(sys.argv[1:]))
"""
INTERRUPTED = "os.kill(os.getpid(), signal.SIGINT)"
INTERRUPTED_SOON = "threading.Thread(target=lambda: (time.sleep(0.001), os.kill(os.getpid(), signal.SIGINT))).start()"
READER_IS_GONE = "gone = select.poll(); gone.register(1, 0); gone.poll()"


def at_the_first_text(what: str) -> list[str]:
    return [sys.executable, "-c", FIRST.format(what)]


def interrupted(child: subprocess.Popen, number: int = signal.SIGINT) -> Result:
    """Wait until it has written something, and send a signal."""
    child.stdout.read(1)
    child.send_signal(number)
    return finish(child)


def test_ctrl_c_during_generation():
    got = finish(start(*GENERATE, command=at_the_first_text(INTERRUPTED_SOON)))
    assert got.code == 130 and 0 < len(got.out) < 900, got
    assert got.err.count("\n") == 1 and "stopped" in got.err, got.err


@pytest.fixture(scope="module")
def whole():
    found = finish(start(*GENERATE))
    assert found.code == 0 and found.err == "" and len(found.out) > 200
    return found


@pytest.mark.parametrize("more", [(), ("--stop", "#"), ("--stats",)])
def test_the_first_ctrl_c_keeps_what_was_said(whole, more):
    """It stops the machine between two instructions: text that is the beginning of the whole, and where it stood."""
    got = finish(start(*GENERATE, *more, command=at_the_first_text(INTERRUPTED)))
    assert got.code == 130
    assert whole.out.startswith(got.out) and 0 < len(got.out) < len(whole.out)
    assert re.search(r"^error: .*: stopped; .*pc 0x", got.err, re.M), got.err
    assert "tokens" in got.err if more == ("--stats",) else got.err.count("\n") == 1


def test_ctrl_c_gives_what_a_stop_string_held_back(whole):
    """All of the text might be the beginning of the stop string; none of it is lost."""
    command = [sys.executable, "-c", AT_A_TOKEN.format(7)]
    got = finish(start(*GENERATE, "--stop", whole.out[:100] + "#", command=command))
    assert got.code == 130 and whole.out.startswith(got.out) and 7 <= len(got.out) < 100, got


def test_a_second_ctrl_c_breaks_off():
    """Without a look at the machine, which may be in something long."""
    got = finish(start(*GENERATE, command=at_the_first_text(f"{INTERRUPTED}; {INTERRUPTED}")))
    assert got.code == 130 and got.err == "interrupted\n"


def test_ctrl_c_that_is_ignored_stays_so(whole):
    """As of what a shell started in the background, or nohup."""
    ignoring = [sys.executable, "-c", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" +
                FIRST.format(INTERRUPTED)]
    got = finish(start(*GENERATE, command=ignoring))
    assert got == whole


@pytest.mark.parametrize("backend", ["auto", "cpu", "interpreter"])
def test_ctrl_c_in_an_endless_loop(tmp_path, backend):
    prog = source(tmp_path, SAY_THEN_LOOP)
    got = interrupted(start("run", prog, "--backend", backend, "--files", tmp_path))
    assert got.code == 130 and got.err.count("\n") == 1, got
    assert [p.name for p in tmp_path.iterdir()] == ["prog.m3asm"]


def test_ctrl_c_while_waiting_for_input(tmp_path):
    prog = source(tmp_path, 'LOADS r1, "ready"\nSTREAM r1\nSENSE r2, USER_INPUT\nHALT\n')
    child = start("run", prog, stdin=subprocess.PIPE)
    assert interrupted(child).code == 130


def test_termination(tmp_path):
    prog = source(tmp_path, SAY_THEN_LOOP)
    got = interrupted(start("run", prog, "--backend", "cpu", "--files", tmp_path), signal.SIGTERM)
    assert got.code == 143, got
    assert [p.name for p in tmp_path.iterdir()] == ["prog.m3asm"]


@pytest.mark.parametrize("backend", ["cpu", "interpreter"])
def test_a_reader_that_goes_away(tmp_path, backend):
    child = start("run", source(tmp_path, TICK), "--backend", backend)
    child.stdout.read(10)
    child.stdout.close()
    assert child.wait(LONG) == 141 and child.stderr.read() == b""
    child.stderr.close()


def test_a_reader_of_generated_text_that_goes_away():
    child = start(*GENERATE, command=at_the_first_text(READER_IS_GONE))
    child.stdout.read(1)
    child.stdout.close()
    assert child.wait(LONG) == 141 and child.stderr.read() == b""
    child.stderr.close()


@pytest.mark.parametrize("command", [["ops"], ["ops", "SAMPLE"], ["--help"], ["doctor"]])
def test_readers_of_listings_that_go_away(command):
    read, write = os.pipe()
    os.close(read)
    try:
        child = subprocess.Popen([*COMMAND, *command], stdout=write, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                 env=environment())
    finally:
        os.close(write)
    _, err = child.communicate(timeout=LONG)
    assert child.returncode == 141 and err == b"", err


def test_head_in_a_shell(tmp_path):
    prog = source(tmp_path, TICK)
    line = f"{' '.join(COMMAND)} run {prog} | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=LONG, env=environment(),
                          stdin=subprocess.DEVNULL)
    assert done.stdout == b"0141\n" and done.stderr == b""


def test_closed_standard_streams():
    hello = EXAMPLES / "hello.m3asm"
    for closing in ("<&-", ">&-", "2>&-"):
        done = subprocess.run(["bash", "-c", f"{' '.join(COMMAND)} run {hello} {closing}"], capture_output=True,
                              timeout=LONG, env=environment())
        assert b"Traceback" not in done.stderr and b"internal error" not in done.stderr, (closing, done)
        if closing == ">&-":
            assert done.returncode != 0
        else:
            assert (done.returncode, done.stdout) == (0, b"Hello from m3jit.\n")


def test_a_hello_program_loads_nothing_heavy():
    code = ("import sys\nfrom m3jit.cli import main\nmain(sys.argv[1:])\n"
            "print(sorted({name.partition('.')[0] for name in sys.modules} & set(HEAVY)))")
    heavy = ["gguf", "jinja2", "llguidance", "llvmlite", "numba", "pyopencl", "scipy", "starlette", "tokenizers",
             "uvicorn"]
    done = finish(start("run", EXAMPLES / "hello.m3asm", command=[sys.executable, "-c", f"HEAVY = {heavy}\n{code}"]))
    assert done == (0, "Hello from m3jit.\n[]\n", "")
