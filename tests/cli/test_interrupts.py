"""Ctrl-C, SIGTERM and readers that go away: a quiet end with its own exit code, at once, nothing half written."""
from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.cli.command import COMMAND, EXAMPLES, environment, finish, process, source, start

GENERATE = ["run", "--max-tokens", "400", "-p", "The carriage stopped at the door, and", "--temp", "0"]
TICK = "LOADI r1, 0\nloop:\nSTREAM r1 LINE\nADDI r1, r1, 1\nJUMP loop\n"
SAY_THEN_LOOP = ("LOADS r1, \"ready\\n\"\nSTREAM r1\nLOADS r2, \"half\"\nSTREAM r2, FILE NAME=\"out.txt\"\nLOADI r3, 0\n"
                 "loop:\nADDI r3, r3, 1\nJUMP loop\n")


def interrupted(child: subprocess.Popen, number: int = signal.SIGINT) -> tuple:
    """Wait until it has written something, send a signal, measure how long it takes to end."""
    child.stdout.read(1)
    sent = time.monotonic()
    child.send_signal(number)
    got = finish(child, 30)
    return got, time.monotonic() - sent


def test_ctrl_c_during_generation():
    got, seconds = interrupted(start(*GENERATE))
    assert got.code == 130 and seconds < 10, (got, seconds)
    assert got.err.count("\n") == 1 and ("stopped" in got.err or "interrupted" in got.err), got.err


@pytest.mark.parametrize("backend", ["auto", "cpu", "interpreter"])
def test_ctrl_c_in_an_endless_loop(tmp_path, backend):
    prog = source(tmp_path, SAY_THEN_LOOP)
    got, seconds = interrupted(start("run", prog, "--backend", backend, "--files", tmp_path))
    assert got.code == 130 and got.err.count("\n") == 1 and seconds < 10, (got, seconds)
    assert [p.name for p in tmp_path.iterdir()] == ["prog.m3asm"]


def test_ctrl_c_while_waiting_for_input(tmp_path):
    prog = source(tmp_path, 'LOADS r1, "ready"\nSTREAM r1\nSENSE r2, USER_INPUT\nHALT\n')
    child = start("run", prog, stdin=subprocess.PIPE)
    got, seconds = interrupted(child)
    assert got.code == 130 and seconds < 10


def test_termination(tmp_path):
    prog = source(tmp_path, SAY_THEN_LOOP)
    got, seconds = interrupted(start("run", prog, "--backend", "cpu", "--files", tmp_path), signal.SIGTERM)
    assert got.code == 143 and seconds < 10, got
    assert [p.name for p in tmp_path.iterdir()] == ["prog.m3asm"]


@pytest.mark.parametrize("backend", ["cpu", "interpreter"])
def test_a_reader_that_goes_away(tmp_path, backend):
    child = start("run", source(tmp_path, TICK), "--backend", backend)
    child.stdout.read(10)
    child.stdout.close()
    code = child.wait(30)
    assert code == 141 and child.stderr.read() == b""
    child.stderr.close()


def test_a_reader_of_generated_text_that_goes_away():
    child = start(*GENERATE)
    child.stdout.read(1)
    child.stdout.close()
    assert child.wait(60) == 141 and child.stderr.read() == b""
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
    _, err = child.communicate(timeout=60)
    assert child.returncode == 141 and err == b"", err


def test_head_in_a_shell(tmp_path):
    prog = source(tmp_path, TICK)
    line = f"{' '.join(COMMAND)} run {prog} | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, env=environment(),
                          stdin=subprocess.DEVNULL)
    assert done.stdout == b"0141\n" and done.stderr == b""


def test_closed_standard_streams():
    hello = EXAMPLES / "hello.m3asm"
    for closing in ("<&-", ">&-", "2>&-"):
        done = subprocess.run(["bash", "-c", f"{' '.join(COMMAND)} run {hello} {closing}"], capture_output=True, timeout=60,
                              env=environment())
        assert b"Traceback" not in done.stderr and b"internal error" not in done.stderr, (closing, done)
        assert (done.returncode, done.stdout) == (0, b"Hello from m3jit.\n") if closing != ">&-" else done.returncode != 0


def test_a_hello_program_starts_quickly():
    """The budget is 0.4 s on a quiet machine; this bound only notices that something heavy is loaded."""
    began = time.monotonic()
    process("run", EXAMPLES / "hello.m3asm")
    assert time.monotonic() - began < 10
