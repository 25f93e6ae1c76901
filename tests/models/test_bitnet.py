"""bitnet: llama.cpp's graph (SiLU) against llama.cpp's stored logits, BitNet-b1.58-2B4T's squared ReLU against those of
transformers, ternary weights and scales of matrices."""
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import agreement
from m3jit.models.model_error import ModelFileError
from m3jit.models.provider import Models
from tests.models.peers import near_the_peer
from tests.models.test_architectures import rewritten, set_key, set_tensor
from tests.models.test_llama import generate

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_bitnet as tiny  # noqa: E402  (found through the path set above)


def oracle(name: str) -> dict:
    return json.loads(gzip.decompress((ROOT / f"tests/oracles/{name}.json.gz").read_bytes()))


SILU, RELU2 = oracle("tiny_bitnet"), oracle("tiny_bitnet_relu2")
PROMPT, MODELS = SILU["prompt"], SILU["models"] | RELU2["models"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bitnet")


@pytest.mark.parametrize("name", tiny.names() + tiny.names(peer=False))
def test_logits_and_tokens_against_the_peers(name, folder):
    """As near to the unrounded model as the peer is (`near_the_peer`); transformers rounds nothing in F32
    models, and its cache is exact."""
    assert RELU2["prompt"] == PROMPT
    slack = agreement.F16_CACHE if name in RELU2["models"] else 0.0
    near_the_peer(name, tiny.build(folder, name), MODELS[name], PROMPT, slack)


def test_the_activation_matters(folder):
    """The squared ReLU is far from what SiLU gives for the same weights."""
    a, b = (np.array(MODELS[name]["exact_logits"]) for name in ("silu/F32", "relu2/F32"))
    assert np.abs(a - b).max() > 1


def test_both_ternary_types_compute_alike(folder):
    """TQ1_0 and TQ2_0 store the same numbers."""
    a, b = (generate(tiny.build(folder, f"silu/{t}"), "cpu", prompt=PROMPT, tokens=1)[2] for t in ("TQ1_0", "TQ2_0"))
    assert a.get("rLogits").data.tobytes() == b.get("rLogits").data.tobytes()


@pytest.mark.parametrize("change, message", [
    (set_key("bitnet.hidden_activation", "gelu"), "'bitnet.hidden_activation': is 'gelu'; expected one of silu, relu2"),
    (set_tensor("blk.1.ffn_sub_norm.weight", 256),
     r"'blk.1.ffn_sub_norm.weight': has shape \[256\]; expected shape \[512\]"),
    (set_tensor("blk.0.attn_q.scale", 2), r"'blk.0.attn_q.scale': has shape \[2\]; expected shape \[1\]"),
    (lambda keys, tensors: tensors.pop("blk.0.attn_sub_norm.weight"), "'blk.0.attn_sub_norm.weight': is missing"),
])
def test_files_that_do_not_fit(change, message, folder, tmp_path):
    models = Models()
    path = rewritten(tiny.build(folder, "silu/F32"), tmp_path / "bad.gguf", change)
    with pytest.raises(ModelFileError, match=message):
        models.assembly(models.load(str(path)))
