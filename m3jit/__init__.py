"""m3jit: a JIT-compiling virtual machine for M³-AVM bytecode."""

__version__ = "0.1.0"
