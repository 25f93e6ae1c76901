"""Every body runs in the compiler's namespace too: it builds IR of the right type, or refuses in the proper way.

A body that branches on a tensor's values, or reaches for NumPy, fails here.
"""
from __future__ import annotations

from typing import Any

import pytest

from m3jit.ir.tensor import F64T, I64T, Node, TensorType
from m3jit.ir.trace import Recorder, TraceXp, Untraceable
from m3jit.ir.trace_model import KVRef
from m3jit.ir.trace_recurrent import CellKey, CellRef, cell_type
from m3jit.isa import table
from m3jit.isa.fields import Hidden, PayloadReg, RegField
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import NEW_STATE, Tensor
from tests.ops.cases import WITNESS, execute
from tests.ops.test_witness import MODULES

# These are executed by the interpreter, whatever their operands are.
INTERPRETED = {"KV_TRUNCATE": "shortens a stream", "KV_COMPRESS": "copies a stream's rows",
               "SSM_RESET": "nothing to compute", "HASH": "sequential by nature", "CHECKSUM": "sequential by nature"}


class Nodes(Recorder):
    """Collects nodes and nothing else."""

    def __init__(self) -> None:
        self.made: list[Node] = []

    def emit(self, node: Node) -> Node:
        self.made.append(node)
        return node

    def assume_equal(self, a: Any, b: Any) -> bool: return a == b
    def check(self, cond: Node, reason: str) -> None: pass
    def cell(self, state: CellRef, key: CellKey) -> Node: return Node("input", cell_type(key))
    def same_stream(self, key: Any, geometry: Any, dtype: str, new: str) -> bool: return True
    def kv_length(self, kv: KVRef, layer: int) -> Node: return Node("input", I64T)


def traced(f: Any, value: Any) -> Any:
    """A register operand as the compiler sees it."""
    if isinstance(value, Tensor):
        weight = value.dtype.is_block
        return Node("weight" if weight else "input", TensorType(value.dtype, value.shape), attrs={"tensor": value})
    if isinstance(value, CellState):
        return CellRef(("S", 0), {})
    if value is NEW_STATE or isinstance(value, KVStream):
        known = isinstance(value, KVStream)
        return KVRef(("S", 0), value.geometry if known else None, value.dtype.name if known else None, {})
    if isinstance(f, (RegField, PayloadReg, Hidden)) and isinstance(value, (int, float)):
        return Node("input", I64T if isinstance(value, int) else F64T)
    return value


def trace(name: str, operands: dict[str, Any]) -> tuple[Any, ...]:
    row, args = table.BY_NAME[name], {}
    for f in row.fields:
        dest_only = getattr(f, "dest", False) and not getattr(f, "both", False)
        args[f.name] = traced(f, operands.get(f.name, None if dest_only or isinstance(f, Hidden) else f.default))
    result = row.body(TraceXp(Nodes()), **args)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", sorted(WITNESS))
def test_bodies_trace_to_the_types_they_compute(name):
    count = refused = 0
    reasons: set[str] = set()
    for case in WITNESS[name]():
        count += 1
        try:
            nodes = trace(name, case.operands)
        except Untraceable as e:
            refused += 1
            reasons.add(str(e))
            continue
        results = execute(name, case.operands)
        assert len(nodes) == len(results)
        for node, value in zip(nodes, results):
            if isinstance(value, Tensor):
                assert node.type == TensorType(value.dtype, value.shape), f"{case.label}: {node.type} for {value}"
            elif isinstance(value, CellState):
                assert isinstance(node, CellRef)
            elif isinstance(value, KVStream):
                assert isinstance(node, KVRef)
            elif value is not None and isinstance(node, Node):
                assert node.type == (I64T if isinstance(value, int) else F64T), case.label
    assert MODULES and count
    assert (refused < count) or name in INTERPRETED, f"{name} never compiles: {sorted(reasons)}"
