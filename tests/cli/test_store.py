"""`m3jit run --store` and `m3jit store`."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.cli.store import kept, opened
from m3jit.durable import Store, StoreError
from tests.cli.command import EXAMPLES, LONG, Result, call, start

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


PAIR = """
    LOADI rSum, 0
    FORK rC, maker, GREEN
go:
    SENSE rText, RING, NAME="numbers"
    SENSE rLine, rHow, USER_INPUT, NON_BLOCKING
    ADD rSum, rSum, 1
    STREAM rText
    STREAM rLine, LINE
    COMPARE rSum, 12
    IF_LESS go
    KILL_CONTEXT rC
    HALT
maker:
    ADD rN, rN, 1
    STREAM rN, RING, NAME="numbers"
    JUMP maker
"""


def test_other_contexts_and_what_is_between_them_go_on(capfd, tmp_path):
    """Stopped again and again, with a full ring and a context that waits for space in it."""
    (tmp_path / "pair.m3asm").write_text(PAIR)
    command = ("run", tmp_path / "pair.m3asm", "--bind", "rN=0", *(x for word in "abcde" for x in ("--prompt", word)))
    straight = call(capfd, *command)
    assert straight.out.split() == [f"{i}{word}" for i, word in zip(range(1, 13), [*"abcde"] + [""] * 7)]
    said, stops = "", 0
    while True:
        got = call(capfd, *command, "--store", tmp_path / "s", "--max-steps", 23)
        said += got.out
        if got.code == 0:
            break
        stops += 1
        assert got.code == 4 and f"version {stops} is where it was stopped; the same command goes on" in got.err
    assert said == straight.out and stops > 2
    assert call(capfd, *command, "--store", tmp_path / "s").out == straight.out        # it ended: it begins again


def test_ctrl_c_keeps_all_contexts(tmp_path):
    (tmp_path / "pair.m3asm").write_text(PAIR.replace("IF_LESS go", "JUMP go"))
    command = ("run", tmp_path / "pair.m3asm", "--bind", "rN=0", "--store", tmp_path / "s")
    said: list[bytes] = []
    for _ in range(2):
        process = start(*command)
        said += [process.stdout.readline() for _ in range(40)]
        process.send_signal(signal.SIGINT)
        said += process.stdout.readlines()
        err = process.stderr.read()
        assert process.wait(120) == 130 and b"is where it was stopped" in err, err
        process.stdout.close(), process.stderr.close()
    # between an item and its end of line it may have been stopped
    numbers = b"".join(said).split()
    assert numbers == [b"%d" % i for i in range(1, len(numbers) + 1)] and len(numbers) > 79


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
    assert listed.out.split("\n")[0].split() == ["name", "version", "kept", "written", "bytes"]
    assert listed.out.split("\n")[1].split()[:3] == ["run", "4", "4"]
    assert "bytes given back" in call(capfd, "store", folder, "--compact", "--keep", 2).err
    assert call(capfd, "store", folder).out.split("\n")[1].split()[:3] == ["run", "4", "2"]
    assert "--keep goes with --compact" in call(capfd, "store", folder, "--keep", 2).err
    assert call(capfd, "store", folder, "--compact").out.split("\n")[1].split()[:3] == ["run", "4", "1"]
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
    none = call(capfd, "store", folder, "--log", "nope")
    assert none.code == 1 and "no program has appended to a log 'nope'; logs in it: " in none.err
    assert call(capfd, "run", program, "--store", folder, "--max-steps", 8).code == 4
    begun = call(capfd, "record", program, "--store", folder, "-o", tmp_path / "log")
    assert begun.code == 1 and f"{folder}: a run would go on from version 2, and the log of a run begins" in begun.err
    assert call(capfd, "run", "default", "--prompt", "x", "--stop", "y", "--store", folder).code == 2


def test_a_model_goes_on_in_the_middle_of_its_text(capfd, tmp_path):
    command = ("run", "--prompt", "She had", "--max-tokens", 12, "--seed", 3, "--threads", 1)
    straight = call(capfd, *command)
    first = call(capfd, *command, "--store", tmp_path / "s", "--max-steps", 500)
    assert first.code == 4 and straight.out.startswith(first.out) and len(first.out) < len(straight.out)
    second = call(capfd, *command, "--store", tmp_path / "s")
    assert first.out + second.out == straight.out


def test_a_model_that_is_killed_goes_on_at_its_last_checkpoint(capfd, tmp_path):
    command = ("run", "--prompt", "She had", "--max-tokens", "14", "--seed", "3", "--threads", "1")
    stored = (*command, "--store", str(tmp_path / "s"), "--checkpoint-every", "4")
    dying = ("import os, signal, sys\nfrom m3jit.cli import main\nfrom m3jit.durable.store import Store\n"
             "put, made = Store.put, []\ndef counted(*given):\n    made.append(put(*given))\n"
             "    if len(made) == 3:\n        os.kill(os.getpid(), signal.SIGKILL)\n    return made[-1]\n"
             "Store.put = counted\nmain(sys.argv[1:])")
    first = subprocess.run([sys.executable, "-c", dying, *stored], capture_output=True, text=True, timeout=300)
    straight, second = call(capfd, *command), call(capfd, *stored)
    assert first.returncode == -signal.SIGKILL and "going on from version 3" in second.err
    assert first.stdout and second.out and first.stdout + second.out == straight.out
    assert call(capfd, *command, "--checkpoint-every", "4").code == 2
    assert call(capfd, "run", EXAMPLES / "hello.m3asm", "--store", tmp_path / "t", "--checkpoint-every", "4").code == 2


def test_another_prompt_or_seed_is_refused(capfd, tmp_path):
    """A run that went on with them would go on with the old ones."""
    store = tmp_path / "s"

    def told(*more, prompt="She had"):
        return call(capfd, "run", "--prompt", prompt, "--max-tokens", 12, "--threads", 1, "--store", store, *more)
    straight = call(capfd, "run", "--prompt", "She had", "--max-tokens", 12, "--threads", 1, "--seed", 3)
    first = told("--seed", 3, "--max-steps", 500)
    assert first.code == 4
    anew = ("Give it the same to go on, name another folder, or forget it and begin anew "
            f"(m3jit store {store} --remove run)")
    for more, prompt, words in (
            (("--seed", 3), "Name three rivers.", "the prompt was 'She had' and is 'Name three rivers.' here."),
            (("--seed", 4), "She had", "--seed was '3' and is '4' here."),
            ((), "She had", "--seed was '3' and is 'the default' here."),
            ((), "He", "the prompt was 'She had' and is 'He' here; --seed was '3' and is 'the default' here.")):
        refused = told(*more, prompt=prompt)
        assert refused.code == 1 and refused.out == ""
        assert f"{store}: version 1: is of a run that was given something else: {words} Nothing has run. {anew}" in \
            refused.err
    second = told("--seed", 3)
    assert f"{store}: going on from version 1" in second.err and first.out + second.out == straight.out


ECHO = "go:\nSENSE rT, USER_INPUT TEXT\nSTREAM rT LINE\nADD rN, rN, 1\nFORK rS PERSIST\nJUMP go"


def stopped_echo(tmp_path, *more: Any, stdin: Any = subprocess.DEVNULL) -> Result:
    """Five instructions, one item, of a program that says what it reads; the run goes on if it may."""
    (tmp_path / "echo.m3asm").write_text(ECHO)
    process = start("run", tmp_path / "echo.m3asm", "--store", tmp_path / "s", "--bind", "rN=0", "--max-steps", 5,
                    *more, stdin=stdin)
    out, err = process.communicate(timeout=LONG)
    return Result(process.returncode, out.decode(), err.decode()).clean()


def test_other_input_or_registers_are_refused(capfd, tmp_path):
    long = "x" * 50
    (tmp_path / "text").write_text("two")
    np.save(tmp_path / "v.npy", np.zeros(3, np.float32))
    same = ("-p", long, "-i", tmp_path / "text", "--bind", "rN=0", "--bind", f"rV=@{tmp_path / 'v.npy'}")
    (tmp_path / "echo.m3asm").write_text(ECHO.replace("STREAM rT LINE", "STREAM rT LINE\nMOV rW, rV"))

    def again(*given: Any) -> Result:
        return call(capfd, "run", tmp_path / "echo.m3asm", "--store", tmp_path / "s", "--max-steps", 7, *given)
    assert again(*same).out == long + "\n"
    excerpt = "'" + "x" * 40 + "'... ({} long)"
    for given, words in (
            (("-p", long + "y", *same[2:]), f"input 1 was {excerpt.format(50)} and is {excerpt.format(51)} here (they "
                                            "begin alike and differ further on). Nothing has run."),
            ((*same[:2], *same[4:]), "input 2 was 'two' and is not given here. Nothing has run."),
            (("-p", "more", *same), "input 3 was not given and is 'two' here"),
            ((*same[:5], "rN=1", *same[6:]), "--bind rN was '0' and is '1' here. Nothing has run.")):
        refused = again(*given)
        assert refused.code == 1 and not refused.out and words in refused.err
    np.save(tmp_path / "v.npy", np.ones(3, np.float32))
    changed = again(*same)
    name = f"'@{tmp_path / 'v.npy'}'"
    assert changed.code == 1 and not changed.out
    assert f"--bind rV was {name} and is {name} here; its content is another. Nothing has run" in changed.err
    np.save(tmp_path / "a_copy.npy", np.zeros(3, np.float32))
    assert again(*same[:-1], f"rV=@{tmp_path / 'a_copy.npy'}").out.startswith("two\n")


def test_a_file_as_standard_input_is_compared_and_a_pipe_is_not(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\nthree\n")
    (tmp_path / "b").write_text("one\nzwei\n")
    with open(tmp_path / "a") as a:
        first = stopped_echo(tmp_path, "--lines", stdin=a)
    assert first.out == "one\n" and first.code == 4
    with open(tmp_path / "b") as b:
        other = stopped_echo(tmp_path, "--lines", stdin=b)
    assert other.code == 1 and not other.out and \
        "standard input was 'one\\ntwo\\nthree\\n' and is 'one\\nzwei\\n' here. Nothing" in other.err
    assert "standard input was 'one\\ntwo\\nthree\\n' and is not given here" in stopped_echo(tmp_path, "--lines").err
    with open(tmp_path / "a") as a:
        assert "--lines was 'yes' and is not given here. Nothing" in stopped_echo(tmp_path, stdin=a).err
    with open(tmp_path / "a") as a, subprocess.Popen(["cat"], stdin=a, stdout=subprocess.PIPE) as pipe:
        assert stopped_echo(tmp_path, "--lines", stdin=pipe.stdout).out == "two\n"
    with open(tmp_path / "b") as b:                    # what came through a pipe leaves what was known of it
        other = stopped_echo(tmp_path, "--lines", stdin=b)
    assert other.code == 1 and not other.out and "standard input was 'one\\ntwo\\nthree\\n' and is" in other.err
    with open(tmp_path / "a") as a:
        assert stopped_echo(tmp_path, "--lines", stdin=a).out == "three\n"


def test_a_version_that_does_not_say_what_its_run_was_given(capfd, count):
    program, folder = count
    for notes, words in (([0], "as another version of m3jit wrote it; name another folder, or forget it and begin "),
                         ([0, [["--seed", 1]]], "as another version of m3jit wrote it"),
                         ([0, None], "(it was not started by m3jit run), so it is not known whether this is the same")):
        with Store.open(folder) as store:
            store.commit(m3jit.VM(m3jit.load(program)), "run", notes)
        refused = call(capfd, "run", program, "--store", folder)
        assert refused.code == 1 and ": does not say what its run was given" in refused.err and words in refused.err
    with Store.open(folder) as store:                  # from Python it is not compared
        vm = m3jit.VM(m3jit.load(program), checkpoints=m3jit.Checkpoints(store))
        assert vm.checkpoints.resume(vm).version.number == 3


def test_the_log_of_a_run_that_ended_stays(capfd, tmp_path):
    (tmp_path / "says.m3asm").write_text(COUNT.replace("STREAM rN LINE", "MEMCPY rLog, rLine"))
    command = ("run", tmp_path / "says.m3asm", "--store", tmp_path / "s", "--bind", "rLog=0x7000000000000000", "--bind")
    for letter, steps, log in (("a", 1000, "aaaaa"), ("b", 8, "aaaaabb"), ("b", 1000, "aaaaabbbbb"),
                               ("d", 1000, "aaaaabbbbbddddd")):
        call(capfd, *command, f'rLine="{letter}"', "--max-steps", steps)
        assert call(capfd, "store", tmp_path / "s", "--log", "run").out == log


# -- signals in the middle of instructions ----------------------------------------------------------------------------
TWINS = """
go:
    ADD rN, rN, 1
    STREAM rN
    ADD rM, rM, 1
    COMPARE rN, 4
    IF_LESS go
    HALT
"""


def twins(disk: Any) -> tuple[Any, list[str]]:
    vm = m3jit.VM(m3jit.assemble(TWINS), backend="interpreter", checkpoints=disk)
    said: list[str] = []
    vm.set_sink("OUTPUT", said.append)
    vm.set("rN", 0)
    vm.set("rM", 0)
    return vm, said


def behind(vm: Any, index: int, times: int, signals: list[int]) -> None:
    """Signals arrive when an instruction has had its effect and the interpreter has not moved on yet."""
    vm.interpreter._prepare(index)
    in_slow = vm.interpreter.handlers[index].__name__ == "_slow"
    handlers = vm.interpreter.slow if in_slow else vm.interpreter.handlers
    real, left = handlers[index], times

    def handler(ctx: Any) -> Any:
        nonlocal left
        after = real(ctx)
        left -= 1
        for number in signals if left == 0 else ():
            signal.raise_signal(number)
        return after
    handlers[index] = handler


def terminate(*_: Any) -> None:
    raise SystemExit(143)


@pytest.mark.parametrize("number, error", [(signal.SIGINT, m3jit.Interrupted), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("index", range(5))
def test_a_signal_behind_the_effect_of_an_instruction(tmp_path, index, number, error):
    """What is gone on with is a state of the program: no instruction is done twice, none is left out."""
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        said: list[str] = []
        with opened(tmp_path / "s") as disk:
            vm, out = twins(disk)
            behind(vm, index, 2, [number])
            with pytest.raises(error), kept(vm, tmp_path / "s"):
                vm.run()
            said += out
        with opened(tmp_path / "s") as disk:
            vm, out = twins(disk)
            with kept(vm, tmp_path / "s"):
                vm.run()
            assert vm.get("rN") == vm.get("rM") == 4 and disk.store.names() == []
        assert said + out == ["1", "2", "3", "4"] and len(said) in (1, 2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_ctrl_c_breaks_a_run_off(tmp_path):
    """The command makes no version of that, but its caller may: the instruction it came in has taken effect, or not."""
    with opened(tmp_path / "s") as disk:
        vm, said = twins(disk)
        behind(vm, 1, 2, [signal.SIGINT, signal.SIGINT])
        with pytest.raises(KeyboardInterrupt), kept(vm, tmp_path / "s"):
            vm.run()
        assert disk.store.names() == [] and vm.broken_off is not None and vm.error.__notes__ == [str(vm.broken_off)]
        disk.store.commit(vm, "mine")
        other, more = twins(disk)
        disk.store.restore(other, "mine")
        other.run()
        assert other.get("rN") == other.get("rM") == 4 and said + more == ["1", "2", "3", "4"]


def test_sigterm_leaves_a_version(capfd, tmp_path):
    (tmp_path / "endless.m3asm").write_text(ENDLESS)
    command = ("run", tmp_path / "endless.m3asm", "--store", tmp_path / "s", "--bind", 'rLine="x"')
    process = start(*command)
    said = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    said += process.stdout.readlines()
    assert process.wait(60) == 143 and b"is where it was stopped; the same command goes on" in process.stderr.read()
    process.stdout.close(), process.stderr.close()
    assert call(capfd, *command, "--max-steps", 8).out.startswith(f"{len(said) + 1}\n")


@pytest.mark.parametrize("option", [("--compact",), ("--repair",), ("--remove", "run")])
def test_tidying_makes_no_store(capfd, tmp_path, option):
    (tmp_path / "empty").mkdir()
    refused = call(capfd, "store", tmp_path / "empty", *option)
    assert refused == call(capfd, "store", tmp_path / "empty") and refused.code == 1
    assert "is not a store: it has no log" in refused.err and not list((tmp_path / "empty").iterdir())
    assert "no such file or folder" in call(capfd, "store", tmp_path / "none", *option).err
    assert not (tmp_path / "none").exists()


def test_conversations_and_runs_have_folders_of_their_own(capfd, count, tmp_path):
    program, runs = count
    call(capfd, "run", program, "--store", runs, "--max-steps", 15)
    (tmp_path / "plain.jinja").write_text("{{ messages[-1].content }}")
    chat = ("chat", "default", "--chat-template", tmp_path / "plain.jinja", "--threads", 1, "--session")
    refused = call(capfd, *chat, runs)
    assert refused.code == 1 and f"{runs}: is a store of runs, made by a program (m3jit run --store" in refused.err
    with Store.open(tmp_path / "talk") as store, m3jit.Session("default", "Hello", threads=1) as session:
        session.save(store, "main")
    refused = call(capfd, "run", program, "--store", tmp_path / "talk")
    assert refused.code == 1 and "talk: is a store of conversations, made by m3jit chat --session" in refused.err
    assert call(capfd, "run", program, "--store", runs).out == "4\n5\n"
