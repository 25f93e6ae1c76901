"""Extras that are not installed: every command and call that needs one says so first, with exit code 6."""
from __future__ import annotations

import functools
import sys

import pytest

import m3jit
from m3jit.backends.cpu import target
from m3jit.errors import UnsupportedError
from m3jit.frontend.assembler import assemble
from m3jit.models.provider import Models
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


@pytest.fixture
def no_avx512(monkeypatch):
    """A CPU without AVX-512, also where this process has compiled for it."""
    monkeypatch.setattr(regions, "engine", functools.cache(regions.engine.__wrapped__))
    monkeypatch.setattr(target, "host", lambda: ("x86_64-unknown-linux-gnu", "old", frozenset({"sse2"})))
    monkeypatch.setattr(target, "available_levels", target.available_levels.__wrapped__)


REFUSED = [(["--backend", "cpu:avx512"], "CPU level 'avx512' cannot run on this host (old): it lacks avx512f"),
           (["--backend", "numba"], REFUSAL), (["--backend", "abacus"], "no backend 'abacus'; available: auto"),
           (["--backend", "opencl"], "backend opencl: runs single kernels only")]


@pytest.mark.parametrize("command", [
    "run -n 3 -p hi", "run {}/model.gguf -p hi", "run -p hi --store {}/store", "run {}/prog.m3asm --store {}/store",
    "record -p hi -o {}/log", "chat default --session {}/store", "chat default --record {}/log",
    "serve --port 0", "serve {}/model.gguf --port 0", "embed {}/model.gguf hi", "perplexity default {}/prog.m3asm"])
@pytest.mark.parametrize("options, words", REFUSED)
def test_a_backend_is_refused_before_anything_is_loaded(no_numba, no_avx512, monkeypatch, capfd, tmp_path, command,
                                                        options, words):
    """No model is loaded, no store made, no log begun."""
    source(tmp_path, "LOADI r0, 5\nHALT\n")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    loaded = []
    monkeypatch.setattr(Models, "load", lambda self, reference, quant="": loaded.append(reference) or 1 / 0)
    before = sorted(tmp_path.iterdir())
    got = call(capfd, *command.replace("{}", str(tmp_path)).split(), *options)
    assert got.code == 6 and got.out == "" and got.err.startswith(f"error: {words}"), got
    assert loaded == [] and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("make", [
    lambda backend: m3jit.Conversation("default", backend=backend),
    lambda backend: m3jit.Session("default", backend=backend),
    lambda backend: m3jit.load_model("default", backend=backend),
    lambda backend: m3jit.load_embedder("default", backend=backend)])
def test_a_call_with_a_backend_is_refused_before_anything_is_loaded(no_avx512, monkeypatch, make):
    monkeypatch.setattr(Models, "load", lambda self, reference, quant="": 1 / 0)
    with pytest.raises(UnsupportedError, match="it lacks avx512f"):
        make("cpu:avx512")


def test_a_level_of_the_environment_is_checked_too(no_avx512, monkeypatch, capfd):
    monkeypatch.setattr(Models, "load", lambda self, reference, quant="": 1 / 0)
    for level, words in (("avx512", "it lacks avx512f"), ("fast", "unknown CPU level 'fast'")):
        regions.engine.cache_clear()
        monkeypatch.setenv("M3JIT_CPU", level)
        for backend in ("auto", "cpu"):
            got = call(capfd, "run", "-p", "hi", "--backend", backend)
            assert got.code == 6 and words in got.err


@pytest.mark.parametrize("command", ["replay {} -q", "debug {} -x c"])
def test_a_log_is_refused_before_its_models_are_loaded(no_avx512, monkeypatch, capfd, tmp_path, command):
    log = tmp_path / "a.log"
    assert call(capfd, "record", "-p", "hi", "-n", 2, "--threads", 1, "-o", log, "--backend", "interpreter").code == 0
    monkeypatch.setattr(Models, "load", lambda self, reference, quant="": 1 / 0)
    got = call(capfd, *command.format(log).split(), "--backend", "cpu:avx512")
    assert got.code == 6 and got.out == "" and "it lacks avx512f" in got.err


@pytest.mark.parametrize("module, command, words", [
    ("starlette", "serve --port 0", "m3jit serve needs starlette: pip install 'm3jit[serve]'"),
    ("uvicorn", "serve --port 0", "m3jit serve needs uvicorn: pip install 'm3jit[serve]'"),
    ("llguidance", "run -n 3 -p hi --json-schema {}", "pip install 'm3jit[grammar]'")])
def test_other_extras(module, command, words, capfd, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    got = call(capfd, *command.replace("{}", str(tmp_path / "s.json")).split())
    assert got.code == 6 and got.out == "" and words in got.err
