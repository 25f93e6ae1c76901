"""What messages say: whose limit it was, what the number is of, what to do."""
from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from m3jit.cli import report
from m3jit.durable import Store
from m3jit.errors import UserError
from m3jit.new_file import NewFile
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


WRITES = {
    "x.txt": 'LOADS r1, "x"\nSTREAM r1, FILE NAME="x.txt"\nHALT\n',
    "x.npy": 'TENSOR r1, SHAPE=[3, 1]\nSTREAM r1, FILE NAME="x.npy"\nHALT\n',
    "x.wav": 'TENSOR r1, SHAPE=[3, 1]\nSTREAM r1, FILE FORMAT=AUDIO_PCM RATE=8000 NAME="x.wav"\nHALT\n'}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_a_file_that_the_system_does_not_take(monkeypatch, capfd, tmp_path, name, when):
    """Whatever kind of file, and whenever it fails: exit code 1, and no part of a file is left."""
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(NewFile):
        def __init__(self, path: Path):
            if when == "open":
                full()
            super().__init__(path)
            real = self.handle
            self.handle = SimpleNamespace(closed=False, **{name: getattr(real, name) for name in (
                "write", "seek", "flush", "close")})
            setattr(self.handle, when, full)
    monkeypatch.setattr("m3jit.vm.streams.NewFile", Full)
    (tmp_path / "files").mkdir()
    got = call(capfd, "run", source(tmp_path, WRITES[name]), "--files", tmp_path / "files")
    assert got.code == 1 and f"{name}: No space left on device" in got.err
    gc.collect()
    assert not list((tmp_path / "files").iterdir())
    monkeypatch.undo()
    assert call(capfd, "run", source(tmp_path, WRITES[name]), "--files", tmp_path / "files").code == 0
    assert [p.name for p in (tmp_path / "files").iterdir()] == [name]


@pytest.mark.parametrize("name", ["none.txt", "none.npy", "none.wav"])
def test_a_file_that_cannot_be_read_is_no_fault_of_the_program(capfd, tmp_path, name):
    program = source(tmp_path, f'SENSE r1, FILE NAME="{name}"\nHALT\n')
    got = call(capfd, "run", program, "--files", tmp_path)
    assert got.code == 1 and f"{name}: No such file or directory" in got.err and "trap: SENSE" in got.err
    (tmp_path / name).write_text("RIFF")
    got = call(capfd, "run", program, "--files", tmp_path)
    assert got.code == (0 if name == "none.txt" else 3)        # it is there, and damaged


def test_a_checkpoint_that_finds_no_room_is_no_fault_of_the_program(monkeypatch, capfd, tmp_path):
    program = source(tmp_path, 'FORK rS\nCHECKPOINT_SAVE rS "kept"\nHALT\n')
    with Store.open(tmp_path / "kept"):
        got = call(capfd, "run", program, "--files", tmp_path)
    assert got.code == 1 and "trap: CHECKPOINT_SAVE" in got.err and "is in use by" in got.err

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("m3jit.durable.files._OSFile.write", full)
    got = call(capfd, "run", program, "--files", tmp_path)
    assert got.code == 1 and "trap: CHECKPOINT_SAVE" in got.err and "No space left on device" in got.err


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


@pytest.mark.parametrize("moved, words", [
    (("none.gguf",), "none of the files here is the model 'old.gguf' that was used (its content has the hash cafe): "
                     "model 'none.gguf': no such file; old.gguf has other content (hash {}). Give the file that was"),
    (("none.gguf", "old.gguf", "more.gguf"), "model 'none.gguf': no such file; old.gguf has other content (hash {}); "
                                             "more.gguf has other content (hash {}). Give the file that was used"),
    ((), "was recorded with another model under the name 'old.gguf': its content has the hash cafe, the one here {}.")])
def test_why_each_file_that_was_given_is_not_the_model(moved, words):
    """Also where the log's own name still leads somewhere."""
    class Files:
        def load(self, reference, quant=""):
            if reference == "none.gguf":
                raise UserError("model 'none.gguf': no such file")
            return other
    other = SimpleNamespace(name="other")
    known = KnownModels(Files(), {"old.gguf": "cafe"}, "a.log", moved)
    with pytest.raises(UserError) as caught:
        known.load("old.gguf")
    assert words.replace("{}", fingerprint(other)) in str(caught.value)


def test_damaged_versions_are_listed_by_damage_and_say_what_repairs_them(capfd, tmp_path, monkeypatch):
    with Store.open(tmp_path / "s"):
        pass
    monkeypatch.setattr(Store, "damaged", lambda self: [
        (SimpleNamespace(name="run", number=n), "block x does not match") for n in (1, 2, 3)])
    got = call(capfd, "store", tmp_path / "s", "--verify")
    assert got.code == 1 and "run versions 1, 2, 3: block x does not match" in got.err
    assert f"`m3jit store {tmp_path / 's'} --repair` keeps what is whole" in got.err
