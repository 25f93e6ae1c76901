"""What the generated code looks like: instructions of each level, other architectures, refusals, fuzzed kernels."""
from __future__ import annotations

import re

import numpy as np
import pytest

from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.render import UnsupportedKernel
from m3jit.backends.cpu.target import CpuTarget, TargetError, host
from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from tests.backends.cpu_engines import LEVELS, check, engine
from tests.backends.test_cpu_memory import conversion_kernel
from tests.backends.test_cpu_ops import SPECIAL, ops_kernel
from tests.backends.test_cpu_region import chain_plan


def dot_kernel(lanes: int = 16) -> Kernel:
    """Rows in lanes: one dot4 per 4 columns, activations broadcast."""
    b = Builder("dot", lanes)
    w, x, o = b.ptr("w", "r", "i32"), b.ptr("x", "r", "i32"), b.ptr("o", "w", "i32")
    n = b.scalar("n")
    b.set_grid(b.scalar("groups"))
    acc = b.var("i32", 0)
    with b.loop(0, n) as i:
        acc.set(b.dot4(acc.get(), b.load_lanes("i32", w, (b.group * n + i) * lanes), b.load("i32", x, i)))
    b.store_lanes("i32", o, b.group * lanes, acc.get())
    return b.finish()


def scale_kernel() -> Kernel:
    b = Builder("scale", 64)
    x, y, n = b.ptr("x", "r", "f16"), b.ptr("y", "w", "f16"), b.scalar("n")
    b.set_grid((n + 63) // 64)
    inside = b.in_range(b.group * 64, n)
    v = b.load_lanes("f16", x, b.group * 64, mask=inside)
    b.store_lanes("f16", y, b.group * 64, b.rint(b.fma(v, v, v)), mask=inside)
    return b.finish()


def test_baseline_uses_sse2_only():
    for kernel in (scale_kernel(), dot_kernel(), ops_kernel("f32", 64)[0]):
        text = engine("baseline").assembly(kernel)
        assert not re.search(r"%[yz]mm|\tv[a-z]+\s|pmaddubsw|vfmadd|roundps|cvtph", text)
    assert "pmaddwd" in engine("baseline").assembly(dot_kernel())


@pytest.mark.skipif("avx2" not in LEVELS, reason="the host lacks AVX2")
def test_avx2_instructions():
    text = engine("avx2").assembly(scale_kernel())
    assert re.search(r"vfmadd\w+\s.*%ymm", text) and "vcvtph2ps" in text and "vcvtps2ph" in text
    assert "%zmm" not in text and "vroundps" in text
    assert "vpmaddwd" in engine("avx2").assembly(dot_kernel())


@pytest.mark.skipif("avx512" not in LEVELS, reason="the host lacks AVX-512 VNNI")
def test_avx512_instructions():
    assert "%zmm" in engine("avx512").assembly(scale_kernel())
    text = engine("avx512").assembly(dot_kernel())
    assert re.search(r"vpdpbusd\s.*%zmm", text)
    loop = text[text.index("vpdpbusd") - 400:text.index("vpdpbusd") + 200]
    assert "(%rsp)" not in loop                       # the accumulator stays in a register


def test_native_uses_vnni_where_the_host_has_it():
    if {"avx512vnni", "avxvnni"} & host()[2]:
        assert "vpdpbusd" in engine("native").assembly(dot_kernel())


def test_what_is_read_once_is_asked_for_into_the_first_level_alone():
    b = Builder("streamed", 16)
    w, o, n = b.ptr("w", "r", "i32"), b.ptr("o", "w", "i32"), b.scalar("n")
    b.set_grid(1)
    acc = b.var("i32", 0)
    with b.loop(0, n) as i:
        acc.set(acc.get() + b.load_lanes("i32", w, i * 16, ahead=4096))
    b.store_lanes("i32", o, 0, acc.get())
    text = engine("baseline").assembly(b.finish())
    assert "prefetchnta" in text and "prefetcht" not in text


def test_nothing_is_contracted():
    """A product and a sum stay two instructions."""
    b = Builder("muladd", 64)
    x, y = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32")
    b.set_grid(1)
    v = b.load_lanes("f32", x, 0)
    b.store_lanes("f32", y, 0, v * v + v)
    kernel = b.finish()
    for level in LEVELS:
        text = engine(level).assembly(kernel)
        assert "fmadd" not in text and "mulps" in text and "addps" in text


def test_renderings_are_reproducible():
    assert engine("native").llvm_ir(scale_kernel()) == engine("native").llvm_ir(scale_kernel())


@pytest.mark.parametrize("type", SPECIAL)
def test_aarch64_compiles(type):
    """The same kernels as AArch64 assembly: code generation only, nothing is run."""
    cross = Engine(CpuTarget.cross("baseline", "aarch64-unknown-linux-gnu"), cache=DiskCache.off())
    text = cross.assembly(ops_kernel(type, 64)[0])
    if type == "f32":
        assert re.search(r"fmla\s+v\d+\.4s", text) and "frintn" in text and "frintm" in text
    for kernel in (scale_kernel(), dot_kernel(), conversion_kernel("bf16", False)):
        assert "ret" in cross.assembly(kernel)
    region = cross.assembly(chain_plan(3, 128))
    assert "m3_run" in region and "msr\tFPCR" in region
    from m3jit.backends.cpu.runtime import runtime_text
    assert "m3_launch" in str(cross._optimised(runtime_text(cross.target)))


def test_refusals_name_what_is_wrong():
    with pytest.raises(TargetError, match="unknown CPU level 'avx3'.*known: baseline, avx2, avx512"):
        Engine("avx3")
    with pytest.raises(TargetError, match="no target 'riscv64-linux'"):
        CpuTarget.cross("baseline", "riscv64-linux")
    b = Builder("odd", 16)
    x = b.ptr("x", "r", "i32")
    b.set_grid(1)
    b.load("i32", x, 0, mask=b.lane < 3)
    kernel = b.finish()
    assert not engine("native").supports(kernel)
    with pytest.raises(UnsupportedKernel, match="load of i32 with a uniform index and a mask"):
        engine("native").kernel(kernel)


def test_a_level_the_host_lacks_is_refused(monkeypatch):
    from m3jit.backends.cpu import target
    poor = (target.host()[0], "old", frozenset({"sse2"}))
    monkeypatch.setattr(target, "host", lambda: poor)
    target.available_levels.cache_clear()
    try:
        with pytest.raises(TargetError, match="'avx2' cannot run on this host .old.: it lacks avx2.*can run: baseline"):
            CpuTarget.for_level("avx2")
    finally:
        monkeypatch.undo()
        target.available_levels.cache_clear()


def random_kernel(seed: int) -> tuple[Kernel, list]:
    """A random expression over loads, with variables, a loop, masks and a fold; and its arguments."""
    rng = np.random.default_rng(seed)
    lanes = int(rng.choice([8, 16, 32, 64]))
    b = Builder(f"random_{seed}", lanes)
    x, y, p = b.ptr("x", "r", "f32"), b.ptr("y", "r", "f16"), b.ptr("p", "r", "i32")
    o, q, r = b.ptr("o", "w", "f32"), b.ptr("q", "w", "i32"), b.ptr("r", "w", "bf16")
    n, k = b.scalar("n"), b.scalar("k", "f32")
    b.set_grid((n + (lanes - 1)) // lanes)
    base = b.group * lanes
    inside = b.in_range(base, n)
    pools = {"f32": [b.load_lanes("f32", x, base, mask=inside), b.load_lanes("f16", y, base, mask=inside), k,
                     b.f32(0.75)],
             "i32": [b.load_lanes("i32", p, base, mask=inside), b.lane, b.i32(5), b.i32(-3)]}

    def pick(t):
        return pools[t][rng.integers(0, len(pools[t]))]

    def step():
        match rng.integers(0, 11):
            case 0: pools["f32"].append(b.fma(pick("f32"), pick("f32"), pick("f32")))
            case 1: pools["f32"].append(pick("f32") * pick("f32") - pick("f32"))
            case 2: pools["f32"].append(b.select(pick("f32") < pick("f32"), pick("f32"), b.cvt(pick("i32"), "f32")))
            case 3: pools["f32"].append(b.rint(b.fmin(b.fmax(pick("f32"), -1000.0), 1000.0)))
            case 4: pools["i32"].append(b.cvt(b.floor(b.fmin(b.fmax(pick("f32"), -1000.0), 1000.0)), "i32"))
            case 5: pools["i32"].append(b.dot4(pick("i32"), pick("i32"), pick("i32")))
            case 6: pools["i32"].append((pick("i32") ^ pick("i32")) + (pick("i32") >> 3))
            case 7: pools["i32"].append(b.cvt((b.cvt(pick("i32"), "i64") * 12345 + base) >> 5, "i32"))
            case 8: pools["i32"].append(b.imin(pick("i32"), pick("i32")) - b.lshr(pick("i32"), 7))
            case 9: pools["f32"].append(b.sqrt(b.abs(pick("f32"))) / (b.abs(pick("f32")) + 1.0))
            case 10 if rng.random() < 0.3: pools["f32"].append(b.fold(b.lift(pools["f32"][0], "f32"), "fmax") + 0.0)

    for _ in range(rng.integers(1, 25)):
        step()
    acc = b.var("f32", 0.5)
    with b.loop(0, n, int(rng.integers(40, 90))) as i:
        acc.set(b.fma(acc.get(), pick("f32"), b.load("f32", x, i)))
        with b.if_((i + b.group) % 3 < 2):
            acc.set(acc.get() - pick("f32"))
    for _ in range(rng.integers(0, 4)):
        step()
    b.store_lanes("f32", o, base, b.fma(acc.get(), pick("f32"), pools["f32"][-1]), mask=inside)
    b.store_lanes("i32", q, base, pools["i32"][-1] + b.lane, mask=inside)
    b.store_lanes("bf16", r, base, pools["f32"][-1] + 0.0, mask=inside)
    size = int(rng.integers(1, 200))
    x = rng.standard_normal(size).astype(np.float32)
    return b.finish(), [x, rng.standard_normal(size).astype(np.float16),
                        rng.integers(-2**31, 2**31, size).astype(np.int32), np.zeros(size, np.float32),
                        np.zeros(size, np.int32), np.zeros(size, np.uint16), size, 1.25]


@pytest.mark.parametrize("seed", range(40))
def test_random_kernels(seed):
    kernel, args = random_kernel(seed)
    check(kernel, args, threads=(1, 2))
