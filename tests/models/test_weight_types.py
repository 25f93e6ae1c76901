"""Files of every weight type against llama.cpp's stored logits, perplexity and greedy tokens."""
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from m3jit.models.ggml_types import GGML_TYPES
from m3jit.models.model_source import BLOCK_TYPES, FLOAT_TYPES
from tests.models.peers import near_the_peer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_models  # noqa: E402  (found through the path set above)

MODELS: dict[str, dict] = {}
for file in ("tiny_logits", "tiny_types"):
    oracle = json.loads(gzip.decompress((ROOT / f"tests/oracles/{file}.json.gz").read_bytes()))
    PROMPT = oracle["prompt"]
    MODELS |= oracle["models"]


def test_every_type_that_products_read_has_an_oracle():
    assert FLOAT_TYPES | BLOCK_TYPES == set(MODELS) - {make_tiny_models.MIX}


@pytest.mark.parametrize("name", MODELS)
def test_logits_perplexity_and_tokens_against_llama_cpp(name, tmp_path):
    near_the_peer(name, make_tiny_models.build(tmp_path, (name,))[name], MODELS[name], PROMPT)
