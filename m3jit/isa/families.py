"""Loads the families, one module each, in the order of the reference."""
import importlib

FAMILIES = ("control", "alu", "io", "memory", "contexts", "system")


def load() -> None:
    for name in FAMILIES:
        importlib.import_module(f"m3jit.isa.{name}")
