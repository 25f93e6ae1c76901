"""Levels of the CPU backend that whole models run on in tests.

LLVM needs ten times as long for the baseline level as for the others.  By default tests/backends and tests/kernels run
every kind of kernel there, and of the whole models those that a test names: one of each kind.  `-m slow` runs the
others there, so that both together have every model of these tests on every level."""
from __future__ import annotations

from typing import Collection, Sequence

import pytest

NEWER = (("cpu:native", 1), ("cpu:native", 3), ("cpu:avx2", 2), ("auto", 2))
BASELINE = (("cpu:baseline", 2),)


def at_levels(name: str, models: Sequence[str], baseline: Collection[str] = (),
              slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parameters `name` and `levels` (pairs of backend and threads): each of `models` on the newer levels and on
    baseline.  On baseline all but those of `baseline` are slow; those of `slow` are so everywhere."""
    assert set(models) >= {*baseline, *slow}, "a model that is named is none of the test's"
    quick = {"newer": set(models) - set(slow), "baseline": set(baseline) - set(slow)}
    return pytest.mark.parametrize(f"{name}, levels", [
        pytest.param(model, levels, id=f"{model}-{kind}", marks=[] if model in quick[kind] else pytest.mark.slow)
        for model in models for kind, levels in (("newer", NEWER), ("baseline", BASELINE))])
