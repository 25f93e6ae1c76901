"""What messages say: whose limit it was, what the number is of, what to do."""
from __future__ import annotations

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from m3jit.cli import report
from m3jit.durable import Store
from m3jit.errors import UserError
from m3jit.timetravel.record import fingerprint
from m3jit.timetravel.replay import KnownModels
from tests.cli.command import EXAMPLES, call, environment, process, source


def test_the_memory_limit_that_was_asked_for_is_named():
    got = process("run", "-p", "hi", "--memory-limit", "1M")
    assert got.code == 4 and "this needs more than --memory-limit 1M; give a larger one, or leave it out" in got.err
    assert "close other programs" not in got.err


@pytest.mark.parametrize("error", [
    MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory", "a folder"),
    ImportError("a.so: failed to map segment from shared object")], ids=["object", "system", "library"])
def test_whatever_finds_no_memory_says_so(monkeypatch, capsys, error):
    monkeypatch.setattr("m3jit.cli.memory_limit", None)
    assert report(error) == 4 and capsys.readouterr().err.startswith("error: out of memory")
    monkeypatch.setattr("m3jit.cli.memory_limit", 3 << 19)
    assert report(error) == 4
    assert capsys.readouterr().err == ("error: out of memory: this needs more than --memory-limit 1.5M; give a larger "
                                       "one, or leave it out\n")


@pytest.mark.parametrize("command, words", [
    ("serve --max-body 1", "holds no request as large as clients send; expected 1M or more"),
    ("serve --prefix-memory 1", "holds no states; expected 1M or more, or 0"),
    ("run --snapshot-memory 1", "holds no snapshots; expected 1M or more"),
    ("run --memory-limit 1", "less than a megabyte holds no program; expected 1M or more")])
def test_what_a_size_that_is_too_small_is_of(capfd, command, words):
    got = call(capfd, *command.split())
    assert got.code == 2 and words in got.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_an_output_that_fails_is_no_fault_of_the_program():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "m3jit", "run", EXAMPLES / "hello.m3asm"], stdout=full,
                              stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=180, env=environment())
    said = done.stderr.decode()
    assert done.returncode == 1 and "cannot write to standard output: No space left on device" in said, said


def test_a_program_without_instructions(capfd, tmp_path):
    for empty in ("/dev/null", source(tmp_path, "; nothing\n")):
        got = call(capfd, "run", empty)
        assert got.code == 2 and got.out == "" and "error: no instructions; a program with one at least was" in got.err


def test_a_context_larger_than_the_model(capfd):
    got = call(capfd, "run", "-p", "hi", "-n", "2", "--context", "100000000")
    assert got.code == 0 and "warning: context: 100000000 tokens are asked for, default has " in got.err
    assert "warning" not in call(capfd, "run", "-p", "hi", "-n", "2", "--context", "100").err


def test_a_model_that_was_moved_and_changed(tmp_path):
    class Files:
        def load(self, reference, quant=""):
            if reference == "moved.gguf":
                raise UserError("model 'moved.gguf': no such file")
            return other
    other = SimpleNamespace(name="other")
    found = fingerprint(other)
    known = KnownModels(Files(), {"moved.gguf": "cafe"}, "a.log", ("moved2.gguf",))
    with pytest.raises(UserError, match=f"moved2.gguf has other content .hash {found}.; model 'moved.gguf': no such"):
        known.load("moved.gguf")


def test_damaged_versions_are_listed_by_damage_and_say_what_repairs_them(capfd, tmp_path, monkeypatch):
    with Store.open(tmp_path / "s"):
        pass
    monkeypatch.setattr(Store, "damaged", lambda self: [
        (SimpleNamespace(name="run", number=n), "block x does not match") for n in (1, 2, 3)])
    got = call(capfd, "store", tmp_path / "s", "--verify")
    assert got.code == 1 and "run versions 1, 2, 3: block x does not match" in got.err
    assert f"`m3jit store {tmp_path / 's'} --repair` keeps what is whole" in got.err
