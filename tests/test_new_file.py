"""Files that appear when they are complete: what is left behind when Ctrl-C comes at any moment (nothing)."""
from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Callable

import numpy as np
import pytest

from m3jit import new_file
from m3jit.cli import terminal
from m3jit.errors import StreamError
from m3jit.isa.types import Tensor
from m3jit.new_file import NewFile
from m3jit.vm import streams
from m3jit.vm.streams import Item, open_file_sink
from tests.vm.state_model.faults import Interrupt

WATCHED = {new_file.__file__, streams.__file__, terminal.__file__}


def interrupted_at(moment: int, action: Callable[[], None]) -> bool:
    """Run `action` with a KeyboardInterrupt at the given bytecode (of the watched files); whether it came to that."""
    outcome = Interrupt(moment, watched=WATCHED).run(action)
    assert outcome is None or isinstance(outcome, KeyboardInterrupt), repr(outcome)
    return outcome is not None


def write_with_new_file(path: Path) -> None:
    with NewFile(path) as new:
        new.handle.write(b"whole")
        new.commit()


def write_with_terminal(path: Path) -> None:
    terminal.write_file(str(path), b"whole")


def write_with_sink(path: Path) -> None:
    item = Item("TENSOR", Tensor.of(np.zeros(3, np.float32))) if path.suffix == ".npy" else \
        Item("AUDIO_PCM", np.zeros((4, 1), np.float32), 8000) if path.suffix == ".wav" else Item("RAW", b"whole")
    sink = open_file_sink(path)
    done = False
    try:
        sink.write(item, True)
        done = True
    finally:
        sink.close(done)


@pytest.mark.parametrize("name, write", [("a.txt", write_with_new_file), ("a.txt", write_with_terminal),
                                         ("a.txt", write_with_sink), ("a.npy", write_with_sink),
                                         ("a.wav", write_with_sink)])
def test_an_interrupt_at_any_moment_leaves_the_whole_file_or_nothing(tmp_path, name, write):
    target = tmp_path / name
    write(target)
    whole = target.read_bytes()
    moments = 0
    for there in (False, True):
        moment = 0
        while True:
            target.unlink(missing_ok=True)
            if there:
                target.write_bytes(b"old")
            moment += 1
            came = interrupted_at(moment, lambda: write(target))
            found = sorted(os.listdir(tmp_path))
            assert found in ([name], [] if not there else [name]), (moment, found)
            if found:
                assert target.read_bytes() in ((whole, b"old") if there else (whole,)), moment
            if not came:
                break
        moments += moment
        assert target.read_bytes() == whole
    assert moments > 100


def test_what_is_not_committed_goes_with_the_object(tmp_path):
    new = NewFile(tmp_path / "a")
    new.handle.write(b"half")
    assert len(os.listdir(tmp_path)) == 1
    del new
    assert os.listdir(tmp_path) == []


def test_discard_after_commit_keeps_the_file(tmp_path):
    new = NewFile(tmp_path / "a")
    new.commit()
    new.discard()
    assert os.listdir(tmp_path) == ["a"]


def test_permissions(tmp_path):
    path = tmp_path / "a"
    write_with_new_file(path)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    write_with_new_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with NewFile(path) as new:
        new.commit(mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_that_cannot_be_taken(tmp_path):
    (tmp_path / "a").mkdir()
    with NewFile(tmp_path / "a") as new, pytest.raises(OSError):
        new.commit()
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(FileNotFoundError):
        NewFile(tmp_path / "no folder" / "a")
    with pytest.raises(StreamError, match="cannot write .*no folder"):
        open_file_sink(tmp_path / "no folder" / "a.wav")


def test_a_forked_child_does_not_remove_it(tmp_path):
    """In a process of its own: the one that runs the tests has threads, whose locks a child would find taken."""
    code = (f"import os\nfrom pathlib import Path\nfrom m3jit.new_file import NewFile\n"
            f"new = NewFile(Path({str(tmp_path / 'a')!r}))\nchild = os.fork()\n"
            "if not child:\n    new.discard()\n    os._exit(0)\n"
            "assert os.waitpid(child, 0)[1] == 0\nnew.commit()\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
    assert os.listdir(tmp_path) == ["a"]
