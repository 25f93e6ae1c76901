"""CPU targets: which instruction set level the code is compiled for.

Levels (x86-64): "baseline" (SSE2 only), "avx2" (x86-64-v3: AVX2, FMA, F16C), "avx512" (x86-64-v4 plus VNNI) and
"native" (the host CPU with all its features).  On AArch64 the levels are "baseline" (ARMv8-A with NEON) and "native".
A level the host lacks cannot be run and is refused by `CpuTarget.for_level`; `CpuTarget.cross` makes a target that can
only emit code (other architecture, or a higher level), for inspection.

The level never changes a result, only speed.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from m3jit.errors import UnsupportedError

LEVELS = ("baseline", "avx2", "avx512", "native")

# level -> (LLVM CPU name, extra features, features that the host must have to run the code)
_X86: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "baseline": ("x86-64", (), ("sse2",)),
    "avx2": ("x86-64-v3", (), ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe", "popcnt")),
    "avx512": ("x86-64-v4", ("avx512vnni",),
               ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "avx2", "fma", "f16c", "bmi",
                "bmi2", "lzcnt", "movbe", "popcnt")),
}
_X86_FEATURES: dict[str, frozenset[str]] = {
    "baseline": frozenset({"sse2"}),
    "avx2": frozenset({"sse2", "sse4.1", "avx", "avx2", "fma", "f16c", "bmi2"}),
    "avx512": frozenset({"sse2", "sse4.1", "avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq",
                         "avx512vl", "avx512vnni"}),
}


class TargetError(UnsupportedError):
    """The asked-for instruction set level is unknown or the host cannot run it."""


@functools.cache
def host() -> tuple[str, str, frozenset[str]]:
    """(triple, LLVM CPU name, names of the features the host has)."""
    import llvmlite.binding as llvm
    features = llvm.get_host_cpu_features()
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), frozenset(f for f, on in features.items() if on)


@dataclass(frozen=True)
class CpuTarget:
    """What code is compiled for.  `features` are the names the renderer asks about, `llvm_features` LLVM's string."""
    level: str
    triple: str
    cpu: str
    llvm_features: str
    features: frozenset[str]
    runnable: bool = True

    @classmethod
    def for_level(cls, level: str = "native") -> "CpuTarget":
        """The target of `level` on this host.  TargetError: unknown level, or the host lacks a feature it needs."""
        triple, name, available = host()
        if level == "native":
            import llvmlite.binding as llvm
            return cls(level, triple, name, llvm.get_host_cpu_features().flatten(), _with_implied(triple, available))
        target = cls.cross(level, triple)
        needed = _X86[level][2] if target.arch == "x86_64" else ()
        missing = [f for f in needed if f not in available]
        if missing:
            raise TargetError(
                f"CPU level {level!r} cannot run on this host ({name}): it lacks {', '.join(missing)}. "
                f"Levels this host can run: {', '.join(available_levels())}.")
        return CpuTarget(level, triple, target.cpu, target.llvm_features, target.features)

    @classmethod
    def cross(cls, level: str, triple: str) -> "CpuTarget":
        """A target that need not run here: code can be emitted and read, not called."""
        arch = _arch(triple)
        if arch == "x86_64":
            if level not in _X86:
                raise TargetError(f"unknown CPU level {level!r} for {triple}; known: {', '.join(_X86)} "
                                  "(and native, for the host itself)")
            cpu, extra, _ = _X86[level]
            flags = [f"+{f}" for f in extra] + (["-prefer-256-bit"] if level == "avx512" else [])
            return cls(level, triple, cpu, ",".join(flags), _X86_FEATURES[level], runnable=False)
        if arch == "aarch64":
            if level != "baseline":
                raise TargetError(f"unknown CPU level {level!r} for {triple}; known: baseline "
                                  "(and native, for the host itself)")
            return cls(level, triple, "generic", "+neon", frozenset({"neon", "fma"}), runnable=False)
        raise TargetError(f"the CPU backend has no target {triple!r}; it knows x86_64 and aarch64")

    @property
    def arch(self) -> str:
        return _arch(self.triple)

    def has(self, feature: str) -> bool:
        return feature in self.features

    @property
    def vector_bits(self) -> int:
        """Width of one machine vector."""
        if self.has("avx512f") and self.has("avx512vl") and self.has("avx512bw") and self.has("avx512dq"):
            return 512
        return 256 if self.has("avx2") else 128

    @property
    def key(self) -> str:
        """Everything about the target that can change the code: part of the code cache's key."""
        return f"{self.triple}|{self.cpu}|{self.llvm_features}"

    def machine(self, jit: bool = False):
        """A new LLVM TargetMachine.  One per use: a JIT owns the machine it is given."""
        import llvmlite.binding as llvm
        if _arch(llvm.get_process_triple()) == self.arch:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
        else:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.llvm_features, opt=2, reloc="pic", codemodel="default", jit=jit)


def _arch(triple: str) -> str:
    arch = triple.split("-", 1)[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)


def _with_implied(triple: str, available: frozenset[str]) -> frozenset[str]:
    """Feature names as the renderer asks for them: LLVM spells SSE 4.1 'sse4.1', and NEON always has fma."""
    return available | {"neon", "fma"} if _arch(triple) == "aarch64" else available


@functools.cache
def available_levels() -> tuple[str, ...]:
    """The levels this host can run, lowest first; "native" is always among them."""
    triple, _, available = host()
    if _arch(triple) != "x86_64":
        return ("baseline", "native")
    return tuple(n for n, (_, _, needed) in _X86.items() if all(f in available for f in needed)) + ("native",)
