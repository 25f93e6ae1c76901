"""all-MiniLM-L6-v2 against transformers' stored float64 results."""
from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

import m3jit
from m3jit.errors import UserError
from m3jit.models import store

ORACLE = Path(__file__).parent.parent / "oracles" / "minilm_vectors.json.gz"


def minilm() -> str | None:
    given = os.environ.get("M3JIT_TEST_MINILM")
    try:
        return given or str(store.path("minilm"))
    except UserError:
        return None


@pytest.mark.slow
@pytest.mark.skipif(minilm() is None, reason="MiniLM is not here: m3jit model get minilm, or set M3JIT_TEST_MINILM")
def test_vectors_against_transformers():
    rows = json.loads(gzip.decompress(ORACLE.read_bytes()))
    embedder = m3jit.load_embedder(minilm())
    assert (embedder.width, embedder.context, embedder.pooling, embedder.normalize) == (384, 512, "mean", True)
    assert [embedder.encode(row["text"]) for row in rows] == [row["ids"] for row in rows]
    found = embedder.embed([row["text"] for row in rows])
    apart = np.abs(found - np.array([row["vector"] for row in rows]))
    print(f"\nvectors of length 1: max {apart.max():.2g}, mean {apart.mean():.2g}, cos(guitar, instrument) "
          f"{found[0] @ found[1]:.4f}")
    assert apart.max() < 2e-6 and abs(found[0] @ found[1] - 0.7020186) < 1e-5
    baseline = m3jit.load_embedder(minilm(), backend="cpu:baseline", threads=1).embed([row["text"] for row in rows])
    assert baseline.tobytes() == found.tobytes()
