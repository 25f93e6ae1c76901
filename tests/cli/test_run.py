"""`m3jit run`: what it runs, where input comes from, what goes where."""
from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.cli.command import EXAMPLES, call, environment, process, source

ECHO = ("again:\nSENSE r1, r2, USER_INPUT\nCOMPARE r2, 0\nIF_LESS out\nSTREAM r1\nSTREAM r2 LINE\nJUMP again\n"
        "out:\nHALT\n")
HELLO = EXAMPLES / "hello.m3asm"


def test_sources_and_programs(capfd, tmp_path):
    assert call(capfd, "run", HELLO) == (0, "Hello from m3jit.\n", "")
    assert call(capfd, "asm", HELLO, "-o", tmp_path / "h.m3b") == (0, "", "")
    assert call(capfd, "run", tmp_path / "h.m3b") == (0, "Hello from m3jit.\n", "")


def test_the_first_bytes_go_before_the_suffix(capfd, tmp_path):
    call(capfd, "asm", HELLO, "-o", tmp_path / "h.m3b")
    (tmp_path / "strange.txt").write_bytes((tmp_path / "h.m3b").read_bytes())
    assert call(capfd, "run", tmp_path / "strange.txt").out == "Hello from m3jit.\n"


def test_a_hello_program_loads_no_code_generator():
    code = ("import sys; from m3jit.cli import main; main(['run', sys.argv[1]]); "
            "print(sorted(m for m in ('llvmlite', 'numba', 'tokenizers', 'gguf', 'pyopencl', 'jinja2') if m in "
            "sys.modules))")
    done = subprocess.run([sys.executable, "-c", code, HELLO], capture_output=True, text=True, timeout=180,
                          env=environment())
    assert done.stdout == "Hello from m3jit.\n[]\n"


def test_help_loads_nothing_of_the_machine():
    code = ("import sys; from m3jit.cli import main; main(['--help']); "
            "print(sorted(m for m in ('numpy', 'llvmlite', 'numba', 'tokenizers', 'm3jit.frontend') if m in "
            "sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment())
    assert done.stdout.endswith("\n[]\n") and "  141  " in done.stdout and "explain" in done.stdout


def test_input_from_prompts_files_and_standard_input(capfd, tmp_path):
    echo = source(tmp_path, ECHO)
    assert call(capfd, "run", echo, "-p", "one", "-p", "two").out == "one1\ntwo1\n"
    (tmp_path / "in.txt").write_text("from a file\n")
    assert call(capfd, "run", echo, "-i", tmp_path / "in.txt").out == "from a file1\n"
    assert process("run", echo, stdin=b"all of\nit\n").out == "all of\nit1\n"
    assert process("run", echo, "--lines", stdin=b"line\nby\nline").out == "line1\nby1\nline1\n"


def test_input_that_nobody_reads_is_left_alone():
    assert process("run", HELLO, stdin=b"x" * 10_000_000).out == "Hello from m3jit.\n"


def test_bindings_and_registers(capfd, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3, dtype=np.int32))
    prog = source(tmp_path, "ADD rZ, rX, rY\nSTREAM rZ LINE\nHALT\n")
    for x, y, z in (("2", "0x10", "18"), ("1.5", "1e1", "11.5"),
                    ("[[1, 2], [3, 4]]", "[[1, 1], [1, 1]]", "[[2, 3], [4, 5]]"),
                    ("[0.5, 1]", "f32[2]", "[0.5, 1.0]"), ("f16:[1, 2]", "f16:[0.5, 0.5]", "[1.5, 2.5]"),
                    (f"@{tmp_path}/x.npy", "i32:[10, 10, 10]", "[10, 11, 12]"), ("-7", "-1", "-8")):
        got = call(capfd, "run", prog, "--bind", f"rX={x}", "--bind", f"rY={y}", "--show", "rZ")
        assert got.code == 0 and got.out == z + "\n" and got.err.startswith("rZ = "), got
    assert call(capfd, "run", source(tmp_path, "STREAM rX\nHALT\n"), "--bind", 'rX="a text"').out == "a text"


@pytest.mark.parametrize("binding, word", [
    ("rX", "REGISTER=VALUE"), ("rX=", "REGISTER=VALUE"), ("rX=abc", "'abc' is no value"),
    ("rX=f99[2]", "no type 'f99'"),
    ("rX=[1, [2]]", "expected"), ("rX=[1,", "cannot be read"), ("rX=i8:[300]", "-128 to 127"),
    ("rX=9223372036854775808", "64-bit"),
    ("rX=@none.npy", "none.npy"), ("rX='abc", "closing quote"), ("rX=q8_0[7]", "multiples of 32"),
    ("rQ=1", "no register rQ"),
    ("rX=f32[1,1,1,1,1,1]", "at most 5"), ("R255=1", "cannot be written"), ("rX=[\"a\"]", "other than numbers")])
def test_bad_bindings(capfd, tmp_path, binding, word):
    prog = source(tmp_path, "STREAM rX\nHALT\n")
    got = call(capfd, "run", prog, "--bind", binding)
    errors = [line for line in got.err.splitlines() if line.startswith("error: ")]
    assert got.code == 2 and len(errors) == 1 and word in errors[0] and got.out == ""


def test_everything_else_goes_to_standard_error(capfd, tmp_path):
    trace = tmp_path / "t.json"
    got = call(capfd, "run", EXAMPLES / "loop.m3asm", "--stats", "--profile", "--trace", trace, "--show", "rBest",
               "--backend", "cpu")
    assert got.out == "26623 takes the most steps: 307\n"
    assert "rBest = 307" in got.err and "instructions per second" in got.err and "by opcode" in got.err
    assert "by region" in got.err and "ui.perfetto.dev" in got.err
    events = json.loads(trace.read_text())["traceEvents"]
    kinds = {e.get("cat") for e in events}
    assert {"region", "compile", "instruction"} <= kinds
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    region = next(e for e in events if e.get("cat") == "region")
    assert region["args"]["instructions"] > 26_000_000


def test_ir_after_passes(capfd):
    got = call(capfd, "run", EXAMPLES / "tensors.m3asm", "--backend", "cpu", "--print-ir-after", "all")
    assert "as lifted" in got.err and "after dce" in got.err and got.err.count("region r0(") >= 6
    got = call(capfd, "run", EXAMPLES / "tensors.m3asm", "--backend", "cpu", "--print-ir-after", "cse")
    assert "after cse" in got.err and "after dce" not in got.err
    got = call(capfd, "run", EXAMPLES / "tensors.m3asm", "--print-ir-after", "nix")
    assert got.code == 2 and "no such pass; there are lift, " in got.err


def test_checked_mode_compares_and_notices(capfd, monkeypatch):
    from m3jit.cli import main
    from m3jit.vm import checked
    counted = []
    original = checked.Checker.__init__
    monkeypatch.setattr(checked.Checker, "__init__", lambda self, vm: (original(self, vm), counted.append(self))[0])
    got = call(capfd, "run", EXAMPLES / "tensors.m3asm", "--backend", "cpu", "--checked")
    assert got.code == 0 and counted[0].entries >= 1 and counted[0].instructions >= 5
    monkeypatch.setattr(checked, "outcome", lambda ctx, n=[0]: {"R1": n.append(0) or len(n)})
    assert main(["run", str(EXAMPLES / "tensors.m3asm"), "--backend", "cpu", "--checked"]) == 70
    assert "R1 is" in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["interpreter", "cpu:baseline", "cpu", "python", "auto"])
def test_backends_give_the_same(capfd, backend):
    assert call(capfd, "run", EXAMPLES / "rollback.m3asm", "--backend", backend).out == "[5, 8, 4, 3] weigh 20\n"
    first = call(capfd, "run", EXAMPLES / "tensors.m3asm", "--backend", "interpreter").out
    assert call(capfd, "run", EXAMPLES / "tensors.m3asm", "--backend", backend, "--threads", "3").out == first


def test_the_default_model(capfd):
    first = call(capfd, "run", "--max-tokens", "8")
    assert first.code == 0 and len(first.out) > 8 and not first.out.startswith("The carriage")
    assert call(capfd, "run", "default", "-n", "8", "-p", "The carriage stopped at the door, and").out == first.out
    assert call(capfd, "run", "-n", "8", "--seed", "5").out != first.out
    greedy = call(capfd, "run", "-n", "8", "--temp", "0").out
    assert call(capfd, "run", "-n", "8", "--temp", "0", "--seed", "5", "--threads", "1").out == greedy
    assert call(capfd, "run", "-n", "24", "--temp", "0", "--repeat-penalty", "1.8").out != \
        call(capfd, "run", "-n", "24", "--temp", "0").out
    told = call(capfd, "run", "-n", "8", "--stats").err
    assert "8 generated" in told
    done, total = re.search(r"^compiled +([\d,]+) of ([\d,]+) instructions", told, re.MULTILINE).groups()
    assert int(done.replace(",", "")) > 0.9 * int(total.replace(",", "")), told      # the layers are not interpreted


def test_a_profile_of_a_model_names_its_opcodes(capfd):
    got = call(capfd, "run", "-n", "3", "--profile")
    rows = {line.split()[0]: line.split() for line in got.err.splitlines() if " compiled " in line}
    assert {"MATVEC", "FFN", "ATTN", "NORM"} <= rows.keys()
    assert int(rows["ATTN"][2]) >= 12 and got.out == call(capfd, "run", "-n", "3").out


def test_programs_refuse_a_models_options(capfd):
    got = call(capfd, "run", HELLO, "--temp", "1", "--chat")
    assert got.code == 2 and "--temp, --chat: belong to model files" in got.err
    assert "--temp: belongs to model files" in call(capfd, "run", HELLO, "--temp", "0").err


def test_files_stay_in_their_folder(capfd, tmp_path):
    (tmp_path / "in").mkdir()
    prog = source(tmp_path, 'LOADS r1, "text"\nSTREAM r1, FILE NAME="out.txt"\nHALT\n')
    assert call(capfd, "run", prog, "--files", tmp_path / "in").code == 0
    assert (tmp_path / "in/out.txt").read_text() == "text"
    prog = source(tmp_path, 'LOADS r1, "text"\nSTREAM r1, FILE NAME="../out.txt"\nHALT\n')
    got = call(capfd, "run", prog, "--files", tmp_path / "in")
    assert got.code == 3 and "outside the directory" in got.err and not (tmp_path / "out.txt").exists()


def test_imports_are_linked(capfd, tmp_path):
    call(capfd, "asm", source(tmp_path, ".func twice(rX)\nADD rX, rX, rX\nRET\n", "lib.m3asm"))
    prog = source(tmp_path, '.import "lib.m3b" AS lib\nLOADI r1, 21\nCALL lib.twice ARGS=[r1]\nSTREAM r1\nHALT\n')
    assert call(capfd, "run", prog).out == "42"
    (tmp_path / "lib.m3b").unlink()
    got = call(capfd, "run", prog)
    assert got.code == 2 and "lib.m3b: no such file" in got.err


def test_the_memory_limit_of_a_command_ends_with_it(capfd):
    resource = pytest.importorskip("resource", reason="this system has no limits of processes")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert call(capfd, "run", HELLO, "--memory-limit", "4G").code == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
