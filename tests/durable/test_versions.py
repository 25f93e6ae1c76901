"""A machine's version on disk: every kind of state comes back, bit for bit, and goes on as if nothing had happened."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.durable import Checkpoints, Store, StoreError
from m3jit.durable.states import CODECS
from m3jit.isa.fields import Reg
from m3jit.isa.table import BY_NAME, Instruction
from m3jit.vm.extensions import Extension, Registry
from m3jit.vm.extensions import pack as pack_operands
from m3jit.vm.held import EVERY
from tests.durable.programs import every_kind, state
from tests.vm.programs import ins


def saved(tmp_path: Any, vm: Any, **options: Any) -> Any:
    with Store.open(tmp_path / "store") as store:
        return store.commit(vm, "a", **options)


def restored(tmp_path: Any, vm: Any, number: int | None = None) -> Any:
    with Store.open(tmp_path / "store") as store:
        return store.restore(vm, "a", number)


@pytest.mark.parametrize("steps", [0, 9, 25, 40, 300])
def test_every_kind_comes_back(tmp_path, steps):
    vm = every_kind()
    vm.step(steps)
    before = state(vm)
    saved(tmp_path, vm)
    assert state(vm) == before
    other = every_kind(rounds=9)
    restored(tmp_path, other)
    assert state(other) == before
    assert other.main.index == vm.main.index and other.finished == vm.finished
    for each in (vm, other):
        each.run()
    assert state(other) == state(vm)


def test_the_program_has_every_codec():
    vm = every_kind()
    vm.run()
    kinds = {type(s) for _, s in vm.main.states.items()}
    assert {c.kind for c in CODECS if c.cls not in kinds} == {"model", "extension state"}     # they have tests below


@pytest.mark.parametrize("backend", ["cpu", "interpreter"])
def test_a_restored_version_goes_on_under_any_backend(tmp_path, backend):
    straight = every_kind(rounds=50)
    straight.run()
    vm = every_kind(rounds=50, backend="cpu")
    vm.step(600)
    saved(tmp_path, vm)
    other = every_kind(backend=backend)
    restored(tmp_path, other)
    other.run()
    assert state(other) == state(straight)


def test_snapshots_that_registers_hold_come_back_and_weak_ones_are_released(tmp_path):
    vm = every_kind(rounds=2)
    vm.run()
    at_first = vm.get("rFirst").get()
    saved(tmp_path, vm)
    other = every_kind()
    restored(tmp_path, other)
    from m3jit.vm.digest import digest
    assert digest(other.get("rFirst").get().root) == digest(at_first.root)
    # the last snapshot's own registers name the first one, and itself
    inside = other.get("rLast").get().root.R
    names = {v.id: v.get() for v in inside if isinstance(v, type(other.get("rLast")))}
    assert names[other.get("rLast").id] is other.get("rLast").get()
    other.abort(other.get("rFirst"))
    assert other.get("rN") == 0


def test_snapshots_that_come_back_beside_live_ones_have_numbers_of_their_own(tmp_path):
    """Numbers 1 and 2 are taken in the machine that restores: not 3, which is stored too, but what follows."""
    source = "LOADI rN, 1\nFORK rA\nLOADI rN, 2\nFORK rB\nLOADI rN, 3\nFORK rC\nLOADI rN, 4\nHALT"
    vm = m3jit.VM(m3jit.assemble(source, "forks.m3asm"), backend="interpreter")
    vm.run()
    with Store.open(tmp_path / "store") as store:
        store.commit(vm, "a", context=vm.main)
        other = m3jit.VM(m3jit.assemble(source, "forks.m3asm"), backend="interpreter")
        own = [other.fork(), other.fork()]
        store.restore(other, "a")
        found = {name: other.get(name) for name in ("rA", "rB", "rC")}
        assert [h.id for h in own] == [1, 2] and {n: h.id for n, h in found.items()} == {"rA": 4, "rB": 5, "rC": 3}
        assert [h.get().parent for h in found.values()] == [0, 4, 5]
        assert [s.id for s in other.snapshots.live()] == [1, 2, 3, 4, 5]
        again = store.commit(other, "b", context=other.main)
        third = m3jit.VM(m3jit.assemble(source, "forks.m3asm"), backend="interpreter")
        store.restore(third, again.name)
    for machine in (other, third):
        handles = {name: machine.get(name) for name in found}
        for number, handle in enumerate(handles.values(), 1):
            machine.abort(handle)
            assert machine.get("rN") == number


@pytest.mark.parametrize("window", [1, 2, 64])
def test_a_persisted_snapshot_is_the_newest_of_the_window_behind_the_instruction(tmp_path, window):
    """No register holds it after rS is overwritten; the window does, in the run that goes on as in the one before."""
    source = "go: ADD rN, rN, 1\nFORK rOld\nFORK rS PERSIST\nMOV rKept, rS\nFORK rT\nLOADI rS, 0\nLOADI rKept, 0\n" \
             "ABORT rT\nABORT rS\nHALT"
    windows = []
    with Store.open(tmp_path / "store") as store:
        for resumes in (False, True):
            vm = m3jit.VM(m3jit.assemble(source, "keeps.m3asm"), backend="interpreter", snapshot_window=window,
                          checkpoints=Checkpoints(store))
            vm.set("rN", 0)
            assert (vm.checkpoints.resume(vm) is not None) is resumes
            vm.step(0 if resumes else 3)
            windows.append([s.id for s in vm.snapshots.recent])
            vm.step(5)
            if window == 1:                            # the one behind it has taken its place
                with pytest.raises(m3jit.Trap, match="ABORT .*: snapshot 2 was released"):
                    vm.step(1)
            else:
                vm.step(1)
    assert windows[0] == windows[1] == [1, 2][-window:]


def test_what_traps_for_want_of_snapshot_memory_is_not_persisted(tmp_path):
    source = "FORK rA\nADD rX, rX, rX\nFORK rB PERSIST\nHALT"
    with Store.open(tmp_path / "store") as store:
        vm = m3jit.VM(m3jit.assemble(source, "much.m3asm"), backend="interpreter", snapshot_memory=10_000,
                      checkpoints=Checkpoints(store))
        vm.set("rX", np.ones(100_000, np.float32))
        vm.snapshots.bound._since = EVERY              # the bound is looked at now
        with pytest.raises(m3jit.Trap, match="FORK .*PERSIST.*: snapshots hold"):
            vm.run()
        assert store.names() == []


def test_snapshots_that_hold_too_much_are_not_restored(tmp_path):
    source = "go: ADD rX, rX, rX\nFORK rS\nMOV rOld, rS\nADD rX, rX, rX\nFORK rS\nHALT"
    program = m3jit.assemble(source)
    with Store.open(tmp_path / "s") as store:
        vm = m3jit.VM(program, backend="interpreter")
        vm.set("rX", np.ones(200_000, np.float32))
        vm.step(5)
        store.commit(vm, "a", context=vm.main)
        small = m3jit.VM(program, backend="interpreter", snapshot_memory=1000)
        with pytest.raises(StoreError, match=r"s: 'a' version 1: snapshots hold \d+ bytes that no running context has"):
            for _ in range(100):
                store.restore(small, "a")
        store.restore(m3jit.VM(program, backend="interpreter"), "a")


def test_snapshots_of_the_host_are_stored_when_given(tmp_path):
    vm = every_kind()
    vm.step(30)
    point = vm.fork()
    at = state(vm)
    vm.run()
    saved(tmp_path, vm, notes=["said", 3, None, True, 0.5, b"\0"], snapshots=[point])
    other = every_kind()
    back = restored(tmp_path, other)
    assert back.notes == ["said", 3, None, True, 0.5, b"\0"]
    other.abort(back.snapshots[0])
    assert state(other) == at


def test_only_new_pages_are_written(tmp_path):
    vm = every_kind(rounds=60)
    with Store.open(tmp_path / "store") as store:
        vm.step(20 * 13)
        first = store.commit(vm, "a").bytes
        again = store.commit(vm, "a").bytes
        vm.step(13)
        later = store.commit(vm, "a").bytes
    pages = sum(len(vm.state("S0").pages(layer)) for layer in (0, 1)) * vm.state("S0").page_bytes
    assert first > pages * 0.4
    assert again < first // 4 and later < first


def test_handles_of_models_keep_their_numbers_in_the_machine_that_restores(tmp_path):
    """A stream has a number that the other machine gave the model, and the other way round."""
    source = """
        .model m "m.gguf"
        COMPARE rWhich, 0
        IF_EQUAL other
        ATTN rA, rX, rX, rX, sKV HEADS=2
        LOADI rM, @m
        JUMP done
    other:
        LOADI rM, @m
        ATTN rA, rX, rX, rX, sKV HEADS=2
        ATTN rA, rX, rX, rX, sKV HEADS=2
    done:
        SET_MODEL rM
        HALT
    """

    def machine(which: int) -> Any:
        class Provider:
            def load(self, reference: str, quant: str = "") -> Model:
                return Model("m", "ab" * 16)
        vm = m3jit.VM(m3jit.assemble(source), backend="interpreter", models=Provider())
        vm.set("rX", np.ones((2, 8), np.float32))
        vm.set("rWhich", which)
        return vm
    vm, other = machine(1), machine(0)
    for each in (vm, other):
        each.step(5)
    assert (vm.get("sKV").id, vm.get("rM").id, other.get("sKV").id, other.get("rM").id) == (1, 2, 2, 1)
    saved(tmp_path, vm)
    restored(tmp_path, other)
    assert other.get("rM").id == 1 and other.get("sKV").id > 2 and other.state("sKV").length(0) == 2
    other.run()
    assert other.machine.model_of(None).name == "m"


def test_a_rolled_back_page_that_is_written_again_gets_its_own_block(tmp_path):
    """A full page's name is kept while its rows are; after a rollback they may be others."""
    source = "go:\nATTN rA, rX, rX, rX, sKV HEADS=1 CAUSAL\nJUMP go"
    vm = m3jit.VM(m3jit.assemble(source), backend="interpreter")
    vm.set("rX", np.zeros((1, 4), np.float32))
    with Store.open(tmp_path / "store") as store:
        vm.step(2 * 60)
        point = vm.fork()
        vm.step(2 * 4)
        store.commit(vm, "a")                          # 64 rows: the page is full
        full = state(vm)
        vm.abort(point)
        vm.set("rX", np.ones((1, 4), np.float32))
        vm.step(2 * 4)
        assert state(vm) != full
        store.commit(vm, "a")
        other = m3jit.VM(m3jit.assemble(source), backend="interpreter")
        store.restore(other, "a")
    assert state(other) == state(vm)
    assert other.state("sKV").rows(0)[0][-1].tolist() == [1.0] * 4


def test_another_program_is_refused(tmp_path):
    vm = every_kind()
    saved(tmp_path, vm)
    other = m3jit.VM(m3jit.assemble("LOADI rX, 1\nHALT", "other.m3asm"))
    with pytest.raises(StoreError, match=r"'a' version 1: was written by another program \(.*those of other.m3asm .*; "
                                         r"restore it with the program that wrote it"):
        restored(tmp_path, other)
    assert other.registers == {}


class Model:
    """A model that is a name and a hash."""

    def __init__(self, name: str, content_hash: str | None):
        self.name = name
        if content_hash is not None:
            self.content_hash = content_hash

    def tensor(self, name: str) -> Any:
        raise KeyError(name)


def with_model(model: Model) -> Any:
    class Provider:
        def load(self, reference: str, quant: str = "") -> Model:
            return model
    vm = m3jit.VM(m3jit.assemble('.model m "m.gguf"\nLOADI rM, @m\nSET_MODEL rM\nLOADI rN, 1\nHALT'), models=Provider(),
                  backend="interpreter")
    vm.step(3)
    return vm


def test_a_model_is_named_by_its_content(tmp_path):
    saved(tmp_path, with_model(Model("first", "ab" * 16)))
    same = with_model(Model("moved", "ab" * 16))
    restored(tmp_path, same)
    assert same.machine.model_of(None).name == "moved"
    with pytest.raises(StoreError, match=r"uses the model 'first' with the content hash (ab)+, which is not here "
                                         r"\(m.gguf has the hash (cd)+\); run it with the model it was written with"):
        restored(tmp_path, with_model(Model("m", "cd" * 16)))
    with pytest.raises(StoreError, match="the model bare has no content hash"):
        saved(tmp_path, with_model(Model("bare", None)))


class Opaque:
    """A state that is no plain value."""

    def __init__(self, n: int):
        self.n = n


def counting(plain: bool, pack_state: Any = None, unpack_state: Any = None) -> Any:
    """A machine with an extension that counts, in plain values or in an `Opaque`."""
    def count(held: Any, *, immediate: bytes) -> Any:
        n = 0 if held is None else held["n"] if plain else held.n
        return n, {"n": n + 1, "seen": [np.arange(n), (0.5, None), b"x"]} if plain else Opaque(n + 1)
    known = Registry()
    known.add(Extension("COUNT", 77, (1, 0), count, True, pack_state, unpack_state))
    tail = pack_operands((Reg(0, 1),), (), b"")
    call = Instruction(BY_NAME["ESCAPE"], {"ext": 77, "flags": 0, "version": 1}, tail=tail, size=64)
    return m3jit.VM([call, call, call, ins("HALT")], backend="interpreter", extensions=known)


@pytest.mark.parametrize("plain, codec", [(True, ()), (False, (lambda held: [held.n], lambda tree: Opaque(*tree)))])
def test_states_of_extensions(tmp_path, plain, codec):
    vm = counting(plain, *codec)
    vm.step(2)
    saved(tmp_path, vm)
    other = counting(plain, *codec)
    restored(tmp_path, other)
    other.run()
    assert other.get("R1") == 2


def test_an_extension_that_says_nothing_about_its_state(tmp_path):
    vm = counting(False)
    vm.step(2)
    with pytest.raises(StoreError, match=r"cannot be stored: state #1: a Opaque; an extension's state is plain values, "
                                         r"or the extension has `pack` and `unpack`"):
        saved(tmp_path, vm)
    vm = counting(False, lambda held: [held.n])
    vm.step(2)
    saved(tmp_path, vm)
    with pytest.raises(StoreError, match="extension COUNT of this machine has no `unpack`"):
        restored(tmp_path, counting(False))
    with pytest.raises(StoreError, match="`unpack` of extension COUNT failed: ZeroDivisionError: division by zero"):
        restored(tmp_path, counting(False, None, lambda tree: 1 / 0))
    vm = counting(False, lambda held: 1 / 0)
    vm.step(2)
    with pytest.raises(StoreError, match="cannot be stored: .*`pack` of extension COUNT failed: ZeroDivisionError"):
        saved(tmp_path, vm)


def test_what_has_no_form_on_a_disk_is_named(tmp_path):
    vm = every_kind()
    vm.step(40)

    class Strange:
        kind_name = "strange"
    vm.set_state("S9", Strange())
    with pytest.raises(StoreError, match=r"'a': cannot be stored: state #\d+, which S9 names: a strange has no codec"):
        saved(tmp_path, vm)


def test_the_decorator_takes_codecs(tmp_path):
    from m3jit.api.extending import forget

    @m3jit.extension(name="TALLY", number=78, state=True, pack=lambda held: [held.n], unpack=lambda tree: Opaque(*tree))
    def tally(held):
        held = Opaque(0) if held is None else held
        return held.n, Opaque(held.n + 1)
    try:
        program = m3jit.assemble("TALLY rN\nTALLY rN\nTALLY rN\nHALT")
        vm, other = (m3jit.VM(program, backend="interpreter") for _ in range(2))
        vm.step(2)
        saved(tmp_path, vm)
        restored(tmp_path, other)
        other.run()
        assert other.get("rN") == 2
    finally:
        forget("TALLY")


@pytest.mark.parametrize("backend, rounds", [("interpreter", 200_000), ("cpu", 3_000_000)])
def test_versions_of_a_machine_that_another_thread_runs(tmp_path, backend, rounds):
    """Each is a state between two instructions: the registers are in step, and the run is not disturbed."""
    program = m3jit.assemble("""
    go:
        ADD rA, rA, 1
        ADD rB, rB, 2
        ADD rC, rA, rB
        COMPARE rA, rEnd
        IF_LESS go
        HALT
    """)

    def machine() -> Any:
        vm = m3jit.VM(program, backend=backend)
        for name in ("rA", "rB", "rC"):
            vm.set(name, 0)
        vm.set("rEnd", rounds)
        return vm
    vm, other = machine(), machine()
    runner = threading.Thread(target=vm.run)
    with Store.open(tmp_path / "store") as store:
        runner.start()
        for _ in range(12):
            store.commit(vm, "a")
        runner.join(120)
        for version in store.versions["a"]:
            store.restore(other, "a", version.number)
            a, b, c = (other.get(name) for name in ("rA", "rB", "rC"))
            at = other.main.index
            assert (b, c) == (2 * a if at != 1 else 2 * a - 2, 3 * a if at not in (1, 2) else 3 * a - 3), (a, b, c, at)
    assert vm.get("rC") == 3 * rounds and not runner.is_alive()
