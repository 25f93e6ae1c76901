"""Memory of 100 forks of a SmolLM2 context of 4k tokens, each 64 tokens further on.

The prompt is computed once.  100 machines begin behind it, with its key/value stream and the logits of its next token,
draw different texts, and run together in a batch.  Counted are the pages and tables that they have and the prompt has
not, each once, by identity; what else a machine has (registers, logits) shows in the memory of the process.
"""
from __future__ import annotations

import sys
from typing import Any, Iterable, Iterator

import numpy as np

from benchmarks.generation import Ours
from benchmarks.peer_llama import fixed_tokens
from benchmarks.state_setup import STATED, Setup
from benchmarks.table import Row

NAME = "100 forks of a 4k context"
FORKS, TOKENS = 100, 64
PROMPTS = (4096, 4000)                  # tokens: the last page full, and half full
SLACK = 0.02                            # of the context's keys and values


def parts(stream: Any) -> Iterator[tuple[Any, int]]:
    """Everything a stream holds, with its bytes: pages, tables, claims."""
    for layer in stream.layers.values():
        table, held = layer.pages, layer.held
        yield layer, sys.getsizeof(layer)
        for part in (table, table.leaves, table.top, layer.claim):
            yield part, sys.getsizeof(part)
        for leaf in table.leaves:
            for part in (leaf, leaf.pages, leaf.table):
                yield part, sys.getsizeof(part)
            for page in leaf.pages:
                yield page, stream.page_bytes + sys.getsizeof(page)
        while held is not None:
            yield held, sys.getsizeof(held) + sys.getsizeof(held[0])
            held = held[1]


def unique(streams: Iterable[Any]) -> dict[int, int]:
    """Identity -> bytes of all that these streams hold."""
    return {id(part): nbytes for stream in streams for part, nbytes in parts(stream)}


def anonymous() -> int:
    """Bytes of the process's memory that is no file's."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))


def registers(machines: Iterable[Any]) -> int:
    """Bytes of the arrays that registers hold, each once."""
    found = {}
    for vm in machines:
        for value in vm.main.R:
            array = getattr(value, "data", None)
            while isinstance(getattr(array, "base", None), np.ndarray):
                array = array.base
            if isinstance(array, np.ndarray):
                found[id(array)] = array.nbytes
    return sum(found.values())


def begin(ours: Ours, program: Any, ids: np.ndarray, tokens: int, seed: int, start: int = 0) -> Any:
    """A machine with the hosted program (m3jit.models.hosted)."""
    import m3jit
    from m3jit.vm.streams import CallbackSink
    vm = m3jit.VM(program, backend="cpu", threads=ours.threads, models=ours.models, seed=seed)
    values = {"rTemp": 1.0, "rTopP": 1.0, "rMinP": 0.0, "rTopK": 0, "rContext": 8192, "rMaxTokens": tokens,
              "rWanted": -1, "rGuided": 0, "rStart": start, "rMarks": 0, "rMade": 0, "rToken": -1}
    for name, value in values.items():
        vm.set(name, value)
    vm.sinks["TOKENS"] = CallbackSink("tokens", lambda _: None)
    vm.push_input(ids)
    return vm


def measure(setup: Setup) -> list[Row]:
    import m3jit
    from m3jit.models.program import Options
    ours, rows = Ours(setup.smollm2), []
    text = ours.models.assembly(ours.model, options=Options(hosted=True))
    program = m3jit.assemble(text.replace("IF_EQUAL stop", "NOP ; go on"))
    for length in PROMPTS:
        ids = np.array(fixed_tokens(length, ours.model.info("vocab")), np.int64)
        base = begin(ours, program, ids, 1, 0)
        base.run()
        states, logits = base.states(object), base.get("rLogits")
        (stream,) = [s for s in states.values() if type(s).__name__ == "KVStream"]
        before = anonymous()
        machines, batch = [], m3jit.Batch()
        for seed in range(FORKS):
            vm = begin(ours, program, ids, TOKENS, seed, length)
            for name, state in states.items():
                vm.set_state(name, state)
            vm.set("rLogits", logits)
            batch.add(vm)
            machines.append(vm)
        batch.run()
        after = anonymous()
        streams = [next(s for s in vm.states(object).values() if type(s).__name__ == "KVStream") for vm in machines]
        made = [s.length(0) - length for s in streams]
        if set(made) != {TOKENS - 1}:                  # the last token drawn is not a row yet
            raise RuntimeError(f"the forks have {sorted(set(made))} more rows, not {TOKENS - 1}")
        known, found = unique([stream]), unique(streams)
        used = sum(nbytes for part, nbytes in found.items() if part not in known)
        per_page, layers = stream.page_bytes, len(stream.layers)
        allowed = FORKS * layers * per_page * (TOKENS / 64 + 1) + SLACK * layers * per_page * length / 64
        rows.append(Row(f"{NAME} ({length} tokens), each {TOKENS} new tokens: pages and tables",
                        f"<= {allowed / 1e6:.1f} MB",
                        f"{used / 1e6:.1f} MB; the context has {stream.nbytes / 1e6:.1f} MB", used <= allowed))
        rows.append(Row(f"the same: memory of the process that the {FORKS} machines added", STATED,
                        f"{(after - before) / 1e6:.0f} MB: pages, tensors in registers "
                        f"({registers(machines) / 1e6:.0f} MB), temporaries of the batch", None))
        for vm in machines:
            vm.close()
        del machines, streams, batch, states, stream, found, known
    return rows
