"""Rates of the interpreter, printed (run with -s); the figures of record are taken by the benchmarks."""
from __future__ import annotations

import time

from m3jit.vm.vm import VM
from tests.vm.programs import ins, machine


def rate(vm: VM) -> float:
    began = time.perf_counter()
    vm.run()
    return vm.retired / (time.perf_counter() - began)


def test_rates():
    nops = [ins("LOADI", rd="R1", imm=0), *[ins("NOP")] * 500, ins("ADDI", rd="R1", a="R1", imm=1),
            ins("COMPAREI", a="R1", imm=400), ins("IF_LESS", target=-(500 * 64 + 64)), ins("HALT")]
    vm = VM(nops, backend="interpreter")
    print(f"\nNOPs: {rate(vm) / 1e6:.2f} M/s")
    assert vm.get("R1") == 400
    mixed = machine("LOADI r1, 0\nLOADI r2, 1\nloop: ADDI r1, r1, 1\nADDS r3, r1, r2\nXOR r2, r3, r1\n"
                    "COMPARE r1, 60000\nIF_LESS loop\nHALT")
    print(f"mixed ALU and branches: {rate(mixed) / 1e6:.2f} M/s")
    assert mixed.retired == 2 + 5 * 60000 + 1
    fork = machine("LOADI r1, 0\nloop: FORK rS\nABORT r9\nADDI r1, r1, 1\nCOMPARE r1, 3000\nIF_LESS loop\nHALT")
    began = time.perf_counter()
    fork.run()
    print(f"FORK with loop: {(time.perf_counter() - began) / 3000 * 1e6:.1f} us each")
