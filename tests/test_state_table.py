"""The table of versioned state (`benchmarks/state.py`): verdicts, rows that cannot be measured, the exit status."""
from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import state  # noqa: E402  (found through the path set above)
from benchmarks.state_setup import STATED, Setup, micros, p50_p99  # noqa: E402
from benchmarks.table import Row  # noqa: E402


def run(monkeypatch, capsys, rows, *arguments: str) -> tuple[int, list[str]]:
    """(exit status, lines) where the module of every row gives these."""
    def measure(setup):
        if isinstance(rows, Exception):
            raise rows
        return rows
    monkeypatch.setattr(state, "row_module", lambda name: SimpleNamespace(NAME=f"row {name}", measure=measure))
    status = state.main(["--rows", "fork", *arguments])
    return status, capsys.readouterr().out.splitlines()[1:]


def test_bounds_decide_the_exit_status(monkeypatch, capsys, tmp_path):
    met, stated = Row("a", "<= 1", "0.5", True), Row("b", STATED, "7", None)
    both = ["met        | a | <= 1 | 0.5", "stated     | b | stated | 7"]
    assert run(monkeypatch, capsys, [met, stated]) == (0, both)
    assert run(monkeypatch, capsys, [met, Row("c", "<= 1", "2", False)])[0] == 1
    assert run(monkeypatch, capsys, [met, Row("d", "<= 1", "no peer", None)])[0] == 1
    run(monkeypatch, capsys, [met], "--json", str(tmp_path / "rows.json"))
    assert '"seen": "0.5"' in (tmp_path / "rows.json").read_text()


def test_a_row_that_fails_does_not_hide_the_others(monkeypatch, capsys):
    status, lines = run(monkeypatch, capsys, OSError("no such file"))
    assert status == 1 and lines == ["no verdict | row fork |  | not measured: OSError: no such file"]
    monkeypatch.undo()
    monkeypatch.setattr(state, "ROWS", (*state.ROWS, "absent"))
    assert state.main(["--rows", "absent"]) == 1
    assert "there is no benchmarks/state_absent.py" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        state.main(["--rows", "fork,zebra"])
    assert "no row zebra; the rows are fork, forks100" in capsys.readouterr().err


def test_setup_says_what_is_missing():
    with pytest.raises(FileNotFoundError,
                       match="no SmolLM2 at /no/model.gguf: give --smollm2 FILE, or run `m3jit model"):
        Setup("/no/model.gguf", "/no", sys.executable).smollm2


def test_percentiles():
    assert p50_p99([float(i) for i in range(1, 201)]) == (100.5, 198.0) and micros(1.26e-6) == "1.3 us"


class Texts:
    """An engine whose texts come as far as these say: tokens, whether one is begun, whether it ends."""

    def __init__(self, tokens: int, begun: bool, ended: bool = False):
        self.tokens, self.begun, self.ended = tokens, begun, ended

    def submit(self, jobs):
        over = threading.Event()
        if self.ended:
            over.set()
        return [SimpleNamespace(tokens=[0] * (self.tokens if len(job.ids) < 100 else 0), done=over, state="active",
                                member=1 if self.begun else None, cancel=lambda: None, finish_reason="stop")
                for job in jobs]


@pytest.mark.parametrize("engine, error, words", [
    (Texts(0, True), TimeoutError, "waited 0.05 s until 3 texts beside it have three tokens each; the engine"),
    (Texts(3, False), TimeoutError, "waited 0.05 s until the engine begins with the prompt"),
    (Texts(3, True), TimeoutError, "until the text that was cancelled has ended; it is active, with 0 tokens"),
    (Texts(1, True, True), RuntimeError, r"a text ended \(stop, 1 tokens\) before 3 texts beside it have three")])
def test_a_cancel_that_does_not_come_is_said(monkeypatch, engine, error, words):
    from benchmarks import state_cancel
    monkeypatch.setattr(state_cancel, "LONGEST", 0.05)
    with pytest.raises(error, match=words):
        state_cancel.seconds(engine, 1, 3, 0.0, np.random.default_rng(1))


def test_a_prefix_whose_text_does_not_come_is_said(monkeypatch):
    from benchmarks import state_prefix
    monkeypatch.setattr(state_prefix, "LONGEST", 0.05)
    with pytest.raises(TimeoutError, match="second request .*: waited 0.05 s for the next piece of a text, which is "
                                           "active, with 0 tokens; the engine hangs"):
        state_prefix.through_engine(SimpleNamespace(submit=Texts(0, True).submit))([1, 2])


def test_a_peer_that_hangs_is_ended(monkeypatch, tmp_path):
    from benchmarks import state_correction
    monkeypatch.setattr(state_correction, "LONGEST", 0.05)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    started = []
    popen = state_correction.subprocess.Popen
    monkeypatch.setattr(state_correction.subprocess, "Popen",
                        lambda *a, **named: started.append(popen(*a, **named)) or started[-1])
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for the peer's answer \(which setting is fastest\)"):
        state_correction.Peer(SimpleNamespace(peer_python=str(python), smollm2="x"), [1], [2])
    assert started[0].returncode == -9
