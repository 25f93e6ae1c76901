"""Damaged files, programs that go wrong, limits: one clear message, an exit code, no traceback, no partial file."""
from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from m3jit.models.provider import DEFAULT_MODEL
from tests.cli.command import EXAMPLES, FOREVER, call, environment, process, source

TENSORS = EXAMPLES / "tensors.m3asm"


def one_message(got, code: int, *words: str) -> None:
    """A failure with nothing on standard output and one message that holds these words."""
    assert got.code == code and got.out == "", got
    for word in words:
        assert word in got.err, (word, got.err)


# -- damaged files --------------------------------------------------------------------------------------------------

def test_truncated_and_flipped_programs(capfd, tmp_path):
    call(capfd, "asm", TENSORS, "-o", tmp_path / "good.m3b")
    data = (tmp_path / "good.m3b").read_bytes()
    bad, rng = tmp_path / "bad.m3b", random.Random(1)
    for n in (0, 3, 4, 63, 64, 200, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:n])
        one_message(call(capfd, "run", bad), 2, f"{bad}: byte ")
    for _ in range(60):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        bad.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:])
        one_message(call(capfd, "run", bad), 2, f"{bad}: byte ")        # every byte is under a checksum
    bad.write_bytes(data + b"\0")
    one_message(call(capfd, "run", bad), 2, "byte 24")


def test_damaged_sources(capfd, tmp_path):
    text = TENSORS.read_bytes()
    bad, rng = tmp_path / "bad.m3asm", random.Random(2)
    for n in range(60):
        broken = bytearray(text)
        for _ in range(3):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        bad.write_bytes(bytes(broken[:rng.randrange(20, len(broken))]))
        got = call(capfd, "run", bad, "--max-steps", "10000")
        assert got.code in (0, 2, 3), got
        if got.code == 2:
            assert str(bad) in got.err and ": error: " in got.err
    bad.write_bytes(b"HALT\nADD r\xff\n")
    one_message(call(capfd, "run", bad), 2, f"{bad}:2:6: error: byte 0xff is not UTF-8")
    bad.write_bytes(b"\0" * 100)
    assert call(capfd, "run", bad).code == 2
    bad.write_bytes(os.urandom(1 << 16))
    assert call(capfd, "run", bad).code == 2


def test_all_errors_of_a_source_at_once(capfd, tmp_path):
    bad = source(tmp_path, "ADD rX, rY\nMATVEK rY, rX, rW\nJUMP nowhere\nLOADI r300, 1\n")
    got = call(capfd, "asm", bad)
    one_message(got, 2, ":1:", ":2:", ":3:", ":4:", "did you mean MATVEC?", "4 errors")
    assert not (tmp_path / "prog.m3b").exists()


def test_damaged_models(capfd, tmp_path):
    data = DEFAULT_MODEL.read_bytes()
    bad, rng = tmp_path / "bad.gguf", random.Random(3)
    header = data.index(b"output_norm.weight") + 2000
    for n in (0, 3, 4, 23, 24, 1000, header, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:n])
        one_message(call(capfd, "run", bad, "-n", "1", "-p", "x"), 1, f"{bad}: ")
    for _ in range(24):
        at = rng.randrange(header)
        bad.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:])
        got = call(capfd, "run", bad, "-n", "1", "-p", "x", "--max-steps", "100000")
        assert got.code in (0, 1, 2, 3, 6), got
        assert got.code == 0 or str(bad) in got.err or "bad.m3asm" in got.err, got


@pytest.mark.parametrize("magic", [b"\x89M3B", b"GGUF", b""])
def test_random_bytes(capfd, tmp_path, magic):
    rng = random.Random(4)
    for n in (0, 1, 30, 100, 5000):
        (tmp_path / "x").write_bytes(magic + rng.randbytes(n))
        got = call(capfd, "run", tmp_path / "x", "-p", "x")
        assert got.code in (1, 2) or (got.code == 0 and not magic and not n), got     # an empty source does nothing


def test_what_is_not_there(capfd, tmp_path):
    one_message(call(capfd, "run", tmp_path / "none.m3b"), 1,
                "no such file, and no model of that name (models: smollm2")
    one_message(call(capfd, "run", tmp_path), 1, "is a directory")
    one_message(call(capfd, "asm", tmp_path / "none.m3asm"), 1, "none.m3asm: No such file")
    one_message(call(capfd, "run", TENSORS, "-i", tmp_path / "none.txt"), 1, "none.txt")
    (tmp_path / "main.m3b").write_bytes(b"")
    one_message(call(capfd, "run", f"{tmp_path}/maim.m3b"), 1, "did you mean main.m3b?")
    prog = source(tmp_path, '.model m "gone.gguf"\nLOADI r1, @m\nHALT\n')
    one_message(call(capfd, "run", prog), 3, "'gone.gguf': no such file", "prog.m3asm:2")


# -- programs that go wrong -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
@pytest.mark.parametrize("text, words", [
    ("ADD R102, R100, R101\nHALT\n", ("prog.m3asm:1: trap: ADD", "F32 [2, 3]", "F32 [4]")),
    ("MATVEC R102, R100, R101\nHALT\n", ("prog.m3asm:1: trap: MATVEC",)),
    ("LOADI rA, 7\nSUB rZ, R100, rA\nHALT\n", ("prog.m3asm:2: trap: SUB", "expected an integer or a float")),
    ("LOADI rA, 1\nLOADI rB, 0\nDIV rZ, rA, rB\nHALT\n", ("prog.m3asm:3: trap: DIV", "zero")),
    ("LOADI rA, 0x7FFFFFFFFFFFFFF0\nTENSOR rZ FROM=rA SHAPE=[4]\nHALT\n", ("prog.m3asm:2: trap: TENSOR",)),
    ("LOADI rA, 0x1000000000000000\nTENSOR rZ FROM=rA SHAPE=[4000] DTYPE=F32\nHALT\n", ("trap: TENSOR", "GLOBAL")),
    ("LOADI rC, 0\nASSERT rC CODE=7 MESSAGE=\"the bag is empty\"\nHALT\n", ("assertion 7 failed: the bag is empty",)),
    ("NOP\n", ("trap", "past the last instruction")),
    ("SET_DEADLINE rA, 5\nHALT\n", ("not implemented",))])
def test_traps(capfd, tmp_path, backend, text, words):
    prog = source(tmp_path, text)
    got = call(capfd, "run", prog, "-b", "R100=f32[2, 3]", "-b", "R101=f32[4]", "--backend", backend)
    one_message(got, 3, *words)


def test_a_trap_leaves_no_partial_file(capfd, tmp_path):
    prog = source(tmp_path, 'LOADS r1, "half"\nSTREAM r1, FILE NAME="out.txt"\nLOADI r2, 0\nASSERT r2\nHALT\n')
    one_message(call(capfd, "run", prog, "--files", tmp_path), 3, "assertion")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prog.m3asm"]


def test_outputs_appear_whole_or_not_at_all(capfd, tmp_path):
    one_message(call(capfd, "asm", TENSORS, "-o", tmp_path / "no/such/x.m3b"), 1, "no/such/x.m3b")
    (tmp_path / "x.m3b").write_bytes(b"old")
    one_message(call(capfd, "asm", source(tmp_path, "NOPE\n"), "-o", tmp_path / "x.m3b"), 2, "no mnemonic NOPE")
    assert (tmp_path / "x.m3b").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    got = call(capfd, "run", TENSORS, "--trace", tmp_path / "no/such/t.json")
    one_message(got, 1, "no such folder")


def test_a_full_disk(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    for command in (["run", EXAMPLES / "hello.m3asm"], ["ops"], ["disasm", "x.m3b"]):
        process("asm", EXAMPLES / "hello.m3asm", "-o", tmp_path / "x.m3b")
        with open("/dev/full", "wb") as full:
            done = subprocess.run([sys.executable, "-m", "m3jit", *map(str, command)], stdout=full,
                                  stderr=subprocess.PIPE,
                                  stdin=subprocess.DEVNULL, cwd=tmp_path, timeout=180, env=environment())
        said = done.stderr.decode()
        assert done.returncode != 0 and "No space left" in said and "Traceback" not in said and "Exception" not in said


# -- limits ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", ["interpreter", "cpu", "auto"])
def test_endless_loops_meet_their_limits(capfd, tmp_path, backend):
    prog = source(tmp_path, FOREVER)
    one_message(call(capfd, "run", prog, "--max-steps", "100000", "--backend", backend), 4, "100000 instructions",
                "max_steps")
    one_message(call(capfd, "run", prog, "--timeout", "0.3", "--backend", backend), 4, "0.3 s (timeout)", "prog.m3asm:")


def test_a_timeout_while_waiting_for_input(tmp_path):
    prog = source(tmp_path, "SENSE r1, USER_INPUT\nHALT\n")
    read, write = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-m", "m3jit", "run", str(prog), "--timeout", "0.3"], stdin=read,
                              capture_output=True, timeout=180, env=environment())
    finally:
        os.close(read)
        os.close(write)
    assert done.returncode == 4 and b"timeout" in done.stderr


def test_deadlock(capfd, tmp_path):
    prog = source(tmp_path, 'SENSE r1, RING NAME="empty"\nHALT\n')
    one_message(call(capfd, "run", prog), 5, "an item in ring empty")


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_too_much_memory(tmp_path, backend):
    huge = source(tmp_path, "TENSOR r1, SHAPE=[200000, 200000]\nADD r1, r1, r1\nSTREAM r1\nHALT\n")
    one_message(process("run", huge, "--backend", backend), 4, "out of memory", "the limit is")
    grow = source(tmp_path, "TENSOR r1, SHAPE=[1000000] FILL=1\nmore:\nCONCAT r1, r1, r1\nJUMP more\n")
    one_message(process("run", grow, "--memory-limit", "800M", "--backend", backend), 4, "out of memory",
                "this needs more than --memory-limit 800M")
    one_message(process("run", grow, "--memory-limit", "lots"), 2, "a size such as 512M")


def test_backends_that_are_not_there(capfd):
    one_message(call(capfd, "run", TENSORS, "--backend", "abacus"), 6,
                "no backend 'abacus'; available: auto, interpreter")
    for name in ("cuda", "opencl"):
        one_message(call(capfd, "run", TENSORS, "--backend", name), 6, "single kernels only", "--backend cpu")
    one_message(call(capfd, "run", TENSORS, "--backend", "cpu:sse9"), 6, "cpu:sse9")


def test_internal_errors_ask_for_a_report(capfd, monkeypatch):
    from m3jit.cli import main, programs
    monkeypatch.setattr(programs, "write_file", lambda *a: 1 / 0)
    assert main(["asm", str(TENSORS)]) == 70
    said = capfd.readouterr().err
    assert "ZeroDivisionError" in said and "please report" in said and "M3_DEBUG=1" in said and "Traceback" not in said
    monkeypatch.setenv("M3_DEBUG", "1")
    assert main(["asm", str(TENSORS)]) == 70 and "Traceback" in capfd.readouterr().err
    assert main(["run", "nothing.m3b"]) == 1 and "Traceback" in capfd.readouterr().err


def test_a_cache_that_cannot_be_written_is_no_error():
    got = process("run", "-n", "2", env=environment(M3JIT_CACHE_DIR="/proc/none"))
    assert got.code == 0 and got.out


# -- bounds of snapshots and contexts ---------------------------------------------------------------------------------

@pytest.mark.parametrize("text, options, words", [
    ("LOADI rP, 0x3000000000000000\nMEMSET rP, LEN=2000000, PATTERN=1\nFORK r2\n"
     "MEMSET rP, LEN=2000000, PATTERN=2\nFORK r3\nHALT", ("--snapshot-memory", "1M"),
     ("FORK R3", "more than the 1048576 they may (snapshot_memory)", "--snapshot-memory SIZE")),
    ("FORK r1\nFORK r2\nLOADI r1, 0\nFORK r3\nABORT r2\nABORT r1\nHALT", ("--snapshot-window", "1"),
     ("ABORT R1", "snapshot 1 was released", "older than the newest 1 (the window)", "--snapshot-window")),
    ("top: FORK r1, top\nJUMP top", ("--context-limit", "3"),
     ("3 contexts are live", "(context_limit)", "--context-limit N")),
])
def test_a_bound_that_is_reached_says_which(text, options, words, capfd, tmp_path):
    one_message(call(capfd, "run", source(tmp_path, text), *options), 3, *words)
