"""Kills processes in the middle of checkpointing: python -m tests.durable.crash_child FOLDER KILLS SEED [one | team]

The machine has one context with every kind of state, or several ("team") that meet in a ring, at a lock and in SHARED.
For each kill a child is forked that opens the store, restores the last version, and goes on committing versions of a
running machine, compacting now and then, until it is killed with SIGKILL at a random moment.  Then the store is opened:
the last version must be the last acknowledged one, or the one after it, be whole, and have the digest that an
uninterrupted run has at its place.  Prints what was found; the exit code is 0 when all of it was so.
"""
from __future__ import annotations

import os
import random
import select
import signal
import struct
import sys
import time
from typing import Any

from m3jit.durable import Store
from tests.durable.programs import every_kind, state, team, whole_state

STRIDE = 9                         # instructions between two commits
ROUNDS = 10 ** 6


MACHINES = {"one": (lambda: every_kind(rounds=ROUNDS, rows=1), state), "team": (lambda: team(ROUNDS), whole_state)}


def begin(kind: str) -> Any:
    """A machine at its beginning."""
    vm = MACHINES[kind][0]()
    vm.push_input("words")
    return vm


def commit_until_killed(folder: str, acknowledge: int, kind: str) -> None:
    """The child."""
    with Store.open(folder) as store:
        steps = 0
        if "vm" in store.names():
            vm = MACHINES[kind][0]()
            steps = store.restore(vm, "vm").notes[0]
        else:
            vm = begin(kind)
        while True:
            vm.step(STRIDE)
            steps += STRIDE
            store.commit(vm, "vm", notes=[steps])
            os.write(acknowledge, struct.pack("<q", steps))
            if steps // STRIDE % 4 == 0:
                store.compact()


def kill_one(folder: str, rng: random.Random, kind: str) -> int:
    """The steps a child acknowledged last before it was killed."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            commit_until_killed(folder, writable, kind)
        finally:
            os._exit(1)
    os.close(writable)
    first = select.select([readable], [], [], 180)[0]   # it has begun: from here on the moment is random
    time.sleep(rng.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    raw = b""
    while part := os.read(readable, 1 << 16):
        raw += part
    os.close(readable)
    if not first or not raw or os.WTERMSIG(status) != signal.SIGKILL:
        raise AssertionError(f"the child ended by itself: {status}")
    return struct.unpack("<q", raw[-8:])[0]


def check(folder: str, acknowledged: int, straight: Any, done: int, kind: str) -> int:
    """The steps of the last version; AssertionError unless it is as it must be."""
    with Store.open(folder) as store:
        assert store.verify() == [], store.verify()
        make, seen = MACHINES[kind]
        vm = make()
        steps = store.restore(vm, "vm").notes[0]
        assert steps in (acknowledged, acknowledged + STRIDE), (steps, acknowledged)
        straight.step(steps - done)
        assert seen(vm) == seen(straight), steps
    return steps


def main(folder: str, kills: int, seed: int, kind: str = "one") -> None:
    rng = random.Random(seed)
    straight = begin(kind)
    done = unacknowledged = 0
    for _ in range(kills):
        acknowledged = kill_one(folder, rng, kind)
        done = check(folder, acknowledged, straight, done, kind)
        unacknowledged += done != acknowledged
    print(f"{kills} kills, {done // STRIDE} commits; {unacknowledged} times the version after the acknowledged one was "
          f"there")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
