"""Loads the families, one module each, in the order of the reference."""
import importlib

FAMILIES = ("control", "alu", "io", "memory", "contexts", "system",
            "tensor", "elementwise", "layout", "reduce", "transformer", "sampling",
            # declared, not executable yet
            "ssm_audio", "cluster", "learning", "devices", "storage_power",
            "deadlines_clock", "security", "tracing", "kv_tiers", "locks", "checkpoints", "escape_ops")


def load() -> None:
    for name in FAMILIES:
        importlib.import_module(f"m3jit.isa.{name}")
