"""Plays one random program on a machine and on the oracle, and compares them after every operation."""
from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.vm.state_model import faults
from tests.vm.state_model.machine import Audit, Difference, Driven
from tests.vm.state_model.oracle import Oracle, Skipped, Trapped
from tests.vm.state_model.programs import block_of, draw

WINDOW = 3
LENGTHS = (8, 56)                  # operations drawn for a program; over 30 on average are done
TOKEN_STEPS = 5                    # instructions of a `token` block
CONTEXTS = 4                       # at most; more are not started


def play(seed: int, backend: str = "interpreter", fault_share: float = 0.1, audit: Audit | None = None,
         seen: Counter | None = None) -> None:
    """One program.  Difference: with the seed and the operations that led there."""
    rng, seen = random.Random(seed), seen if seen is not None else Counter()
    if audit is not None:
        audit.begin()
    driven, oracle = Driven(backend, WINDOW), Oracle(WINDOW)
    done: list[Any] = []
    allocations = rng.random() < 0.3
    try:
        for _ in range(rng.randint(*LENGTHS)):
            oracle = _one(rng, driven, oracle, fault_share, allocations, done, seen)
            if driven.keeps_what_nobody_does(oracle):
                seen["cut short"] += 1
                break
        found = driven.difference(oracle)
        if found:
            raise Difference(f"at the end: {found}")
        if audit is not None and not driven.lost_references:
            audit.check_live(driven)
    except Difference as e:
        listed = "\n  ".join(f"{who} {op} {params} {fault.said if fault else ''}" for who, op, params, fault in done)
        raise Difference(f"{e}\nseed {seed}, backend {backend}, after\n  {listed}") from None
    seen["programs"] += 1
    seen["lost references"] += driven.lost_references


def _one(rng: random.Random, driven: Driven, oracle: Oracle, fault_share: float, allocations: bool,
         done: list, seen: Counter) -> Oracle:
    """One operation; the oracle afterwards."""
    who = rng.choice([i for i, c in enumerate(oracle.contexts) if c is not None])
    op, params = draw(rng, oracle.contexts[who].root)
    fault = faults.draw(rng, allocations) if rng.random() < fault_share else None
    attention, part = rng.random() < 0.1, rng.random()
    if op[0] in ("child", "spawn") and sum(c is not None for c in oracle.contexts) >= CONTEXTS:
        return oracle
    if op[0] in ("host_fork", "host_abort"):
        who = 0
        if op[0] == "host_abort" and not oracle.host:
            return oracle
    try:
        after, trapped = _applied(oracle, who, op, params)
    except Skipped:
        return oracle
    done.append((who, op, {k: v for k, v in params.items() if isinstance(v, int)}, fault))
    seen[f"op {op[0]}"] += 1
    seen["operations"] += 1
    seen["traps"] += trapped
    if fault is None:
        _plain(driven, who, op, params, attention, trapped)
        steps = [after]
    else:
        steps = _faulty(driven, oracle, after, who, op, params, fault, trapped, seen)
    whole = fault is not None or part < 0.15
    differences = []
    for want in steps:
        snapshot = rng.choice(list(want.snapshots)) if want.snapshots and not whole else None
        found = driven.difference(want, whole, who, snapshot)
        if not found:
            return want
        differences.append(found)
    raise Difference("; ".join(differences))


def _applied(oracle: Oracle, who: int, op: tuple, params: dict) -> tuple[Oracle, bool]:
    """(the oracle after an operation, whether it traps); of several instructions those before the trap count."""
    if op[0] == "token":
        steps = _prefixes(oracle, who, params)
        return steps[-1], len(steps) <= TOKEN_STEPS
    after = oracle.clone()
    try:
        after.apply(who, op, params)
    except Trapped:
        return oracle, True
    return after, False


def _plain(driven: Driven, who: int, op: tuple, params: dict, attention: bool, trapped: bool) -> None:
    ctx = driven.contexts[who]
    failed = _executed(driven, who, op, params, attention)
    if failed is None and ctx.trap is not None:
        failed = ctx.trap
    if (failed is not None) != trapped:
        raise Difference(f"{op}: {failed or 'no trap'}, expected {'a trap' if trapped else 'none'}")
    driven.settle()


def _executed(driven: Driven, who: int, op: tuple, params: dict, attention: bool = False) -> BaseException | None:
    from m3jit.errors import UserError
    try:
        driven.execute(who, op, params, attention)
    except UserError as e:                             # of the host's calls
        return faults.bare(e)
    return None


def _faulty(driven: Driven, before: Oracle, after: Oracle, who: int, op: tuple, params: dict, fault: Any, trapped: bool,
            seen: Counter) -> list[Oracle]:
    """Execute with a fault; the states that are allowed afterwards."""
    ctx = driven.contexts[who]
    outcome = fault.run(lambda: driven.execute(who, op, params))
    at = ctx.index if ctx.trap is not None else None
    outcome = outcome if outcome is not None else ctx.trap
    driven.settle()
    driven.lost_references |= fault.kind == "allocation"
    hit = fault.hit(outcome)
    seen[f"fault {fault.kind}{'' if hit else ' not reached'}"] += 1
    if not hit:
        if (outcome is not None) != trapped:
            raise Difference(f"{op}: {outcome or 'no trap'}, expected {'a trap' if trapped else 'none'}")
        return [after]
    seen[f"{fault.kind} in {op[0]}"] += 1
    if op[0] == "token":
        return _prefixes(before, who, params)
    if op[0] == "stream":                              # what is written stays written
        written = before.clone()
        written.written = after.written
        return [before, after, written]
    if op[0] == "host_fork":
        return [before, after, after.untold(before)]
    if at is not None and driven.vm.regions is None:   # the instruction itself, or YIELD behind it
        return [before] if trapped or at == driven.starts[block_of(op)] else [after]
    return [before, after]


def _prefixes(before: Oracle, who: int, params: dict) -> list[Oracle]:
    """The states between the instructions of a `token` block, up to a trap."""
    out = [before]
    for step in range(TOKEN_STEPS):
        o = out[-1].clone()
        try:
            o.do_token_step(o.contexts[who], step, **params)
        except Trapped:
            break
        o.collect()
        out.append(o)
    return out
