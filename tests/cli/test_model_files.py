"""Model files on the command line: split over several files, with weights that are not finite."""
from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from m3jit.models.gguf_file import GGUFFile
from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import SafetensorsFile
from tests.cli.command import ROOT, call

sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_models  # noqa: E402


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_tiny_models.build(tmp_path_factory.mktemp("tiny"), ("Q8_0",))["Q8_0"]


def files(folder: Path) -> set[str]:
    """Every file and folder below one."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_split_model_runs_as_the_whole_one(capfd, tmp_path, whole):
    make_tiny_models.write_model(tmp_path / "parts.gguf", "Q8_0", split=9)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert [p.name for p in parts] == [f"parts-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    wanted = call(capfd, "run", whole, "--prompt", "a river", "--max-tokens", "4")
    for path in parts[:2]:
        assert call(capfd, "run", path, "--prompt", "a river", "--max-tokens", "4") == wanted
    assert wanted.code == 0 and wanted.out and call(capfd, "verify", parts[0]).code == 0
    parts[1].unlink()
    got = call(capfd, "run", parts[0], "--prompt", "a river")
    assert got.code == 1 and "parts-00002-of-00003.gguf: part 2 of 3 of the model is missing" in got.err


@pytest.mark.parametrize("old, new, words", [
    (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lxama", "'general.architecture': is 'lxama'; expected one of llama"),
    (b"llama.context_length", b"llama.context_lengtx", "'llama.context_length': is missing"),
    (b"llama.context_length\4\0\0\0", b"llama.context_length\6\0\0\0", "'llama.context_length': is a f32"),
    (None, b"\0\0\0\0", "'llama.context_length': is 0; expected 1 or more")],
    ids=("architecture", "missing", "type", "zero"))
def test_what_a_file_says_of_itself(capfd, tmp_path, whole, old, new, words):
    """Every command that generates says it, and none of them fails in the middle."""
    raw = whole.read_bytes()
    at = raw.index(old) if old else raw.index(b"llama.context_length") + 24
    (tmp_path / "made.gguf").write_bytes(raw[:at] + new + raw[at + len(new):])
    (tmp_path / "text").write_text("a river " * 20)
    for command in (["run", tmp_path / "made.gguf", "-p", "x", "--stop", "y"], ["chat", tmp_path / "made.gguf"],
                    ["perplexity", tmp_path / "made.gguf", tmp_path / "text", "--window", "8"]):
        got = call(capfd, *command)
        assert got.code == 1 and got.out == "" and words in got.err, got
    assert files(tmp_path) == {"made.gguf", "text"}


@pytest.mark.parametrize("key, kind, value, words", [
    ("block_count", "<I", 10 ** 9, "is 1000000000; expected a number from 0 to 4096"),
    ("attention.layer_norm_rms_epsilon", "<f", -1.0, "is -1.0; expected a number from 0"),
    ("attention.layer_norm_rms_epsilon", "<f", float("nan"), "is nan; expected a finite number"),
    ("rope.freq_base", "<f", float("inf"), "is inf; expected a finite number"),
    ("rope.freq_base", "<f", 0.0, "is 0.0; expected a number from 0.001")])
def test_numbers_that_cannot_be_are_refused(capfd, tmp_path, whole, key, kind, value, words):
    raw, name = whole.read_bytes(), b"llama." + key.encode()
    at = raw.index(name) + len(name) + 4
    new = struct.pack(kind, value)
    (tmp_path / "made.gguf").write_bytes(raw[:at] + new + raw[at + len(new):])
    for command in (["run", "-p", "x"], ["verify"], ["compile", "-o", tmp_path / "out.m3asm"],
                    ["compile", "-o", tmp_path / "out.m3b"]):
        got = call(capfd, *command, tmp_path / "made.gguf")
        assert got.code == 1 and got.out == "" and f"'llama.{key}': {words}" in got.err, got
        assert files(tmp_path) == {"made.gguf"}


TYPES = "BF16, F16, F32, F64, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, " \
    "TQ1_0, TQ2_0"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("number, words", [(17, "has type IQ2_XS"), (19, "has type IQ1_S"), (41, "has type Q1_0"),
                                           (31, "has unknown ggml type 31"), (42, "has unknown ggml type 42")])
def test_weights_of_a_type_that_is_not_supported(capfd, tmp_path, monkeypatch, whole, number, words):
    """Every command names the tensor and its type and lists the types there are, and leaves no file behind."""
    raw, name = whole.read_bytes(), b"blk.1.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8                            # behind the rank and two dimensions
    assert raw[at:at + 4] == struct.pack("<I", 8)                           # Q8_0, whose blocks take more room
    monkeypatch.setenv("M3JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.gguf").write_bytes(raw[:at] + struct.pack("<I", number) + raw[at + 4:])
    (tmp_path / "text").write_text("a river " * 20)
    (tmp_path / "template").write_text(TEMPLATE)
    before = files(tmp_path)
    commands = [["run", "made.gguf", "-p", "x"], ["run", "made.gguf", "-p", "x", "--stop", "y"],
                ["run", "made.gguf", "-p", "x", "--trace", "trace.json", "--store", "versions"],
                ["chat", "made.gguf", "--chat-template", "template"], ["compile", "made.gguf", "-o", "out.m3asm"],
                ["compile", "made.gguf", "-o", "out.m3b"], ["embed", "made.gguf", "x", "-o", "out.npy"],
                ["perplexity", "made.gguf", "text", "--window", "8"],
                ["quantize", "made.gguf", "out.gguf", "Q4_0", "--requantize"]]
    if importlib.util.find_spec("starlette") and importlib.util.find_spec("uvicorn"):        # the extra `serve`
        commands.append(["serve", "made.gguf", "--port", "0"])
    for command in commands:
        got = call(capfd, *command)
        assert got.code == 1 and got.out == "", (command, got)
        assert f"tensor 'blk.1.ffn_up.weight': {words}; expected one of {TYPES}. " in got.err, (command, got)
        assert files(tmp_path) == before, command


def test_weights_of_another_shape(capfd, tmp_path, monkeypatch, whole):
    """Every command names the tensor, the shape it has and the shape it needs, and leaves no file behind."""
    raw, name = whole.read_bytes(), b"blk.1.ffn_up.weight"
    at = raw.index(name) + len(name) + 4
    columns, rows = struct.unpack_from("<QQ", raw, at)
    assert (columns, rows) == (256, 512)
    monkeypatch.setenv("M3JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.gguf").write_bytes(raw[:at] + struct.pack("<QQ", rows, columns) + raw[at + 16:])
    (tmp_path / "text").write_text("a river " * 20)
    for command in (["run", "made.gguf", "-p", "x"], ["run", "made.gguf", "-p", "x", "--stop", "y"],
                    ["compile", "made.gguf", "-o", "out.m3b"], ["embed", "made.gguf", "x", "-o", "out.npy"],
                    ["perplexity", "made.gguf", "text", "--window", "8"], ["verify", "made.gguf"]):
        got = call(capfd, *command)
        assert got.code == 1 and got.out == "", (command, got)
        assert "'blk.1.ffn_up.weight': has shape [256, 512]; expected shape [512, 256]" in got.err, (command, got)
        assert files(tmp_path) == {"made.gguf", "text"}, command


def test_weights_that_are_not_finite_are_named(capfd, tmp_path, whole):
    raw = bytearray(whole.read_bytes())
    with GGUFFile(whole) as file:
        at = file.tensors["blk.1.ffn_up.weight"].offset + 3 * 272 + 34
        raw[at:at + 2] = np.float16(np.inf).tobytes()                       # scale of block 1 of row 3
        at = file.tensors["blk.0.attn_norm.weight"].offset + 4 * 7
        raw[at:at + 4] = np.float32(np.nan).tobytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(raw)
    got = call(capfd, "verify", bad)
    assert got.code == 1
    assert f"{bad}: tensor 'blk.0.attn_norm.weight': holds NaN at 7; expected finite weights" in got.err
    assert f"{bad}: tensor 'blk.1.ffn_up.weight': holds a scale d that is not finite in row 3, for its columns 32 to " \
        "63" in got.err
    got = call(capfd, "run", bad, "--prompt", "a river", "--max-tokens", "1")
    assert "warning: tensor 'blk.1.ffn_up.weight' (Q8_0 [512, 256]) holds a scale d" in got.err
    assert "warning: tensor 'blk.0.attn_norm.weight' (F32 [256]) holds NaN at 7" in got.err


def test_quantising(capfd, tmp_path):
    source = make_tiny_models.build(tmp_path, ("F32",))["F32"]
    out = tmp_path / "out.gguf"
    got = call(capfd, "quantize", source, out, "q4_k")
    assert got.code == 0 and got.out == "" and \
        f"{out}: 0.8 MB of weights, from 5.8 MB; tensors: 5 F32, 15 Q4_K, 1 Q6_K" in got.err
    assert call(capfd, "run", out, "--prompt", "a river", "--max-tokens", "3").code == 0
    got = call(capfd, "quantize", out, tmp_path / "again.gguf", "Q8_0")
    assert got.code == 1 and "is in blocks already (Q4_K)" in got.err and not (tmp_path / "again.gguf").exists()
    for arguments, said in (([source, out, "Q9_K"], "TYPE: no type 'Q9_K'; expected one of F32 F16 BF16 Q8_0"),
                            ([source, out, "Q8_0", "--output-type", "no"], "--output-type"),
                            ([source, source, "Q8_0"], "it would be overwritten; give another OUTPUT"),
                            ([source, tmp_path, "Q8_0"], "is no regular file; give another OUTPUT")):
        got = call(capfd, "quantize", *arguments)
        assert got.code == 2 and said in got.err, got
    got = call(capfd, "quantize", source, tmp_path / "no" / "out.gguf", "Q8_0")
    assert got.code == 1 and "cannot be written (No such file or directory)" in got.err
    assert call(capfd, "quantize", ROOT / "examples/hello.m3asm", out, "Q8_0").code == 1


def test_what_is_no_model_to_run_is_said(capfd, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")              # it has no tokeniser
    writer.add_tensor("v.patch", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "pointer.gguf").write_bytes(pointer)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04\0\0\xff")
    for name, words in (("mmproj.gguf", "'general.architecture': is 'clip'; expected one of llama, "),
                        ("pointer.gguf", "fetch the file itself with git lfs pull"),
                        ("pytorch_model.bin", "is no text, so no program's source, and no container")):
        for command in (["run", tmp_path / name, "-p", "x"], ["verify", tmp_path / name]):
            got = call(capfd, *command)
            assert got.code == 1 and got.out == "" and words in got.err, got
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ModelFileError, match="git lfs pull"):
        SafetensorsFile(tmp_path / "model.safetensors")
