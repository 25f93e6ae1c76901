"""Values of options: numbers that are finite and within bounds, sizes, names of registers.

What does not fit is wrong usage (exit code 2), and the message names the option.
"""
from __future__ import annotations

import math
from typing import Any

import click

from m3jit.errors import UserError, brief

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SMALLEST, LARGEST = 1 << 20, 1 << 62                   # bytes of a --memory-limit
MAX_SECONDS = 1e8                                      # about three years
MAX_STEPS = 2 ** 62


class UsageError(UserError):
    """A command was called in a way it does not have; the message names the option or argument."""
    exit_code = 2


class Finite(click.ParamType):
    """A float from `low` to `high`; inf and nan are none.  low_open: `low` itself is not allowed."""
    name = "number"

    def __init__(self, low: float, high: float, low_open: bool = False):
        self.low, self.high, self.low_open = low, high, low_open

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; click's BadParameter otherwise."""
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is no number", param, ctx)
        if not math.isfinite(number) or not self.low <= number <= self.high or self.low_open and number == self.low:
            low = f"over {self.low:g}" if self.low_open else f"{self.low:g}"
            self.fail(f"{value} is not a number from {low} to {self.high:g}" if not self.low_open else
                      f"{value} is not a number {low} and at most {self.high:g}", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number from `min` to `max`, with a message that says so."""
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; click's BadParameter otherwise."""
        try:
            int(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is no whole number", param, ctx)
        return super().convert(value, param, ctx)


class Name(click.ParamType):
    """The name of a file or folder."""
    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name; click's BadParameter where it is empty."""
        if not value:
            self.fail("'' names nothing; give the name of a file or folder", param, ctx)
        return value


class Size(click.ParamType):
    """Bytes of "512M", "2g", "1000000", a megabyte at least.  zero: whether 0 is one; of: what they are to hold."""
    name = "size"

    def __init__(self, zero: bool = False, of: str = "program"):
        self.zero, self.of = zero, of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes; click's BadParameter otherwise."""
        if isinstance(value, int):
            return value
        number, unit = value.strip().lower().removesuffix("ib").removesuffix("b"), ""
        if number and number[-1] in UNITS:
            number, unit = number[:-1], number[-1]
        try:
            size = int(float(number) * UNITS[unit])
        except (ValueError, OverflowError):
            self.fail(f"{value}: expected a size such as 512M or 2G", param, ctx)
        if size < SMALLEST and not (self.zero and size == 0):
            self.fail(f"{value}: less than a megabyte holds no {self.of}; expected 1M or more"
                      f"{', or 0' * self.zero}", param, ctx)
        if size > LARGEST:
            self.fail(f"{value}: more than any machine has; expected a size such as 512M or 2G", param, ctx)
        return size


SECONDS = Finite(0, MAX_SECONDS, low_open=True)
STEPS = Whole(1, MAX_STEPS)


def register_of(vm: Any, option: str, name: str) -> Any:
    """The register an option names.  UsageError: the program has none of that name."""
    try:
        return vm.register(name)
    except UserError as error:
        raise UsageError(f"{option} {brief(name)}: {error}") from None
