"""Which kernels the tests of this folder run on baseline: by default those executors.py names, with `-m slow` all that
compile there in seconds."""
from __future__ import annotations

import pytest

from tests.kernels import executors


@pytest.fixture(autouse=True)
def on_baseline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "all_levels", getattr(request, "param", "named") == "all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if getattr(metafunc.module, "run", None) is executors.run:
        metafunc.parametrize("on_baseline", ["named", pytest.param("all", marks=pytest.mark.slow)], indirect=True)
