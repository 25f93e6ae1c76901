"""Latent attention (deepseek2): llama.cpp's stored logits for both layouts of files, what the stream holds,
and metadata that does not fit."""
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from m3jit.isa.kv import KVGeometry
from m3jit.models.model_error import ModelFileError
from m3jit.models.provider import Models
from tests.models.peers import near_the_peer
from tests.models.test_architectures import rewritten, set_key, set_tensor
from tests.models.test_llama import generate

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_deepseek as tiny  # noqa: E402  (found through the path set above)

ORACLE = json.loads(gzip.decompress((ROOT / "tests/oracles/tiny_deepseek.json.gz").read_bytes()))
PROMPT = ORACLE["prompt"]
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n.startswith("lite") else n for n in tiny.names()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_against_llama_cpp(name, folder):
    near_the_peer(name, tiny.build(folder, name), ORACLE["models"][name], PROMPT)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_older_files_have_the_parts_of_newer_ones(kind, folder):
    """The same numbers: bytes of the values' rows, values of the keys' (F32, where they are quantised otherwise)."""
    models = Models()
    old, new = (models.load(str(tiny.build(folder, f"plain/{layout}/{kind}"))) for layout in ("old", "new"))
    for part in ("attn_v_b", "attn_k_b"):
        a, b = (m.tensor(f"blk.1.{part}.weight") for m in (old, new))
        assert a.shape == b.shape
        if part == "attn_v_b" or kind != "Q8_0":
            assert a.dtype is b.dtype and a.tobytes() == b.tobytes()
        else:
            whole = tiny.values_of("blk.1.attn_kv_b.weight", (640, 128))
            want = gguf.quants.dequantize(gguf.quants.quantize(whole, gguf.GGMLQuantizationType.Q8_0),
                                          gguf.GGMLQuantizationType.Q8_0).reshape(4, 160, 128)[:, :64]
            np.testing.assert_array_equal(a.data, want.transpose(0, 2, 1))


@pytest.mark.parametrize("layout", ["old", "new"])
def test_the_stream_holds_latent_rows_alone(layout, folder):
    """One row of rank + rotated features a token and layer, whatever the number of heads."""
    _, _, vm = generate(tiny.build(folder, f"plain/{layout}/F32"), "cpu", prompt=PROMPT, tokens=1)
    stream = vm.machine.state_of(vm.main, 0)
    assert stream.geometry == KVGeometry(1, tiny.RANK + tiny.ROPE, tiny.RANK, shared=True)
    assert stream.page_bytes == 64 * (tiny.RANK + tiny.ROPE) * 2 and stream.length(1) == len(PROMPT)


def test_streams_of_latent_rows_in_other_types(folder):
    path = tiny.build(folder, "yarn/new/F32")
    exact = generate(path, "cpu", prompt=PROMPT, tokens=1, kv_type="F32")[2].get("rLogits").data
    for kv_type, bound in (("BF16", 0.2), ("Q8_0", 0.4)):
        _, registers, vm = generate(path, "cpu", prompt=PROMPT, tokens=1, kv_type=kv_type)
        assert 0 < np.abs(vm.get("rLogits").data - exact).max() < bound
        assert vm.machine.state_of(vm.main, 0).dtype.name == kv_type
        assert generate(path, "interpreter", prompt=PROMPT, tokens=1, kv_type=kv_type)[1] == registers


@pytest.mark.parametrize("name, change, message", [
    ("plain/new/F32", set_tensor("blk.1.attn_k_b.weight", (4, 64, 128)),
     r"'blk.1.attn_k_b.weight': has shape \[4, 64, 128\]; expected shape \[4, 128, 64\]"),
    ("plain/old/F32", set_tensor("blk.1.attn_kv_b.weight", (600, 128)),
     r"'blk.1.attn_kv_b.weight': has shape \[600, 128\]; expected shape \[640, 128\]"),
    ("plain/old/F32", set_key("deepseek2.attention.kv_lora_rank", 1000),
     "latent rows of 1000; expected all above 0, latent and rotated features together at most 1024"),
    ("plain/old/F32", set_key("deepseek2.rope.scaling.attn_factor", 2.0),
     "'deepseek2.rope.scaling.attn_factor': is not 1"),
    ("experts/new/F32", set_key("deepseek2.expert_group_count", 3),
     r"expert_group_count': is 3, 3 of them used; expected a divisor of the 8 experts"),
    ("groups/new/F32", set_key("deepseek2.expert_group_used_count", 1),
     r"expert_group_used_count': is 1, of 2 experts each; expected groups that hold the 3 experts of a token"),
    ("experts/new/F32", set_key("deepseek2.expert_gating_func", 3), r"expert_gating_func': is 3; expected 1 or 2"),
])
def test_files_that_do_not_fit(name, change, message, folder, tmp_path):
    models = Models()
    path = rewritten(tiny.build(folder, name), tmp_path / "bad.gguf", change)
    with pytest.raises(ModelFileError, match=message):
        models.assembly(models.load(str(path)))
