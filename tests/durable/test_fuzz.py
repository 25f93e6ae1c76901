"""Stores that another hand has changed: whatever their bytes say, opening and restoring ends in a `StoreError` or in
the state that was saved, changes nothing of a machine it fails for, and takes bounded work and memory."""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3jit.durable import Store, StoreError
from m3jit.durable import blocks as block_files
from m3jit.durable.blocks import LIST, TABLE_CHUNK
from m3jit.durable.log import Log
from m3jit.durable.tree import HASH, TREE, Ref, TreeError, pack, unpack
from m3jit.errors import M3Error
from tests.durable.programs import every_kind, state, team, whole_state
from tests.durable.simulated_disk import SimulatedDisk

FOLDER = Path("/disk/store")
INNER = "a tree"                   # stands before a tree that has blocks of its own
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))

words = st.integers(0, 2 ** 64 - 1)
plain = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-2 ** 63, 2 ** 63 - 1), st.floats(),
                               st.binary(max_size=40), st.text(max_size=10),
                               st.builds(Ref, st.binary(min_size=16, max_size=16), words, words)),
                     lambda inner: st.lists(inner, max_size=6), max_leaves=20)


@quick
@given(st.binary(max_size=200))
def test_bytes_are_a_tree_or_not(raw):
    try:
        tree = unpack(raw)
    except TreeError:
        return
    assert pack(tree) == raw


@quick
@given(plain, st.integers(0, 10 ** 6), st.integers(0, 255))
def test_a_changed_tree_is_another_tree_or_none(tree, where, byte):
    raw = bytearray(pack(tree))
    assert repr(unpack(bytes(raw))) == repr(tree)
    raw[where % len(raw)] = byte
    try:
        assert pack(unpack(bytes(raw))) == bytes(raw)
    except TreeError:
        pass


# -- versions whose trees were changed --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved() -> tuple[SimulatedDisk, Any, str]:
    """(a disk with a store, the tree of a version in it, the state's digest)."""
    disk = SimulatedDisk()
    vm = every_kind(rounds=30)
    vm.step(200)
    point = vm.fork()
    with Store.open(FOLDER, files=disk) as store:
        tree = store.read(store.commit(vm, "vm", ["notes"], [point]))
    return disk, tree, state(vm)


@pytest.fixture(scope="module")
def saved_team() -> tuple[SimulatedDisk, Any, Any]:
    """(a disk with a store, the tree of a machine with several contexts, its inner trees in place, the state)."""
    disk = SimulatedDisk()
    vm = team()
    vm.audio_input("AUDIO_PCM", 1000, 1.0).push([0.5] * 1500)
    vm.step(131)
    vm.push_input("more")
    with Store.open(FOLDER, files=disk) as store:
        tree = opened(store, store.read(store.commit(vm, "vm", ["notes"])))
    return disk, tree, whole_state(vm)


def opened(store: Store, tree: Any) -> Any:
    """A tree with its inner trees in place."""
    if isinstance(tree, Ref) and tree.item == TREE:
        return [INNER, opened(store, unpack(store.bytes_of(Ref(tree.hash, tree.length), 1 << 20)))]
    return [opened(store, t) for t in tree] if isinstance(tree, list) else tree


def closed(writer: Any, tree: Any) -> Any:
    """The opposite."""
    if isinstance(tree, list):
        tree = [closed(writer, t) for t in tree]
        return writer.tree(tree[1]) if tree[:1] == [INNER] and len(tree) == 2 else tree
    return tree


def places(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Every node of a tree, by its indices."""
    out = [path]
    if isinstance(tree, list):
        for i, item in enumerate(tree):
            out += places(item, (*path, i))
    return out


def at(tree: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        tree = tree[i]
    return tree


def changed(tree: Any, path: tuple[int, ...], new: Any) -> Any:
    if not path:
        return new
    return [changed(item, path[1:], new) if i == path[0] else item for i, item in enumerate(tree)]


def mutant(tree: Any, rng: random.Random, other: Any) -> Any:
    """The tree with one to three nodes replaced: by another node, a number nearby, something else, nothing."""
    for _ in range(rng.randint(1, 3)):
        nodes = places(tree)
        path, donor = rng.choice(nodes), at(tree, rng.choice(nodes))
        here = at(tree, path)
        choices = [donor, other, None, [], -1, 2 ** 62, 0.5, b"", "text", [here, here]]
        if isinstance(here, int) and not isinstance(here, bool):
            choices += [here + 1, here - 1, here ^ 1 << rng.randrange(40)] * 3
        if isinstance(here, Ref):
            choices += [Ref(here.hash, max(here.length + rng.choice((-16, -1, 1, 16)), 0), here.item),
                        Ref(here.hash, here.length, (here.item + 1) % 2 ** 64)] * 3
        tree = changed(tree, path, rng.choice(choices))
    return tree


def restore_mutant(saved: Any, rng: random.Random, other: Any, make: Any = every_kind, seen: Any = state) -> bool:
    disk, tree, digest = saved
    copy = disk.after_crash(0)
    vm = make()
    vm.xp.limit_bytes = 1 << 24
    before = seen(vm)
    with Store.open(FOLDER, files=copy) as store:
        try:
            store.put("vm", lambda writer: closed(writer, mutant(tree, rng, other)))
        except (ValueError, StoreError):
            return False                               # no tree, or too deep
        store.verify()
        try:
            store.restore(vm, "vm")
        except StoreError as e:
            assert seen(vm) == before and "/disk/store" in str(e)
            return False
        seen(vm)
        vm._wait = waits_for_ever
        try:
            vm.step(20)                                # it may be another machine, and is one
        except M3Error:
            pass
        return True


def waits_for_ever() -> None:
    """In place of waiting: what the mutant waits for, nobody gives."""
    raise M3Error("it waits")


@quick
@given(st.integers(0, 2 ** 32), plain)
def test_changed_versions_are_restored_or_refused(saved, seed, other):
    restore_mutant(saved, random.Random(seed), other)


@pytest.mark.slow
@thorough
@given(st.integers(0, 2 ** 32), plain)
def test_changed_versions_are_restored_or_refused_many(saved, seed, other):
    restore_mutant(saved, random.Random(seed), other)


@quick
@given(st.integers(0, 2 ** 32), plain)
def test_changed_machines_are_restored_or_refused(saved_team, seed, other):
    restore_mutant(saved_team, random.Random(seed), other, team, whole_state)


@pytest.mark.slow
@thorough
@given(st.integers(0, 2 ** 32), plain)
def test_changed_machines_are_restored_or_refused_many(saved_team, seed, other):
    restore_mutant(saved_team, random.Random(seed), other, team, whole_state)


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_each_field_of_a_machine_is_checked(saved_team, every):
    """One after the other is replaced by what it cannot be; what is refused changes nothing."""
    disk, tree, _ = saved_team
    assert len(tree[10]) == 9
    refused = 0
    for path in places(tree[10], (10,))[::every]:
        if isinstance(at(tree, path), list) or at(tree, path) == INNER:
            continue
        for new in ([INNER, None], -5, "no"):
            copy, vm = disk.after_crash(0), team()
            before = whole_state(vm)
            with Store.open(FOLDER, files=copy) as store:
                store.put("vm", lambda writer: closed(writer, changed(tree, path, new)))
                try:
                    store.restore(vm, "vm")
                except StoreError as e:
                    refused += 1
                    assert "'vm' version 2: cannot be restored: " in str(e) and whole_state(vm) == before
    assert refused > 300 // every


def test_a_change_that_makes_sense_is_restored_and_others_are_refused(saved):
    disk, tree, _ = saved
    i, (number, n) = next((i, item) for i, item in enumerate(tree[4][0]) if type(item[1]) is int)
    for new, wrong in ((n + 1, ""), (None, "NoneType"), (["what"], "a value of kind"), ([n], "too many|a value")):
        copy, vm = disk.after_crash(0), every_kind()
        with Store.open(FOLDER, files=copy) as store:
            store.put("vm", lambda writer: changed(tree, (4, 0, i, 1), new))
            if not wrong:
                store.restore(vm, "vm")
                assert vm.main.R[number] == n + 1
            else:
                with pytest.raises(StoreError, match="'vm' version 2: cannot be restored: .*; an earlier version"):
                    store.restore(vm, "vm")


@quick
@given(plain)
def test_logs_with_strange_records(tree):
    disk = SimulatedDisk()
    Store.open(FOLDER, files=disk).close()
    log, _ = Log.open(disk, FOLDER / "log", True, lambda payload, offset: None)
    for record in (tree, ["commit", "a", 1, tree, 1, 1, b""], ["blocks", tree], ["append", "a", tree, tree],
                   ["remove", tree], [tree, tree], ["commit", tree, tree, Ref(b"0" * 16, 4), 1, 1, pack(tree)]):
        disk_now = disk.after_crash(1)
        log, _ = Log.open(disk_now, FOLDER / "log", True, lambda payload, offset: None)
        log.append(pack(record))
        try:
            with Store.open(FOLDER, files=disk_now) as store:
                store.verify(), store.names(), list(store.log_of("a"))
                for name in store.names():
                    store.read(store.latest(name))
        except StoreError as e:
            assert "/disk/store" in str(e)


@pytest.mark.parametrize("which, make, seen", [("saved", every_kind, state), ("saved_team", team, whole_state)])
def test_a_bit_in_any_file_of_a_version(which, make, seen, request):
    """Whatever bit of the disk is turned, and wherever a segment is cut, what is restored is what was saved."""
    disk, _, digest = request.getfixturevalue(which)
    rng = random.Random(1)
    outcomes = {True: 0, False: 0}
    for _ in range(60):
        copy = disk.after_crash(0)
        path = rng.choice([p for p in sorted(copy.names_now) if p.name != "lock"])
        inode = copy.names_now[path]
        raw = bytearray(inode.data)
        if rng.random() < 0.2 and path.name != "log":
            del raw[rng.randrange(len(raw)):]
        else:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        inode.states = [bytes(raw)]
        vm = make()
        try:
            with Store.open(FOLDER, files=copy) as store:
                store.restore(vm, "vm")
            assert seen(vm) == digest
            outcomes[True] += 1
        except StoreError as e:
            assert str(path) in str(e) or "names in it: none" in str(e)
            outcomes[False] += 1
    assert min(outcomes.values()) > 6


# -- work and memory --------------------------------------------------------------------------------------------------
def test_one_block_named_a_million_times(monkeypatch):
    """A list that names one block 65,536 times is walked once, and not read into memory beyond the machine's limit."""
    disk = SimulatedDisk()
    with Store.open(FOLDER, files=disk) as store:
        def build(writer: Any) -> Any:
            page = writer.item(bytes(4096))
            names = writer.block(block_files.DATA, page * (TABLE_CHUNK // HASH))
            table = writer.block(LIST, names * 65536)
            return [Ref(table, 65536 * TABLE_CHUNK, 4096)] * 2000
        store.put("bomb", build)
        reads = []
        real = block_files.Blocks.read

        def read(self: Any, name: bytes, kind: int, length: int = -1) -> bytes:
            reads.append(name)
            return real(self, name, kind, length)
        monkeypatch.setattr(block_files.Blocks, "read", read)
        assert store.verify() == [] and len(reads) < 20
        with pytest.raises(StoreError, match="bytes in one piece; this machine takes 1048576"):
            store.bytes_of(Ref(table_of(store), 65536 * TABLE_CHUNK, 4096), 1 << 20)


def table_of(store: Store) -> bytes:
    return store.read(store.latest("bomb"))[0].hash
