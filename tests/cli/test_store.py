"""`m3jit run --store` and `m3jit store`."""
from __future__ import annotations

import os
import signal

import pytest

from m3jit.durable import Store
from tests.cli.command import call, start

COUNT = """
    LOADI rN, 0
go:
    ADD rN, rN, 1
    STREAM rN LINE
    FORK rS PERSIST
    COMPARE rN, 5
    IF_LESS go
    HALT
"""
ENDLESS = """
    LOADI rN, 0
    LOADI rLog, 0x7000000000000000
go:
    ADD rN, rN, 1
    MEMCPY rLog, rLine
    FORK rS PERSIST
    STREAM rN LINE
    JUMP go
"""


@pytest.fixture
def count(tmp_path):
    (tmp_path / "count.m3asm").write_text(COUNT)
    return tmp_path / "count.m3asm", tmp_path / "store"


def test_a_stopped_run_goes_on(capfd, count):
    program, folder = count
    stopped = call(capfd, "run", program, "--store", folder, "--max-steps", 15)
    assert stopped.code == 4 and stopped.out == "1\n2\n3\n"
    assert f"{folder}: version 4 is where it was stopped; the same command goes on" in stopped.err
    again = call(capfd, "run", program, "--store", folder)
    assert again == (0, "4\n5\n", f"{folder}: going on from version 4\n")
    fresh = call(capfd, "run", program, "--store", folder)
    assert fresh.code == 0 and fresh.out == "1\n2\n3\n4\n5\n" and not fresh.err


def test_input_that_was_read_is_not_read_again(capfd, tmp_path):
    program = tmp_path / "echo.m3asm"
    program.write_text("go:\nSENSE rT, USER_INPUT TEXT\nDIM rN, rT, 0\nCOMPARE rN, 0\nIF_EQUAL out\nSTREAM rT LINE\n"
                       "FORK rS PERSIST\nJUMP go\nout: HALT")
    inputs = [x for word in ("one", "two", "three") for x in ("--prompt", word)]
    assert call(capfd, "run", program, *inputs, "--store", tmp_path / "s", "--max-steps", 15).out == "one\ntwo\n"
    assert call(capfd, "run", program, *inputs, "--store", tmp_path / "s").out == "three\n"


def test_a_killed_run_goes_on(capfd, tmp_path):
    (tmp_path / "endless.m3asm").write_text(ENDLESS)
    command = ("run", tmp_path / "endless.m3asm", "--store", tmp_path / "s", "--bind", 'rLine="x"')
    process = start(*command)
    said = [process.stdout.readline() for _ in range(3)]
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait(60)
    process.stdout.close(), process.stderr.close()
    last = len([line for line in said if line.endswith(b"\n")])
    again = call(capfd, *command, "--max-steps", 12)
    first = int(again.out.split("\n")[0])
    assert first in (last, last + 1) and again.code == 4
    log = call(capfd, "store", tmp_path / "s", "--log", "run")
    assert set(log.out) == {"x"} and len(log.out) == int(again.out.split()[-1]) + (len(again.out.split()) == 2)


def test_another_program_is_refused(capfd, count, tmp_path):
    program, folder = count
    call(capfd, "run", program, "--store", folder, "--max-steps", 15)
    (tmp_path / "other.m3asm").write_text("HALT")
    refused = call(capfd, "run", tmp_path / "other.m3asm", "--store", folder)
    assert refused.code == 1 and "'run' version 4: was written by another program" in refused.err
    assert call(capfd, "run", program, "--store", folder).out == "4\n5\n"


def test_listing_checking_and_tidying(capfd, count):
    program, folder = count
    call(capfd, "run", program, "--store", folder, "--max-steps", 15)
    listed = call(capfd, "store", folder, "--verify")
    assert listed.code == 0 and listed.err == "every version is whole\n"
    assert listed.out.split("\n")[0].split() == ["name", "version", "written", "bytes"] and " 4 " in listed.out
    assert "bytes given back" in call(capfd, "store", folder, "--compact").err
    segment = sorted(folder.glob("segment-*"))[-1]
    raw = bytearray(segment.read_bytes())
    raw[600] ^= 1
    segment.write_bytes(raw)
    wrong = call(capfd, "store", folder, "--verify")
    assert wrong.code == 1 and f"run version 4: {segment}: damaged at byte" in wrong.err
    repaired = call(capfd, "store", folder, "--repair", "--verify")
    assert repaired.code == 0 and "run" not in repaired.out
    assert call(capfd, "run", program, "--store", folder).out == "1\n2\n3\n4\n5\n"


def test_removing_a_name(capfd, count):
    program, folder = count
    call(capfd, "run", program, "--store", folder, "--max-steps", 15)
    assert call(capfd, "store", folder, "--remove", "run").code == 0
    missing = call(capfd, "store", folder, "--remove", "run")
    assert missing.code == 1 and "has no 'run'; names in it: none" in missing.err


def test_what_is_refused(capfd, count, tmp_path):
    program, folder = count
    with Store.open(folder):
        busy = call(capfd, "run", program, "--store", folder)
        assert busy.code == 1 and f"{folder}: is in use by process {os.getpid()};" in busy.err
        assert "is in use by process" in call(capfd, "store", folder).err
    assert "no such file or folder" in call(capfd, "store", tmp_path / "none").err
    assert not (tmp_path / "none").exists()
    assert call(capfd, "store", folder, "--log", "run", "--verify").code == 2
    assert call(capfd, "record", program, "--store", folder, "-o", tmp_path / "log").code == 2
    assert call(capfd, "run", "default", "--prompt", "x", "--stop", "y", "--store", folder).code == 2


def test_a_model_goes_on_in_the_middle_of_its_text(capfd, tmp_path):
    command = ("run", "--prompt", "She had", "--max-tokens", 12, "--seed", 3, "--threads", 1)
    straight = call(capfd, *command)
    first = call(capfd, *command, "--store", tmp_path / "s", "--max-steps", 500)
    assert first.code == 4 and straight.out.startswith(first.out) and len(first.out) < len(straight.out)
    second = call(capfd, *command, "--store", tmp_path / "s")
    assert first.out + second.out == straight.out
