"""mamba, mamba2 and hybrids as bytecode: tiny random models of each against llama.cpp's stored logits,
roll-back of whole models, and the errors of files that do not fit."""
from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import agreement
from m3jit.frontend import assemble
from m3jit.models.architectures import ARCHITECTURES
from m3jit.models.model_error import ModelFileError
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.vm import VM
from tests.models.peers import near_the_peer
from tests.models.test_architectures import rewritten
from tests.models.test_llama import generate

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_recurrent as tiny_models  # noqa: E402  (found through the path set above)

ORACLE = json.loads(gzip.decompress((ROOT / "tests/oracles/tiny_recurrent.json.gz").read_bytes()))
PROMPT = ORACLE["prompt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


def test_every_architecture_has_an_oracle():
    assert {family.arch for family in tiny_models.FAMILIES.values()} <= set(ARCHITECTURES)
    assert set(ORACLE["models"]) == set(tiny_models.names())


@pytest.mark.parametrize("name", tiny_models.names())
def test_logits_and_tokens_against_llama_cpp(name, folder):
    """Without weights or a cache that are rounded the peer's error is 0, and only the order of sums differs."""
    logits = near_the_peer(name, tiny_models.build(folder, name), ORACLE["models"][name], PROMPT, agreement.SUMS)
    assert logits.std() > 1


TWICE = """    COMPARE rPos, 0
    IF_EQUAL on
    COMPARE rTwice, 0
    IF_NOT_EQUAL on
    LOADI rTwice, 1
    RESTORE rBefore
    JUMP again
on:
    LOADI rTwice, 0
"""


@pytest.mark.parametrize("family", ["mamba", "granitehybrid"])
def test_a_step_that_is_taken_back_leaves_no_trace(family, folder):
    """Every pass through the layers but the first, before which there is no state, is done twice, with the state before
    it put back in between: the same tokens."""
    path = tiny_models.build(folder, f"{family}/Q8_0")
    models = Models()
    text = models.assembly(models.load(str(path)), options=Options(max_tokens=5, chunk=7))
    text = text.replace("main:\n", "main:\n    LOADI rTwice, 0\n")
    embed = "    LOADI rW, @model:token_embd.weight\n    EMBED"
    text = text.replace(embed, f"    SNAPSHOT rBefore\nagain:\n{embed}")
    text = text.replace("head:\n", "head:\n" + TWICE)
    text = text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "NOP").replace("IF_EQUAL done", "NOP")
    vm = VM(assemble(text), backend="cpu", models=models)
    vm.push_input(np.array(PROMPT, np.int64))
    vm.run()
    _, _, straight = generate(path, "cpu", prompt=PROMPT, tokens=5, chunk=7)
    assert vm.get("rMade") == 5 and vm.get("rTwice") == 0
    assert vm.get("rLogits").tobytes() == straight.get("rLogits").tobytes()


def test_the_program_says_what_it_does(folder):
    models = Models()
    text = models.assembly(models.load(str(tiny_models.build(folder, "jamba/Q8_0"))))
    assert "; tiny random jamba, Q8_0 weights: jamba, 3 layers (2 that scan), width 256" in text
    assert "SSM_SCAN rH, rU, sScan, rDt, rA B=rIn C=rOut D=rD SOFTPLUS LAYER=2" in text
    assert "CONV rU, rU, rW, rB, sScan LAYER=0 SILU" in text
    assert "ATTN rH, rQ, rK, rV, sKV" in text and "ROPE" not in text


BROKEN = {
    "mamba": [
        (lambda k, t: k.update({"mamba.ssm.state_size": 8}),
         r"ssm_x.weight'.*has shape \[48, 512\].*shape \[32, 512\]"),
        (lambda k, t: k.update({"mamba.ssm.conv_kernel": 0}), "mamba.ssm.conv_kernel'.*is 0.*at least 1"),
        (lambda k, t: t.pop("blk.1.ssm_d"), "blk.1.ssm_d"),
        (lambda k, t: k.pop("mamba.ssm.inner_size"), "mamba.ssm.inner_size")],
    "mamba2": [(lambda k, t: k.update({"mamba2.ssm.group_count": 3}),
                "mamba2.ssm.time_step_rank'.*is 8.*a multiple of 3 groups")],
    "jamba": [
        (lambda k, t: k.update({"jamba.expert_count": 4, "jamba.expert_used_count": 5}),
         "jamba.expert_used_count'.*is 5.*1 to 4"),
        (lambda k, t: k.update({"jamba.attention.head_count_kv": [0, 2]}), "has 2 values.*3, one for each layer"),
        (lambda k, t: k.update({"jamba.attention.head_count_kv": [1, 2, 0]}), "0 or one other number in every layer")],
}


@pytest.mark.parametrize("family, at", [(f, i) for f, rows in BROKEN.items() for i in range(len(rows))])
def test_files_that_do_not_fit(family, at, folder, tmp_path):
    change, message = BROKEN[family][at]
    path = rewritten(tiny_models.build(folder, f"{family}/F32"), tmp_path / "broken.gguf", change)
    models = Models()
    with pytest.raises(ModelFileError) as error:
        models.assembly(models.load(str(path)))
    assert re.search(message, str(error.value).replace("\n", " ")), str(error.value)


def test_tensors_that_must_be_floats(folder, tmp_path, monkeypatch):
    """No product reads the decays: a block type is refused when the program is written."""
    add = gguf.GGUFWriter.add_tensor

    def quantised(writer, name, values, **options):
        if name == "blk.0.ssm_a":
            values = gguf.quants.quantize(np.ones((512, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
            options["raw_dtype"] = gguf.GGMLQuantizationType.Q8_0
        add(writer, name, values, **options)
    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantised)
    path = tiny_models.build(tmp_path, "mamba/F32")
    models = Models()
    with pytest.raises(ModelFileError, match=r"(?s)blk.0.ssm_a.*has type Q8_0.*expected a float type"):
        models.assembly(models.load(str(path)))
