"""Extras that are not installed: every command and call that needs one says so first, with exit code 6."""
from __future__ import annotations

import functools
import sys

import pytest

import m3jit
from m3jit.errors import UnsupportedError
from m3jit.frontend.assembler import assemble
from m3jit.vm import regions
from tests.cli.command import EXAMPLES, call, source

HELLO = EXAMPLES / "hello.m3asm"
REFUSAL = "backend numba needs numba, which is not installed: pip install 'm3jit[numba]', or use the backend cpu, " \
          "which needs nothing more"


@pytest.fixture
def no_numba(monkeypatch):
    """A machine without numba, also where this process has loaded it."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(regions, "engine", functools.cache(regions.engine.__wrapped__))


@pytest.mark.parametrize("command", ["run {} --backend numba", "run -n 3 -p hi --backend numba",
                                     "record {} -o {}.log --backend numba",
                                     "serve --port 0 --backend numba", "perplexity default {} --backend numba"])
def test_a_command_with_a_backend_that_is_not_installed(command, no_numba, capfd, tmp_path):
    program = source(tmp_path, "LOADI r0, 5\nSTREAM r0, LINE\nHALT\n")
    got = call(capfd, *command.replace("{}", str(program)).split())
    assert (got.code, got.out, got.err.strip()) == (6, "", f"error: {REFUSAL}")
    assert not (tmp_path / "prog.m3asm.log").exists()


def test_a_log_with_a_backend_that_is_not_installed(no_numba, capfd, tmp_path):
    log = tmp_path / "a.log"
    assert call(capfd, "record", HELLO, "-o", log).code == 0
    for command in (("replay", log, "-q"), ("debug", log)):
        got = call(capfd, *command, "--backend", "numba")
        assert (got.code, got.out, got.err.strip()) == (6, "", f"error: {REFUSAL}")


def test_calls_with_a_backend_that_is_not_installed(no_numba):
    for make in (lambda: m3jit.VM(assemble("HALT"), "numba"), lambda: m3jit.load_model("default", backend="numba"),
                 lambda: m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"], backend="numba"),
                 lambda: m3jit.load_embedder("nothing", backend="numba")):
        with pytest.raises(UnsupportedError, match="numba, which is not installed: pip install"):
            make()
    compiled = m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"])
    with pytest.raises(UnsupportedError, match=r"pip install 'm3jit\[numba\]'"):
        compiled.numba("f32[n]")


def test_a_part_that_is_there_and_cannot_be_loaded(no_numba, monkeypatch, tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('wants another numpy')")
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=r"cannot be loaded \(wants another numpy\)"):
        m3jit.VM(assemble("HALT"), "numba")
    sys.modules.pop("numba", None)


@pytest.mark.parametrize("module, command, words", [
    ("starlette", "serve --port 0", "m3jit serve needs starlette: pip install 'm3jit[serve]'"),
    ("uvicorn", "serve --port 0", "m3jit serve needs uvicorn: pip install 'm3jit[serve]'"),
    ("llguidance", "run -n 3 -p hi --json-schema {}", "pip install 'm3jit[grammar]'")])
def test_other_extras(module, command, words, capfd, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    got = call(capfd, *command.replace("{}", str(tmp_path / "s.json")).split())
    assert got.code == 6 and got.out == "" and words in got.err
