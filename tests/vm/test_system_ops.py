"""Models, extensions, capabilities, profiling, tracing, clocks, DUMP."""
from __future__ import annotations

import time

import numpy as np
import pytest

from m3jit.errors import Trap
from m3jit.isa.capabilities import SUPPORTED
from m3jit.isa.fields import Reg
from m3jit.isa.system import ISA_VERSION
from m3jit.isa.table import BY_NAME, OPS, Instruction
from m3jit.isa.types import Tensor
from m3jit.vm.extensions import Extension, Registry, pack
from m3jit.vm.vm import VM
from tests.vm.programs import ins, machine, run


class Toy:
    def __init__(self, name):
        self.name = name

    def tensor(self, name):
        if name != "w":
            raise KeyError("it has w")
        return Tensor.of(np.array([1, 2], np.float32))

    def info(self, key):
        return {"eos": 2, "scale": 1.5, "arch": "toy"}[key]


class Provider:
    def __init__(self):
        self.asked = []

    def load(self, reference, quant=""):
        self.asked.append((reference, quant))
        return Toy(reference)

    def compile(self, model):
        return b"M3B:" + model.name.encode()


def test_models_are_loaded_queried_compiled_unloaded():
    provider = Provider()
    vm = run('''
        LOAD_MODEL rM, "a.gguf", QUANT=Q8_0
        MODEL_LOAD_UNIFIED S3, "b.gguf"
        MODEL_QUERY rE, rM, "eos"
        MODEL_QUERY rF, rM, "scale"
        SET_MODEL S3
        GET_MODEL rG
        MODEL_QUERY rT, KEY="arch"
        MODEL_COMPILE rC
        MODEL_SWITCH rOld, rM
        MODEL_COMPILE rD
        HALT''', models=provider)
    assert provider.asked == [("a.gguf", "Q8_0"), ("b.gguf", "")]
    assert (vm.get("rE"), vm.get("rF"), vm.get("rT").tobytes()) == (2, 1.5, b"toy")
    assert (vm.get("rC").tobytes(), vm.get("rD").tobytes()) == (b"M3B:b.gguf", b"M3B:a.gguf")
    assert vm.get("rG") == vm.get("rOld") == vm.get("S3") != vm.get("rM")
    for source, words in (('LOAD_MODEL rM, "a"\nUNLOAD_MODEL rM\nMODEL_QUERY rE, rM, "eos"', "was unloaded"),
                          ("MODEL_COMPILE rC", "no model: give a model handle"),
                          ('LOAD_MODEL rM, "a"\nMODEL_QUERY rE, rM, "x"', "a has no 'x'"),
                          ("LOAD_MODEL rM", "needs a string, or a register with text"),
                          ('SNAPSHOT rS\nLOAD_MODEL rM, "a"\nRESTORE rS\nSET_MODEL rM', "after the snapshot"),
                          ("GET_MODEL rM", "has no current model")):
        with pytest.raises(Trap, match=words):
            run(source + "\nHALT", models=Provider())


def test_model_names_from_registers_and_without_a_provider():
    provider = Provider()
    run('LOADI rN, "näme"\nLOAD_MODEL rM, rN\nHALT', models=provider)
    assert provider.asked == [("näme", "")]
    with pytest.raises(Trap, match="no model provider"):
        run('LOAD_MODEL rM, "a"\nHALT')


def test_named_models_and_their_tensors():
    provider = Provider()
    vm = machine('.model net "net.gguf"\nLOADI rM, @net\nLOADI rN, @net\nLOADI rW, @net:w\n'
                 'LOADI rB, 0x3000000000000000\nMEMCPY rB, rA, LEN=8\nHALT', models=provider)
    vm.set("rA", vm.memory.weights.address_of(vm.machine.tensor("net:w")))
    vm.run()
    assert provider.asked == [("net.gguf", "")] and vm.get("rM") == vm.get("rN")
    assert vm.get("rW").numpy().tolist() == [1, 2]
    assert vm.main.memory.read(0x3 << 60, 8) == np.array([1, 2], np.float32).tobytes()
    with pytest.raises(Trap, match="@net:v: the model has no such tensor .it has w"):
        run('.model net "net.gguf"\nLOADI rW, @net:v\nHALT', models=provider)


def test_a_contexts_model_goes_to_its_children():
    vm = run('LOAD_MODEL rM, "a"\nSET_MODEL rM\nFORK rC, child, RED\nHALT\n'
             'child: MODEL_QUERY rE, KEY="eos"\nCOMPARE rE, 2\nIF_NOT_EQUAL bad\nHALT\nbad: RET', models=Provider())
    assert vm.finished
    run('LOAD_MODEL rM, "a"\nSPAWN_CONTEXT rC, child, rM, RED\nHALT\n'
        'child: MODEL_QUERY rE, KEY="eos"\nHALT', models=Provider())


# -- extensions -------------------------------------------------------------------------------------------------------

def escape(ext, version=(1, 0), flags=0, dests=(), sources=(), immediate=b""):
    tail = pack(tuple(Reg(0, d) for d in dests), tuple(Reg(0, s) for s in sources), immediate)
    return Instruction(BY_NAME["ESCAPE"], {"ext": ext, "flags": flags, "version": version[0] | version[1] << 16},
                       tail=tail, size=max(64, 32 + (len(tail) + 7) // 8 * 8))


def with_extensions(*found):
    registry = Registry()
    for e in found:
        registry.add(e)
    return registry


def test_extensions_compute_on_numbers_and_arrays():
    def axpy(a, x, *, immediate):
        assert not x.flags.writeable and immediate[:3] == b"abc"
        return a * x, x.size
    vm = VM([escape(7, dests=(1, 2), sources=(3, 4), immediate=b"abc"), ins("HALT")], backend="interpreter",
            extensions=with_extensions(Extension("axpy", 7, (1, 2), axpy)))
    vm.set("R3", 2.0)
    vm.set("R4", np.array([1, 2, 3], np.float32))
    vm.run()
    assert vm.get("R1").numpy().tolist() == [2, 4, 6] and vm.get("R2") == 3


def test_extension_state_rolls_back():
    def counter(state, *, immediate):
        n = (state or 0) + 1
        return n, n
    program = [escape(1, dests=(1,)), ins("FORK", rd="R9"), escape(1, dests=(1,)), escape(1, dests=(2,)),
               ins("ABORT", snap="R9"), escape(1, dests=(3,)), ins("HALT")]
    vm = VM(program, backend="interpreter", extensions=with_extensions(Extension("n", 1, (1, 0), counter, state=True)))
    vm.run()
    assert (vm.get("R1"), vm.get("R2"), vm.get("R3")) == (1, None, 2)


def test_unknown_and_failing_extensions():
    known = with_extensions(Extension("fails", 1, (1, 0), lambda immediate: 1 / 0),
                            Extension("two", 2, (1, 0), lambda immediate: (1, 2)))
    for e, words in ((escape(9), "extension 9 version 1.0 is not known"),
                     (escape(1, (1, 1)), "version 1.1 is not known"),
                     (escape(1, (2, 0)), "version 2.0 is not known"), (escape(1), "fails failed: ZeroDivisionError"),
                     (escape(2, dests=(1,)), "gave 2 results for 1 destinations"),
                     (escape(2, dests=(1,), sources=(8,)), "R8 holds nothing")):
        with pytest.raises(Trap, match=words):
            VM([e, ins("HALT")], backend="interpreter", extensions=known).run()
    assert VM([escape(9, flags=1), ins("HALT")], backend="interpreter", extensions=known).run().retired == 2


# -- versions, capabilities ----------------------------------------------------------------------------------

def test_versions_and_capabilities():
    vm = run("VERSION r1\nVERSION r2, MAJOR\nVERSION r3, MINOR\nCAPABILITY_QUERY r4\n"
             "CAPABILITY_ASSERT FEATURES, NUMBER=3\nCAPABILITY_QUERY r5, FEATURE, NUMBER=1\n"
             "CAPABILITY_QUERY r6, FEATURE, NUMBER=50\nHALT")
    assert [vm.get(f"r{i}") for i in range(1, 7)] == [ISA_VERSION[0] << 16 | ISA_VERSION[1], *ISA_VERSION,
                                                      int(SUPPORTED), 1, 0]


def test_every_opcode_says_whether_it_runs():
    for number in range(256):
        vm = VM([ins("CAPABILITY_QUERY", rd="R1", kind="OPCODE", number=number), ins("HALT")], backend="interpreter")
        vm.run()
        assert vm.get("R1") == any(r.code == number and r.route != "absent" for r in OPS)


# -- clocks, traces, dumps -----------------------------------------------------------------------------------

def test_cycles():
    before = time.monotonic_ns()
    vm = run("NOP\nCYCLES_COUNT r1\nCYCLES_COUNT r2, STEPS\nHALT")
    assert before <= vm.get("r1") <= time.monotonic_ns() and vm.get("r2") == 2


def test_profiling_windows():
    vm = run('PROFILE_START "a"\nNOP\nPROFILE_START "b"\nNOP\nPROFILE_STOP r1, "b"\nPROFILE_STOP r2, "a"\nHALT')
    assert (vm.get("r1"), vm.get("r2")) == (1, 4)
    assert [w[:3] for w in vm.windows] == [("b", 1, 1), ("a", 1, 4)]


def test_trace_events():
    vm = machine("LOADI r1, 5\nLOADI r2, 6\nTRACE_EVENT r1, r2\nTRACE_EVENT r2\nHALT")
    seen = []
    vm.trace = lambda kind, facts: seen.append((kind, facts["event"], facts["data"]))
    vm.run()
    assert list(vm.events) == [(1, 2, 5, 6), (1, 3, 6, 0)] and seen == [("event", 5, 6), ("event", 6, 0)]
    vm = run("LOADI r1, 0\nl: TRACE_EVENT r1\nADDI r1, r1, 1\nCOMPARE r1, 1100\nIF_LESS l\nHALT")
    assert [e[2] for e in vm.events] == list(range(76, 1100))


def test_assert_passes():
    assert run('LOADI r1, -1\nASSERT r1, 5\nHALT').finished


def test_dump(capfd):
    run('LOADI r1, 5\nLOADI r2, "ab"\nCOMPARE r1, 6\nDUMP\nHALT')
    err = capfd.readouterr().err
    assert "context 1: pc 0x0060 test.m3asm:4, GREEN, 3 instructions, flags less, call depth 0" in err
    assert "R1 = 5" in err and "R2 = Tensor(U8 2)" in err
