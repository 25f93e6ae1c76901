"""`m3jit embed`: texts from the command line and standard input, JSON and arrays, wrong usage."""
from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import m3jit
from tests.cli.command import ROOT, call, process

sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "models")]

import make_tiny_folders  # noqa: E402
from folder_tokenizers import word_pieces  # noqa: E402

TEXTS = ["the river runs", "a guitar"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_folders.write_folder(tmp_path_factory.mktemp("embed") / "bert", "bert")
    word_pieces(folder, 264)
    return folder


def test_lines_of_json(bert, capfd):
    found = call(capfd, "embed", bert, *TEXTS)
    vectors = [json.loads(line) for line in found.out.splitlines()]
    wanted = m3jit.load_embedder(bert).embed(TEXTS)
    assert found.code == 0 and np.array_equal(np.array(vectors, np.float32), wanted) and found.err == ""


def test_files(bert, capfd, tmp_path):
    wanted = m3jit.load_embedder(bert, pooling="cls", normalize=False).embed(TEXTS)
    for name, read in (("v.npy", np.load), ("v.json", lambda path: np.array(json.loads(path.read_text()), np.float32))):
        found = call(capfd, "embed", bert, *TEXTS, "-o", tmp_path / name, "--pooling", "cls", "--raw")
        assert found.code == 0 and found.out == "" and np.array_equal(read(tmp_path / name), wanted)


def test_standard_input(bert):
    done = process("embed", bert, "-", stdin=b"the river runs\r\na guitar")
    vectors = np.array([json.loads(line) for line in done.out.splitlines()], np.float32)
    assert done.code == 0 and np.array_equal(vectors, m3jit.load_embedder(bert).embed(TEXTS))
    assert "no texts: give them on the command line" in process("embed", bert).err


@pytest.mark.parametrize("arguments, code, message", [
    (["-o", "v.txt"], 2, "ends in .npy .array. or .json"), (["--pooling", "max"], 2, "'max' is not one of"),
    (["the " * 70], 1, "text 1: the text has 72 tokens, the context 64")])
def test_wrong_usage(bert, capfd, arguments, code, message):
    found = call(capfd, "embed", bert, *arguments, *([] if len(arguments) == 1 else ["a"]))
    assert found.code == code and re.search(message, found.err)


def test_what_gives_no_vectors(capfd, tmp_path):
    source = tmp_path / "a.m3asm"
    source.write_text("HALT\n")
    assert "is no model; give a folder" in call(capfd, "embed", source, "a").err
    assert "no such file" in call(capfd, "embed", tmp_path / "none", "a").err


def test_the_default_model_gives_vectors_too(capfd):
    found = call(capfd, "embed", "default", "It is a truth", "--pooling", "last")
    vector = np.array(json.loads(found.out))
    assert found.code == 0 and abs(np.linalg.norm(vector) - 1) < 1e-5


def test_run_writes_an_array(bert, capfdbinary, monkeypatch):
    """To a pipe; a terminal is shown how to see vectors."""
    from m3jit.cli import main
    assert main(["run", str(bert), "--prompt", TEXTS[0]]) == 0
    found = np.load(io.BytesIO(capfdbinary.readouterr().out))
    assert np.array_equal(found, m3jit.load_embedder(bert).embed(TEXTS[0]))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["run", str(bert), "--prompt", TEXTS[0]]) == 1
    assert b"gives vectors, not text; `m3jit embed" in capfdbinary.readouterr().err
