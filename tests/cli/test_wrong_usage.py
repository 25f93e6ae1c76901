"""Options and arguments that cannot be meant: exit code 2, a message that names them, and no file touched."""
from __future__ import annotations

import os

import pytest

from tests.cli.command import EXAMPLES, call, process, source

HELLO = EXAMPLES / "hello.m3asm"


def refused(got, *words: str, code: int = 2) -> None:
    """A failure that says these words and nothing on standard output."""
    assert got.code == code and got.out == "", got
    for word in words:
        assert word in got.err, (word, got.err)


# -- outputs that are inputs ----------------------------------------------------------------------------------------

def test_no_command_writes_over_what_it_reads(capfd, tmp_path):
    import numpy as np
    np.save(tmp_path / "w.npy", np.ones(4, np.float32))
    text = source(tmp_path, '.data\nw: .f32 FILE="w.npy"\n.text\nLOADV r1, @w\nHALT\n', "a.m3asm")
    named_like_its_output = source(tmp_path, "HALT\n", "b.m3b")
    program, link = tmp_path / "c.m3b", tmp_path / "same.m3b"
    assert call(capfd, "asm", text, "-o", program).code == 0
    os.symlink("c.m3b", link)
    os.link(program, tmp_path / "hard.m3b")
    main = source(tmp_path, '.import "c.m3b" AS c\nHALT\n', "main.m3asm")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for command in (["asm", text, "-o", text], ["asm", named_like_its_output], ["asm", text, "-o", tmp_path / "w.npy"],
                    ["disasm", program, "-o", program], ["disasm", program, "-o", link],
                    ["disasm", program, "-o", tmp_path / "hard.m3b"], ["link", program, "-o", program],
                    ["link", text, "-o", text], ["link", main, "-o", program], ["run", program, "--trace", program],
                    ["run", text, "--trace", tmp_path / "w.npy"], ["run", program, "-i", text, "--trace", text],
                    ["run", main, "--trace", program]):
        refused(call(capfd, *command), "is the file that is read", "another name")
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, command


def test_what_a_replaced_output_keeps(capfd, tmp_path):
    real, link = tmp_path / "real.m3b", tmp_path / "link.m3b"
    real.write_bytes(b"old")
    real.chmod(0o640)
    os.symlink("real.m3b", link)
    assert call(capfd, "asm", HELLO, "-o", link).code == 0
    assert link.is_symlink() and real.read_bytes()[:4] == b"\x89M3B" and real.stat().st_mode & 0o777 == 0o640
    prog = source(tmp_path, 'LOADS r1, "new"\nSTREAM r1, FILE NAME="out.txt"\nHALT\n')
    (tmp_path / "out.txt").write_text("old")
    (tmp_path / "out.txt").chmod(0o600)
    assert call(capfd, "run", prog, "--files", tmp_path).code == 0
    assert (tmp_path / "out.txt").read_text() == "new" and (tmp_path / "out.txt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("output", ["/dev/full", "no/such/folder/x.m3b", "nul\0x"])
def test_a_failed_output_is_named(capfd, tmp_path, output):
    if output == "/dev/full" and not os.path.exists(output):
        pytest.skip("needs /dev/full")
    got = call(capfd, "asm", HELLO, "-o", output)
    assert got.code in (1, 2) and output.replace("\0", r"\x00") in got.err and not list(tmp_path.iterdir())


# -- numbers --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("option, values", [
    ("--timeout", ("inf", "nan", "1e300", "0", "-1", "soon")),
    ("--max-steps", ("0", "-1", "99999999999999999999", "1.5")),
    ("--memory-limit", ("abc", "nan", "inf", "99999999999999T", "1", "-1G")),
    ("--threads", ("0", "99999999999")),
    ("--seed", ("99999999999999999999999",)),
    ("--max-tokens", ("0", "99999999999999999999")),
    ("--temp", ("nan", "inf", "1e300", "-1")),
    ("--top-k", ("-1", "99999999999", "65536")),
    ("--top-p", ("nan", "-0.1", "1.1")),
    ("--min-p", ("nan", "2")),
    ("--repeat-penalty", ("nan", "inf", "0", "1e-40", "1e300"))])
def test_numbers_out_of_bounds(capfd, option, values):
    for value in values:
        refused(call(capfd, "run", option, value, "-p", "x"), option)


@pytest.mark.parametrize("option, value", [("--temp", "1e6"), ("--temp", "1e-300"), ("--top-k", "65535"),
                                           ("--top-p", "1e-300"), ("--min-p", "1e-300"), ("--repeat-penalty", "1e-6"),
                                           ("--repeat-penalty", "1e6"), ("--max-tokens", "1")])
def test_numbers_at_the_bounds_work(capfd, option, value):
    assert call(capfd, "run", option, value, *([] if option == "--max-tokens" else ["-n", "1"]), "-p", "x").code == 0


# -- names ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, words", [
    (["--bind", "foo"], ("--bind foo", "REGISTER=VALUE")), (["--bind", "rX=foo"], ("--bind rX=foo", "no value")),
    (["--bind", "rNone=1"], ("--bind rNone", "no register rNone")),
    (["--seed", "abc"], ("--seed", "'abc' is no whole number")), (["--bind", "S0=1"], ("--bind S0=1", "state")),
    (["--show", "rNone"], ("--show rNone", "no register rNone")), (["-n", "3"], ("--max-tokens", "model files")),
    (["--system", "x"], ("--system",)), (["--print-ir-after", "nix"], ("--print-ir-after nix", "no such pass")),
    (["--files", "nowhere"], ("--files nowhere", "no such folder")), (["--files", ""], ("--files ''",)),
    (["--files", str(HELLO)], (f"--files {HELLO}", "is no folder"))])
def test_options_of_run(capfd, arguments, words):
    refused(call(capfd, "run", HELLO, *arguments), *words)


def test_other_commands(capfd, tmp_path):
    refused(call(capfd, "ops", "FOO"), "no opcode 'FOO'")
    refused(call(capfd, "ops", "256"), "0 to 255")
    refused(call(capfd, "asm", "-"), "-o")
    refused(call(capfd, "run", "--system", "x", "-p", "x"), "--chat")
    refused(call(capfd, "run", ""), "''", "no such file", code=1)
    refused(call(capfd, "explain", HELLO, "--at", "nowhere"), "--at nowhere")
    refused(call(capfd, "model", "remove", "default"), "cannot be removed")
    assert call(capfd, "model", "get", "default").out == call(capfd, "model", "path", "default").out
    for text in ("", ".data\nx: .f32 1\n"):
        refused(call(capfd, "explain", source(tmp_path, text)), "has no instructions", code=1)


def test_standard_input_that_cannot_be_read(tmp_path):
    import subprocess
    from tests.cli.command import COMMAND, environment
    unreadable = os.open(os.devnull, os.O_WRONLY)
    try:
        for command in (["asm", "-", "-o", "x.m3b"], ["fmt", "-"], ["run", "-i", "-"]):
            done = subprocess.run([*COMMAND, *command], stdin=unreadable, capture_output=True, timeout=180,
                                  cwd=tmp_path, env=environment())
            assert done.returncode == 1 and b"error: standard input: Bad file" in done.stderr, done
    finally:
        os.close(unreadable)
    for command in (["asm", "-", "-o", tmp_path / "x.m3b"], ["fmt", "-"]):
        got = process(*command, stdin=b"HALT\xff\n")
        assert "byte 4 is not UTF-8" in got.err and got.code in (1, 2) and not list(tmp_path.iterdir())


# -- what messages show ---------------------------------------------------------------------------------------------

def test_messages_are_short_and_printable(capfd, tmp_path):
    long = "r" * 100_000
    for text in (f"ADD {long}\n", f"{long}\n", f"JUMP {long}\n", f".{long}\n", f'LOADI r1, 5, "{long}"\n',
                 f"LOADI r1, @{long}\n", f'.data\nx: .f32 FILE="{long}"\n', f".entry {long}\nHALT\n"):
        got = call(capfd, "asm", source(tmp_path, text))
        assert got.code == 2 and len(got.err) < 3000 and "..." in got.err, (len(got.err), got.err[:400])
    for text in ("ADD r\x1b[31m\n", "\u202eHALT r1, r2\n", 'ADD r1, "\x07\x1b]0;title\x07"\n',
                 ".data\nx: .f32 \x9b1\n"):
        got = call(capfd, "asm", source(tmp_path, text))
        assert got.code == 2 and not set(got.err) & set("\x1b\x07\x9b\u202e"), got
        excerpt, mark = got.err.split("\n")[1:3]
        assert len(excerpt) >= mark.index("^") + 1
    got = call(capfd, "run", tmp_path / "a\x1b[2Jb")
    assert got.code == 1 and "\x1b" not in got.err and r"a\x1b[2Jb" in got.err
    assert len(call(capfd, "run", tmp_path / ("x" * 100_000)).err) < 10_000


def test_a_register_too_many_is_said_where_it_stands(capfd, tmp_path):
    got = call(capfd, "asm", source(tmp_path, "".join(f"LOADI rX{i}, 1\n" for i in range(257))))
    assert got.code == 2 and ":256:7: error: no register is left for rX255" in got.err and "2 errors" in got.err
    assert ":257:7: error: no register is left for rX256" in got.err


def test_arrays_that_are_none(capfd, tmp_path):
    import numpy as np
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=np.ones(2))
    (tmp_path / "text.npy").write_text("root:x:0:0")
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff")
    for name, word in (("objects.npy", "Python objects"), ("several.npz", "several arrays"),
                       ("text.npy", "does not begin with"), ("cut.npy", "not a .npy file")):
        said = [call(capfd, "asm", source(tmp_path, f'.data\nx: .f32 FILE="{name}"\n')),
                call(capfd, "run", HELLO, "--bind", f"R1=@{tmp_path / name}")]
        if name.endswith(".npy"):
            prog = source(tmp_path, f'SENSE r1, FILE NAME="{name}"\nHALT\n')
            said.append(call(capfd, "run", prog, "--files", tmp_path))
        for got in said:
            assert got.code in (2, 3) and word in got.err and name in got.err and "pickle" not in got.err, got


# -- files of programs ----------------------------------------------------------------------------------------------

# Names that no file may have are the program's fault; what the system does not open is not.
@pytest.mark.parametrize("name, words", [("", "is no name"), (".", "is a directory"), ("sub", "is a directory"),
                                         (r"nul\0x", "cannot be a file name"), ("x" * 300, "File name too long"),
                                         ("none/x", "cannot write"), ("loop", "cannot be a file name")])
def test_file_names_that_cannot_be_written(capfd, tmp_path, name, words):
    (tmp_path / "sub").mkdir()
    os.symlink("loop", tmp_path / "loop")
    prog = source(tmp_path, f'LOADS r1, "x"\nSTREAM r1, FILE NAME="x.txt"\nSTREAM r1, FILE NAME="{name}"\nHALT\n')
    refused(call(capfd, "run", prog, "--files", tmp_path), "prog.m3asm:3: trap: STREAM", 'NAME="', words,
            code=1 if words == "cannot write" else 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loop", "prog.m3asm", "sub"]


# -- the environment ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", ["abc", "nan", "inf", "-1"])
def test_a_cache_size_that_is_none(text):
    from tests.cli.command import environment
    got = process("run", EXAMPLES / "tensors.m3asm", "--backend", "cpu", env=environment(M3JIT_CACHE_MB=text))
    refused(got, f"M3JIT_CACHE_MB={text}", "megabytes", code=1)


# -- texts and numbers that have no form ----------------------------------------------------------------------------

def test_names_and_texts_that_are_not_utf8(capfd, tmp_path):
    from m3jit.models.provider import DEFAULT_MODEL
    bad = os.fsdecode(b"q\xff")
    prog = source(tmp_path, "SENSE r1, USER_INPUT\nSTREAM r1\nHALT\n", f"{bad}.m3asm")
    assert call(capfd, "run", prog, "-p", f"a{bad}b").out == "aq\ufffdb"
    assert call(capfd, "asm", prog).code == 0 and call(capfd, "run", tmp_path / f"{bad}.m3b", "-p", "x").out == "x"
    refused(call(capfd, "run", HELLO, "-b", f"R1='{bad}'"), "--bind R1=", "not Unicode")
    refused(call(capfd, "run", HELLO, "-b", r'R1="\ud800"'), "--bind R1=", "not Unicode")
    refused(call(capfd, "run", HELLO, "-b", "R1=" + "[" * 100_000), "--bind R1=", "nest too deep")
    (tmp_path / f"{bad}.gguf").symlink_to(DEFAULT_MODEL)
    for command in (["run", tmp_path / f"{bad}.gguf", "-p", "x"], ["compile", tmp_path / f"{bad}.gguf", "-o", "-"],
                    ["compile", "default", "--reference", bad, "-o", "-"]):
        refused(call(capfd, *command), "must be UTF-8", code=1)
    assert call(capfd, "run", HELLO, "-b", "R1=f16:[1e30]").err == ""


@pytest.mark.parametrize("text, words", [
    ("LOADI r1, 1e4990\n", "too large for f64"), ("LOADI r1, -1e400\n", "too large for f64"),
    ("LOADI r1, 1e4990ns\n", "2**64 nanoseconds"), (".data\n.org 1e4990ns\n", "2**64 nanoseconds"),
    (".data\nx: .i64 1\n.text\nLOADA r1, &x+" + "9" * 5000 + "\n", "400 are allowed"),
    (".data\nx: .i64 1\n.text\nLOADA r1, &x-0x80000000\n", "the range of a distance"),
    ("LOADI r1, " + "9" * 5000 + "\n", "400 are allowed")])
def test_numbers_without_a_meaning(capfd, tmp_path, text, words):
    refused(call(capfd, "asm", source(tmp_path, text)), ": error: ", words)


def test_distances_are_decimal_however_they_begin(capfd, tmp_path):
    prog = source(tmp_path, ".data\nx: .i64 1\n.text\nLOADA r1, &x+08\nLOADA r2, &x+8\nSUB r3, r1, r2\nSTREAM r3\n"
                  "HALT\n")
    assert call(capfd, "run", prog).out == "0"
