"""The accuracy table is printed by one command; a part of it here."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy, agreement

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("only, rows, columns", [("qwen2/F32", 2, 17), ("llama/F64", 1, 17), ("folder/bert", 1, 5)])
def test_rows_of_the_table(only, rows, columns):
    """Errors, perplexities with their ratio, equal tokens of so many; encoders have errors alone."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.accuracy", "--only", only], cwd=ROOT, capture_output=True,
                          text=True, timeout=240)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "every row is met", done
    found = [line for line in lines if only in line]
    assert len(found) == rows
    for line in found:
        parts = line.replace(", qwen2", ",qwen2").split()
        assert len(parts) == columns, line
        if columns > 5:
            ours, peer, ratio, same, _, compared = parts[6:12]
            assert abs(float(ratio) - 1) < 0.001 and float(ours) == pytest.approx(float(peer), rel=0.001)
            assert same == compared and int(same) > 500


def text(**changes: Any) -> dict[str, Any]:
    """An oracle's text of 200 tokens whose margins are 1, of a vocabulary of 3."""
    best = [[0] * 10 for _ in range(20)]
    return {"best": best, "exact_best": [], "margin": [[100] * 10 for _ in range(20)], "mean_error": 0.02,
            "nll": 1.0} | changes


def judged(row: dict[str, Any], nll: float = 1.0, others: int = 0) -> list[str]:
    logits = np.zeros((20, 10, 3))
    logits[..., 0] = 1
    logits.reshape(-1, 3)[:others, 1] = 2
    return agreement.judged(row, nll, logits).missed()


def test_what_is_not_met_is_said():
    assert judged(text()) == judged(text(), 1.0099) == judged(text(), 0.9901) == []
    assert "perplexity" in judged(text(), 1.0101)[0] and "perplexity" in judged(text(), 0.98)[0]
    assert judged(text(), float("nan"))
    assert judged(text(), others=1) == ["1 of 200 clear tokens differ"]
    unclear = text(margin=[[100] * 10] * 10 + [[10] * 10] * 10, mean_error=0.05)
    assert judged(unclear) == [] and "only 99" in judged(unclear | {"exact_best": [[0, 1]]})[0]
    few = text(margin=[[10] * 10] + [[100] * 10] * 19, mean_error=0.05)
    assert judged(few, others=5) == [] and "6 tokens are not" in judged(few, others=6)[0]


def test_errors_that_are_too_large_are_said():
    row = {"exact_logits": [0.0, 0.0], "logits": [0.1, 0.05], "max_error": 0.1, "mean_error": 0.05}
    for logits, missed in (([0.1, 0.1], 0), ([0.16, 0.0], 1), ([0.14, 0.14], 1), ([-0.14, -0.08], 1),
                           ([float("nan"), 0.0], 3)):
        assert len(agreement.errors(np.array(logits), row).missed()) == missed, logits


def test_errors_of_real_models_have_both_limits():
    """Ours at most 1.5 times the peer's, largest and mean; of SmolLM2 without what all logits share, the largest also
    with it."""
    assert agreement.beyond_luck((1.5, 0.3), (1.0, 0.2)) == []
    assert "error of a logit 1.51, expected at most 1.5" in agreement.beyond_luck((1.51, 0.3), (1.0, 0.2))
    assert "on average 0.31" in agreement.beyond_luck((1.5, 0.31), (1.0, 0.2))[0]
    assert len(agreement.beyond_luck((float("nan"), float("nan")), (1.0, 0.2))) == 2
    exact = np.zeros((2, 100))
    theirs = np.tile(np.linspace(-1, 1, 100), (2, 1))
    ours, small = 0.8 * theirs[:, ::-1], 0.4 * theirs
    assert accuracy.logit_errors(ours, theirs, exact)[1] == []
    assert accuracy.logit_errors(small + 1, theirs, exact)[1] == []
    (said,) = accuracy.logit_errors(small + 1.2, theirs, exact)[1]
    assert said == "error of a logit 1.6 with the common part, expected at most 1.5"
    ours[1, 5] = 2
    said = accuracy.logit_errors(ours, theirs, exact)[1]
    assert len(said) == 2 and "with the common part" in said[1]
