"""STREAM and SENSE against `wave`, `numpy.load`, and what Python reads back; files appear only when complete."""
from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import wave

import numpy as np
import pytest

from m3jit.errors import Deadlock, SinkClosed, StreamError, Trap, UserError
from tests.vm.programs import machine, outputs, run


# -- text ---------------------------------------------------------------------------------------------------------

def test_numbers_and_text():
    assert outputs('LOADI rA, -5\nSTREAM rA\nLOADI rB, 0.1\nSTREAM rB, LINE\nLOADI rC, "zß"\nSTREAM rC\nHALT') == \
        ["-5", "0.1\n", "zß"]


def test_tensors_as_text():
    vm = machine("STREAM r1, TEXT\nSTREAM r2, TEXT, LINE\nHALT")
    got = []
    vm.set_sink("OUTPUT", got.append)
    vm.set("r1", np.array([[1, -2], [3, 4]], np.int32))
    vm.set("r2", np.array([0.1, 1e20, np.nan], np.float32))
    vm.run()
    assert got[0] == "[[1, -2], [3, 4]]"
    assert [np.float32(x) for x in got[1].strip("[]\n").split(", ")][:2] == [np.float32(0.1), np.float32(1e20)]


def test_standard_output(capfd):
    run('LOADI rA, "häl"\nSTREAM rA\nLOADI rB, 3\nSTREAM rB, ERROR\nHALT')
    out, err = capfd.readouterr()
    assert (out, err) == ("häl", "3")


def test_output_into_a_replaced_stdout(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    run('LOADI rA, "ö"\nSTREAM rA\nHALT')
    assert text.getvalue() == "ö"


class Tokens:
    """A model whose token t stands for one byte or a fixed piece."""
    name = "tokens"
    pieces = {300: "né".encode(), 301: b"\xe2\x82", 302: b"\xac"}

    def encode(self, text): return list(text.encode())
    def tensor(self, name): raise KeyError(f"no {name}")
    def info(self, key): return {"eos": 2, "rope": 1.5, "arch": "toy"}[key]

    def decode_bytes(self, token):
        if token in self.pieces:
            return self.pieces[token]
        if not 0 <= token < 256:
            raise KeyError(token)
        return bytes([token])


class Provider:
    def load(self, reference, quant=""): return Tokens()
    def compile(self, model): return b"M3"


def test_tokens_become_text_and_never_half_a_code_point():
    got = outputs('LOAD_MODEL rM, "m"\n' + "".join(
        f"LOADI rT, {t}\nSTREAM rT, MODEL=rM\n" for t in (104, 301, 302, 300, 0xF0, 0x9F, 0x98, 0x80, 33)) + "HALT",
        models=Provider())
    assert got == ["h", "€", "né", "😀", "!"]


def test_an_unfinished_code_point_is_replaced_at_the_end_and_rolls_back():
    got = outputs('LOAD_MODEL rM, "m"\nLOADI rT, 301\nSTREAM rT, MODEL=rM\nHALT', models=Provider())
    assert got == ["�"]
    # the half character is forgotten with the rollback, so 302 alone is invalid, and 301 302 complete
    got = outputs('LOAD_MODEL rM, "m"\nFORK rS\nLOADI rT, 301\nSTREAM rT, MODEL=rM\nABORT rS\nLOADI rT, 104\n'
                  'STREAM rT, MODEL=rM\nHALT', models=Provider())
    assert got == ["h"]


def test_tokens_that_spell_no_character_stream_as_valid_text():
    got = []
    vm = machine('LOAD_MODEL rM, "m"\nLOADI rT, 301\nSTREAM rT, MODEL=rM\nLOADI rT, 104\nSTREAM rT, MODEL=rM\nHALT',
                 models=Provider())
    vm.set_sink("OUTPUT", lambda item: got.append(item))
    vm.run()
    assert got == ["\ufffdh"]                            # half a character, then "h"


def test_bad_tokens():
    for source, words in (("LOADI rT, 999\nSTREAM rT, MODEL=rM", "token 999 is outside the vocabulary"),
                          ("LOADI rT, 1.5\nSTREAM rT, MODEL=rM", "takes token ids, got a float")):
        with pytest.raises(Trap, match=words):
            run(f'LOAD_MODEL rM, "m"\n{source}\nHALT', models=Provider())


def test_text_input_becomes_bytes_or_tokens():
    vm = machine('LOAD_MODEL rM, "m"\nSENSE rA, rS, USER_INPUT\nSENSE rB, rT, USER_INPUT, MODEL=rM\n'
                 'SENSE rC, rU, USER_INPUT\nSENSE rD, rV, USER_INPUT, NON_BLOCKING\nHALT', models=Provider())
    vm.push_input("hé")
    vm.push_input("ab")
    vm.run()
    assert vm.get("rA").tobytes() == "hé".encode() and vm.get("rA").dtype.name == "U8"
    assert vm.get("rB").numpy().tolist() == [97, 98] and vm.get("rB").dtype.name == "I64"
    assert [vm.get(r) for r in ("rS", "rT", "rU", "rV")] == [1, 1, -1, 0]
    assert vm.get("rC").shape == (0,)


def test_input_is_read_again_after_a_rollback_within_reach():
    vm = machine("SENSE rA, TOKEN\nFORK rS\nSENSE rB, TOKEN\nMOV r9, rB\nABORT rS\nSENSE rC, TOKEN\nHALT")
    for t in (5, 6, 7):
        vm.push_input(t, "TOKEN")
    vm.run()
    assert (vm.get("rA"), vm.get("rC")) == (5, 6)


def test_input_beyond_reach_is_named():
    from m3jit.vm.sources import QueueSource
    vm = machine("FORK rS\n" + "SENSE rA, TOKEN\n" * 5 + "ABORT rS\nSENSE rA, TOKEN\nHALT")
    vm.set_source("TOKEN", QueueSource("TOKEN", vm.signal, range(9), reach=3))
    with pytest.raises(Trap, match="item 0 is beyond its reach"):
        vm.run()


# -- files ----------------------------------------------------------------------------------------------------------

def test_files_appear_when_the_program_has_ended(tmp_path):
    seen = []
    vm = machine('LOADI rA, "one "\nSTREAM rA, FILE, NAME="o.txt"\nSTREAM rA, CHECK_IT\nSTREAM rA, FILE, NAME="o.txt"\n'
                 'HALT'.replace("CHECK_IT", "SINK, NAME=\"look\""), files=tmp_path)
    vm.set_sink("look", lambda _: seen.append((tmp_path / "o.txt").exists()))
    vm.run()
    assert seen == [False] and (tmp_path / "o.txt").read_text() == "one one "
    assert [p.name for p in tmp_path.iterdir()] == ["o.txt"]


def test_a_failed_program_leaves_no_file(tmp_path):
    (tmp_path / "old.txt").write_text("before")
    for name in ("new.txt", "old.txt", "a.wav", "a.npy"):
        with pytest.raises(Trap):
            vm = machine(f'STREAM r1, FILE, NAME="{name}"\nRET', files=tmp_path)
            vm.set("r1", np.zeros(4, np.float32))
            vm.run()
    assert [p.name for p in tmp_path.iterdir()] == ["old.txt"] and (tmp_path / "old.txt").read_text() == "before"


def test_wav_out_and_in(tmp_path):
    samples = np.array([[0.0, 1.0], [-1.0, 0.5], [2.0, -3.0], [np.nan, 1 / 3]], np.float32)
    vm = machine('STREAM r1, FILE, NAME="a.wav", RATE=8000\n' * 2 + "HALT", files=tmp_path)
    vm.set("r1", samples)
    vm.run()
    with wave.open(str(tmp_path / "a.wav")) as w:
        assert (w.getframerate(), w.getnchannels(), w.getsampwidth(), w.getnframes()) == (8000, 2, 2, 8)
        got = np.frombuffer(w.readframes(8), "<i2").reshape(-1, 2)
    assert got[:4].tolist() == [[0, 32767], [-32767, 16384], [32767, -32768], [0, 10922]]
    vm = run('SENSE r1, AUDIO_PCM, FILE, NAME="a.wav", COUNT=3\nSENSE r2, AUDIO_PCM, FILE, NAME="a.wav"\n'
             'SENSE r3, r4, AUDIO_PCM, FILE, NAME="a.wav"\nHALT'.replace("AUDIO_PCM, FILE", "FILE, FORMAT=AUDIO_PCM"),
             files=tmp_path)
    assert np.array_equal(vm.get("r1").numpy(), (got[:3] / 32768).astype(np.float32))
    assert vm.get("r2").shape == (5, 2) and vm.get("r4") == -1


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_sample_widths(tmp_path, width):
    values = [-1.0, -0.5, 0.0, 0.5]
    with wave.open(str(tmp_path / "w.wav"), "wb") as w:
        w.setparams((1, width, 16000, 0, "NONE", ""))
        for v in values:
            n = int(v * 2 ** (8 * width - 1))
            w.writeframes((n + 128).to_bytes(1, "little") if width == 1 else n.to_bytes(width, "little", signed=True))
    got = run('SENSE r1, FILE, FORMAT=AUDIO_PCM, NAME="w.wav"\nHALT', files=tmp_path).get("r1")
    assert got.numpy().tolist() == values and got.shape == (4,)


def test_npy_out_and_in(tmp_path):
    for array in (np.arange(6, dtype=np.int16).reshape(2, 3), np.array(2.5, np.float32), np.zeros((0, 4), np.float16)):
        vm = machine('STREAM r1, FILE, NAME="a.npy"\nHALT', files=tmp_path)
        vm.set("r1", array)
        vm.run()
        back = np.load(tmp_path / "a.npy")
        assert back.dtype == array.dtype and np.array_equal(back, array) and back.shape == array.shape
    vm = machine('STREAM r1, FILE, NAME="b.npy"\nSTREAM r1, FILE, NAME="b.npy"\nHALT', files=tmp_path)
    vm.set("r1", np.arange(6, dtype=np.int64).reshape(2, 3))
    vm.run()
    assert np.load(tmp_path / "b.npy").tolist() == [[0, 1, 2], [3, 4, 5]] * 2
    vm = run('SENSE r1, FILE, NAME="b.npy", COUNT=3\nSENSE r2, FILE, NAME="b.npy", COUNT=3\nHALT', files=tmp_path)
    assert vm.get("r1").numpy().tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]] and vm.get("r2").shape == (1, 3)


def test_raw_bytes_to_a_file(tmp_path):
    vm = machine('STREAM r1, FILE, NAME="x.bin"\nLOADI r2, -2\nSTREAM r2, FILE, FORMAT=RAW, NAME="x.bin"\nHALT',
                 files=tmp_path)
    array = np.array([1.5, -2], np.float32)
    vm.set("r1", array)
    vm.run()
    assert (tmp_path / "x.bin").read_bytes() == array.tobytes() + (-2).to_bytes(8, "little", signed=True)
    vm = run('SENSE r1, FILE, NAME="x.bin", COUNT=4\nSENSE r2, FILE, NAME="x.bin"\nHALT', files=tmp_path)
    assert vm.get("r1").tobytes() == array.tobytes()[:4] and vm.get("r2").shape == (12,)


def test_files_stay_inside_their_directory(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("../x.txt", "/etc/x.txt"):
        with pytest.raises(Trap, match="outside the directory"):
            run(f'LOADI r1, 1\nSTREAM r1, FILE, NAME="{name}"\nHALT', files=tmp_path / "in")
    with pytest.raises(Trap, match="gives it no files"):
        run('SENSE r1, FILE, NAME="x"\nHALT', files=None)
    with pytest.raises(Trap, match="cannot read .*No such file"):
        run('SENSE r1, FILE, NAME="none.wav"\nHALT', files=tmp_path)
    with pytest.raises(Trap, match="cannot write .*No such file"):
        run('LOADI r1, 1\nSTREAM r1, FILE, NAME="d/none.txt"\nHALT', files=tmp_path)


@pytest.mark.parametrize("content,name", [
    (b"RIFF\0\0", "x.wav"), (b"RIFF" + bytes(60), "y.wav"), (b"\x93NUMPY\x01", "x.npy"), (b"", "e.npy"),
    (b"\x93NUMPY\x01\x00\x02\x00{}", "z.npy")])
def test_damaged_files(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Trap, match=name):
        run(f'SENSE r1, FILE, NAME="{name}"\nHALT', files=tmp_path)


@pytest.mark.parametrize("name,value,words", [
    ("a.wav", np.zeros((2, 2, 2), np.float32), "AUDIO_PCM takes"), ("a.wav", np.zeros(2, np.int64), "AUDIO_PCM takes"),
])
def test_forms_a_sink_does_not_store(tmp_path, name, value, words):
    vm = machine(f'STREAM r1, FILE, NAME="{name}"\nHALT', files=tmp_path)
    vm.set("r1", value)
    with pytest.raises(Trap, match=words):
        vm.run()
    vm = machine(f'LOADI r1, "x"\nSTREAM r1, FILE, FORMAT=TEXT, NAME="{name}"\nHALT', files=tmp_path)
    with pytest.raises(Trap, match="takes FORMAT=AUDIO_PCM, not TEXT"):
        vm.run()


# -- rings and back-pressure ------------------------------------------------------------------------------------------

PRODUCER = """
    LOADI r1, 0
    FORK rC, consumer, GREEN
more:
    STREAM r1, RING, NAME="q", {mode}
    ADDI r1, r1, 1
    COMPARE r1, 20
    IF_LESS more
    HALT
consumer:
    LOADI r2, 0
    LOADI r3, 0
again:
    SENSE r4, r5, RING, NAME="q", {sense}
    COMPARE r5, 0
    IF_LESS_EQUAL done
    STREAM r4, SINK, NAME="got"
    ADDI r3, r3, 1
    COMPARE r3, 20
    IF_LESS again
done:
    HALT
"""


def test_a_full_ring_makes_its_writer_wait():
    got = []
    vm = machine(PRODUCER.format(mode="BLOCKING", sense="BLOCKING"), ring_capacity=3)
    vm.set_sink("got", got.append)
    vm.run()
    assert [int(x) for x in got] == list(range(20)) and vm.stats["dropped"] == {}


def test_a_full_ring_drops_and_counts():
    got = []
    vm = machine(PRODUCER.format(mode="DROP", sense="NON_BLOCKING").replace("FORK rC, consumer, GREEN", "NOP")
                 .replace("HALT\nconsumer:", "FORK rC, consumer, GREEN\nHALT\nconsumer:"), ring_capacity=3)
    vm.set_sink("got", got.append)
    vm.run()
    assert [int(x) for x in got] == [0, 1, 2] and vm.stats["dropped"] == {"q": 17}


def test_waiting_for_nobody_is_a_deadlock():
    with pytest.raises(Deadlock, match="context 1 waits for space in ring q"):
        run('LOADI r1, 1\nagain: STREAM r1, RING, NAME="q"\nJUMP again', ring_capacity=2)
    with pytest.raises(Deadlock, match="context 1 waits for an item in ring q"):
        run('SENSE r1, RING, NAME="q"\nHALT')


def test_the_output_iterator_runs_the_program_and_holds_it_back():
    vm = machine("LOADI r1, 0\nmore: STREAM r1\nADDI r1, r1, 1\nCOMPARE r1, 10\nIF_LESS more\nHALT")
    it = vm.output(capacity=2)
    assert next(it) == "0"
    assert vm.get("r1") < 5                        # not run to the end
    assert list(it) == [str(i) for i in range(1, 10)] and vm.finished


def test_the_output_iterator_raises_the_trap_behind_the_last_item():
    it = machine("LOADI r1, 1\nSTREAM r1\nRET").output()
    assert next(it) == "1"
    with pytest.raises(Trap):
        next(it)


def test_a_host_thread_reads_while_another_runs():
    vm = machine("LOADI r1, 0\nmore: STREAM r1\nADDI r1, r1, 1\nCOMPARE r1, 500\nIF_LESS more\nHALT")
    it = vm.output(capacity=4)
    thread = threading.Thread(target=vm.run)
    thread.start()
    got = [int(x) for x in it]
    thread.join(120)
    assert got == list(range(500)) and not thread.is_alive()


def test_a_ring_beyond_reach_is_named():
    source = 'FORK rS\n' + 'LOADI r1, 7\n' + 'STREAM r1, RING, NAME="q"\nSENSE r2, RING, NAME="q"\n' * 5 + \
        'ABORT rS\nSENSE r2, RING, NAME="q"\nHALT'
    with pytest.raises(Trap, match="ring q: item 0 is beyond its reach"):
        run(source, ring_capacity=2)


# -- sinks that go away -----------------------------------------------------------------------------------------------

def test_a_closed_pipe_is_one_clear_error():
    program = ("from tests.vm.programs import machine\nfrom m3jit.errors import SinkClosed\nimport sys, os\n"
               "vm = machine('LOADI r1, \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\\\\n\"\\nl: STREAM r1\\nJUMP l')\n"
               "try:\n    vm.run()\nexcept SinkClosed as e:\n"
               "    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n    print(e, file=sys.stderr)\n"
               "    sys.exit(e.exit_code)\n")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             cwd=os.getcwd())
    child.stdout.readline()
    child.stdout.close()
    error = child.stderr.read().decode()
    assert child.wait(120) == SinkClosed.exit_code
    assert error == "standard output was closed by its reader; the rest of the output is lost\n"


def test_a_closed_ring():
    vm = machine('LOADI r1, 1\nSTREAM r1, RING, NAME="q"\nHALT')
    vm.machine.ring("q").close(True)
    with pytest.raises(SinkClosed, match="ring q"):
        vm.run()


def test_unknown_sinks_and_sources():
    for source, words in (('LOADI r1, 1\nSTREAM r1, SINK, NAME="x"', "no sink named 'x'"),
                          ("SENSE r1, VAD", "no source 'VAD' is attached"),
                          ('LOADI r1, 1\nSTREAM r1, FILE', "needs NAME")):
        with pytest.raises(Trap, match=words):
            run(source + "\nHALT")
    vm = machine("HALT")
    vm.set_source("A", np.zeros(3, np.float32))
    with pytest.raises(UserError, match="pushed to queues only"):
        vm.push_input(1, "A")


def test_host_sources():
    vm = machine('SENSE r1, AUDIO, AUDIO_PCM, COUNT=2\nSENSE r2, NAMED, NAME="it"\nSENSE r3, TIME\nHALT'
                 .replace("AUDIO, AUDIO_PCM", "AUDIO, FORMAT=AUDIO_PCM"))
    vm.set_source("AUDIO", np.array([0, 16384, -32768], np.int16))
    vm.set_source("it", iter([np.array([[1, 2]])]))
    vm.run()
    assert vm.get("r1").numpy().tolist() == [0.0, 0.5] and vm.get("r2").numpy().tolist() == [[1, 2]]
    assert vm.get("r3") > 1_600_000_000 * 10 ** 9


def test_errors_of_the_hosts_code_name_it_and_the_instruction():
    def broken(_):
        raise ValueError("full up")

    def items():
        yield 1
        raise KeyError("gone")
    vm = machine("LOADI r1, 1\nSTREAM r1\nHALT")
    vm.set_sink("OUTPUT", broken)
    with pytest.raises(Trap, match="test.m3asm:2: trap: STREAM R1: sink OUTPUT raised ValueError: full up") as e:
        vm.run()
    assert isinstance(e.value.__cause__, StreamError)
    vm = machine("SENSE r1, TOKEN\nSENSE r1, TOKEN\nHALT")
    vm.set_source("TOKEN", items())
    with pytest.raises(Trap, match="source TOKEN raised KeyError"):
        vm.run()
