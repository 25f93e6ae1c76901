"""The control-flow graph: blocks, edges, loops, liveness."""
import random

from m3jit.frontend import Cfg, assemble, liveness
from m3jit.frontend.cfg import registers_of
from m3jit.isa.fields import Reg
from tests.frontend import samples


def graph(source: str) -> Cfg:
    return Cfg(assemble(source))


def R(*numbers: int) -> frozenset:
    return frozenset(Reg(0, n) for n in numbers)


LOOP = """
    LOADI R1, 10
    LOADI R2, 0
outer:
    ADDS R2, R2, R1
inner:
    SUB R3, R3, 1
    COMPARE R3, 0
    IF_GREATER R3, inner
    COMPARE R1, 0
    IF_GREATER R1, outer
    HALT
dead:
    NOP
    JUMP dead
"""


def test_blocks_and_edges():
    g = graph(LOOP)
    kinds = {(e.source, e.target): e.kind for b in g.blocks.values() for e in b.successors}
    p = g.program
    outer, inner, dead = (p.symbol(n).value for n in ("outer", "inner", "dead"))
    assert list(g.blocks) == [0, outer, inner, inner + 96, inner + 160, dead]
    assert kinds[inner, inner] == "branch" and kinds[inner, inner + 96] == "next" and kinds[dead, dead] == "jump"
    assert g.blocks[inner + 160].successors == []
    assert g.reachable == frozenset(list(g.blocks)[:-1]) and g.entries == [0]


def test_loops_and_dominators():
    g = graph(LOOP)
    p = g.program
    outer, inner = (p.symbol(n).value for n in ("outer", "inner"))
    assert [(lp.header, lp.latches, set(lp.blocks)) for lp in g.loops] == \
        [(outer, (inner + 96,), {outer, inner, inner + 96}), (inner, (inner,), {inner})]
    assert g.dominators[0] is None and g.dominators[inner] == outer and g.dominates(0, inner + 160)
    assert not g.dominates(inner, outer)


def test_liveness():
    g = graph(LOOP)
    live = liveness(g, outputs=R(2))
    p = g.program
    outer, inner = (p.symbol(n).value for n in ("outer", "inner"))
    assert live.live_in[0] == R(3)
    assert live.live_in[outer] == live.live_in[inner] == R(1, 2, 3)
    assert live.live_in[inner + 160] == R(2)
    assert live.exposed[inner] == R(3) and live.written[inner] == R(3)
    everything = liveness(g)
    assert everything.live_out[inner + 160] == frozenset() or everything.live_in[inner + 160] == R(1, 2, 3)


def test_calls_spawns_and_returns():
    g = graph("""
        LOADI rA, 1
        CALL f ARGS=[rA, rB]
        SPAWN_CONTEXT rC, child
        HALT
        child:
        ADDS rD, rA, rA
        HALT
        .func f(rX, rY)
        MOV rY, rX
        MOV sOut, rX
        RET""")
    p = g.program
    f, child = p.symbol("f").value, p.symbol("child").value
    assert g.entries == [0, child, f]
    kinds = sorted(e.kind for b in g.blocks.values() for e in b.successors)
    assert kinds == ["call", "next", "return", "spawn"]
    live = liveness(g, outputs=frozenset())
    assert live.live_in[f] == R(0)
    call = next(i for _, i in g.instructions if i.op.control == "call")
    reads, writes = registers_of(call)
    assert reads == writes == frozenset({p.register("rA"), p.register("rB")})


def test_going_back_to_a_fork():
    g = graph("LOADI rX, 1\nFORK rS\nLOADI rX, 2\nABORT rS, RESUME\nHALT")
    resume = [e for b in g.blocks.values() for e in b.successors if e.kind == "resume"]
    assert [e.target for e in resume] == [64]
    assert not [e for b in graph("FORK rS\nABORT rS\nHALT").blocks.values() for e in b.successors if e.kind == "resume"]


def test_dump_names_everything():
    text = graph(LOOP).dump()
    assert "block 0x0040 outer (loop) live-in R1 R2 R3" in text
    assert "unreachable" in text and "IF_GREATER R3, inner" in text


def test_random_programs_partition_into_blocks():
    for seed in range(40):
        p = samples.program(random.Random(seed))
        g = Cfg(p)
        assert [x for b in g.blocks.values() for x in b.instructions] == p.instructions
        live = liveness(g)
        for b in g.blocks.values():
            assert live.exposed[b.start] <= live.live_in[b.start]
            for e in b.successors:
                assert b.end == e.target or e.target in g.blocks
        assert set(g.order()) == {b for b in g.reachable if any(True for _ in [b])}
        g.dump()


def test_the_time_of_a_listing_grows_with_its_length():
    """Ten times as many labels take about ten times as long, not a hundred times."""
    import gc
    import time

    def seconds(n: int) -> float:
        program = assemble("".join(f"l{i}: JUMP l{i + 1}\n" for i in range(n)) + f"l{n}: HALT\n")
        gc.disable()                                       # it would go through what all tests before have left
        try:
            began = time.process_time()
            Cfg(program).dump()
            return time.process_time() - began
        finally:
            gc.enable()
    seconds(100)
    few = [seconds(1000) for _ in range(3)]
    many = [seconds(10_000) for _ in range(3)]             # a busy machine slows some of them down
    assert min(many) < 40 * max(few), (few, many)
