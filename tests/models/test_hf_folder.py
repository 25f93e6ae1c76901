"""Hugging Face folders: tiny random models of every architecture against transformers' stored results."""
from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from folder_tokenizers import byte_pairs, word_pieces

from benchmarks import agreement
from m3jit.cli import main as cli
from m3jit.frontend import assemble
from m3jit.models.hf_folder import HFFolder
from m3jit.models.model_error import ModelFileError
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.streams import CallbackSink
from m3jit.vm.vm import VM
from tests.models.levels import at_levels

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_folders  # noqa: E402

ORACLE = json.loads(gzip.decompress((ROOT / "tests/oracles/folder_logits.json.gz").read_bytes()))
PROMPT = np.array(ORACLE["prompt"], np.int64)
ENCODERS = ("bert", "roberta", "distilbert")
DECODERS = [name for name in make_tiny_folders.FOLDERS if name not in ENCODERS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = make_tiny_folders.build(tmp_path_factory.mktemp("folders"))
    for name, folder in found.items():
        (word_pieces if name in ENCODERS else byte_pairs)(folder, 264)
    return found


def run(folder: Path, backend: str = "cpu", threads: int = 2, **options: Any) -> VM:
    """The prompt run through a model."""
    models = Models()
    text = models.assembly(models.load(str(folder)), options=Options(**{"max_tokens": 1, **options}))
    assert text.count(", sKV ") == text.count("ATTN ")
    vm = VM(assemble(text), backend=backend, threads=threads, models=models)
    vm.sinks["OUTPUT"] = CallbackSink("tokens", lambda _: None)
    vm.push_input(PROMPT)
    vm.run()
    return vm


def error(name: str, logits: np.ndarray) -> np.ndarray:
    logits, row = logits.ravel(), ORACLE["models"][name]
    assert int(logits.argmax()) == row["best"][-1]
    return np.abs(logits - np.array(row["logits"]))


@pytest.mark.parametrize("name", make_tiny_folders.FOLDERS)
def test_the_folder_is_the_one_the_oracle_saw(name, folders):
    assert make_tiny_folders.sha256(folders[name]) == ORACLE["models"][name]["sha256"]


@pytest.mark.parametrize("name", DECODERS)
def test_logits_against_transformers(name, folders):
    """In float32 throughout (attention over the prompt's own keys and values, without a cache), as near to the float64
    model as transformers is, up to the order of sums; the logits have a standard deviation of 3 to 5.  Perplexity and
    greedy tokens: benchmarks/agreement.py."""
    text = agreement.over_text(folders[name], ORACLE["models"][name]["text"], ORACLE["prompt"],
                               change=agreement.without_cache)
    apart = error(name, text.logits)
    print(f"{name}: max {apart.max():.2g}, mean {apart.mean():.2g}; {text}")
    assert not text.missed()
    assert apart.max() < 4 * ORACLE["models"][name]["float32_error"] + 1e-6


@pytest.mark.parametrize("name", DECODERS)
def test_logits_with_a_cache(name, folders):
    """The cache rounds keys and values to F16, which moves logits by some thousandths, whatever the chunks."""
    whole, parts = (run(folders[name], chunk=chunk) for chunk in (64, 7))
    apart = error(name, whole.get("rLogits").data)
    print(f"{name}: max {apart.max():.2g}, mean {apart.mean():.2g}")
    assert apart.max() < 0.02 and apart.mean() < 0.005
    assert np.array_equal(whole.get("rLogits").data, parts.get("rLogits").data)


@at_levels("name", ["llama-bf16", "qwen3moe", "granite"])
def test_same_bytes_everywhere(name, levels, folders):
    wanted = run(folders[name], "interpreter").get("rLogits").data.tobytes()
    for backend, threads in levels:
        assert run(folders[name], backend, threads).get("rLogits").data.tobytes() == wanted, (backend, threads)


def test_a_folder_runs_as_any_model_does(folders, tmp_path, capfd):
    """`m3jit run`, `m3jit compile`, `.model`, MODEL_LOAD_UNIFIED, MODEL_QUERY and MODEL_COMPILE see the same model."""
    folder = folders["qwen3"]
    assert cli(["run", str(folder), "--prompt", "The river", "--max-tokens", "3", "--temp", "0"]) == 0
    said = capfd.readouterr().out
    source, program = tmp_path / "tiny.m3asm", tmp_path / "tiny.m3b"
    assert cli(["compile", str(folder), "-o", str(source), "--max-tokens", "3", "--temp", "0"]) == 0
    assert f'.model model "{folder}"' in source.read_text()
    assert cli(["asm", str(source)]) == 0 and cli(["run", str(program), "--prompt", "The river"]) == 0
    assert capfd.readouterr().out == said
    models = Models()
    vm = VM(assemble(f'MODEL_LOAD_UNIFIED rM, "{folder}"\nMODEL_QUERY rV, rM, "vocab"\n'
                     'MODEL_QUERY rT, rM, "qwen3.rope.freq_base"\nMODEL_COMPILE rP, rM\nHALT'), models=models)
    vm.run()
    assert vm.get("rV") == 264 and vm.get("rT") == 1e6
    assert vm.get("rP").data.tobytes() == models.compile(models.load(str(folder)))


RENAMED = {"block_sparse_moe.output_linear": "mlp.experts.down_proj",
           ".dt_bias": ".dt_proj.bias", "attn_sub_norm": "inner_attn_ln",
           "ffn_sub_norm": "ffn_layernorm", "e_score_correction_bias": "e_score_correction.bias"}


def converted(name: str, dense: bool) -> str:
    """A tensor's name as converters rename it before they look it up; experts are merged.  dense: what experts share
    stands alone."""
    if dense:
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("name", make_tiny_folders.FOLDERS)
def test_names_are_those_of_the_gguf_package(name, folders):
    import gguf
    folder = HFFolder(folders[name])
    architecture = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == folder.family.architecture)
    theirs = gguf.get_tensor_name_map(architecture, folder.value(f"{folder.family.architecture}.block_count", int))
    stored = {tensor: found for found, info in folder.tensors.items() for tensor in info.stored
              if "input_linear" not in tensor}                                  # matrices that become two
    assert stored == {tensor: theirs.get_name(converted(tensor, name == "granite"), try_suffixes=(".weight", ".bias"))
                      for tensor in stored}
    missing = set(make_tiny_folders.shapes(name)) - set(stored)
    assert all(tensor.startswith("pooler.") or "input_linear" in tensor for tensor in missing)


def altered(folder: Path, name: str, **changes: Any) -> Path:
    """A copy of a model with other values in its config.json; None takes one away."""
    make_tiny_folders.write_folder(folder, name)
    byte_pairs(folder, 264)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize("name, changes, message", [
    ("llama", {"model_type": "t5"},
     "'model_type': is 't5', which is not supported; expected one of bert, bitnet, camembert"),
    ("llama", {"model_type": None}, "'model_type': is missing; expected a value of type str"),
    ("llama", {"hidden_act": "gelu"}, "'hidden_act': is 'gelu', which is not supported; expected 'silu'"),
    ("llama", {"num_hidden_layers": "2"}, "'num_hidden_layers': is '2'; expected a value of type int"),
    ("llama", {"num_hidden_layers": True}, "'num_hidden_layers': is 'True'; expected a value of type int"),
    ("llama", {"num_hidden_layers": 10**9}, "'num_hidden_layers': is 1000000000; expected 1 to 4096"),
    ("llama", {"hidden_size": None}, "'hidden_size': is missing"),
    ("llama", {"rms_norm_eps": float("nan")}, "'rms_norm_eps': is nan; expected an ordinary number"),
    ("llama", {"quantization_config": {"bits": 4}}, "'quantization_config': is .*; expected no such key"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic"}},
     "type 'dynamic', which is not supported; expected one of default"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "'factor': is missing"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 2.0}},
     "mscale 2.0 and mscale_all_dim 0.0; expected none"),
    ("mamba", {"use_bias": True}, "'use_bias': is 'True', which is not supported; expected False"),
    ("mamba2", {"time_step_limit": [0.1, 0.2]}, "'time_step_limit': is '.0.1, 0.2.'"),
    ("mamba2", {"n_groups": 0}, "norm.weight': has a shape that 0 groups do not divide"),
    ("llama", {"vocab_size": -1}, "'vocab_size': is -1; expected 1 to"),
    ("mistral", {"sliding_window": 0.5}, "'sliding_window': is '0.5'"),
    ("gemma2", {"sliding_window": -1}, "'sliding_window': is -1; expected at least 1"),
    ("jamba-experts", {"num_experts": 3}, "has shape .4, 64.; expected shape .3, 64."),
    ("jamba", {"attn_layer_offset": 5}, "'attn_layer_offset': is 5; expected a number below attn_layer_period"),
    ("granite", {"layer_types": ["mamba"]}, "'layer_types': has 1 items, of mamba; expected 4 of attention"),
    ("granite", {"num_local_experts": 4, "num_experts_per_tok": 9},
     "'granitehybrid.expert_used_count': is 9; expected 1"),
    ("qwen3moe", {"norm_topk_prob": False}, "'norm_topk_prob': is 'False', which is not supported"),
    ("qwen3moe", {"mlp_only_layers": [0]}, "'mlp_only_layers': is"),
    ("qwen3moe", {"num_experts": 5}, r"'blk.0.ffn_gate_inp.weight': has shape \[4, 64\]; expected shape \[5, 64\]"),
    ("deepseek-v2", {"n_group": 2}, "'n_group': is '2', which is not supported; expected 1"),
    ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "'topk_method': is 'group_limited_greedy'"),
    ("deepseek-v3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
     "mscale 0.0 and mscale_all_dim 0.0; expected"),
    ("bitnet", {"hidden_act": "gelu"}, "'hidden_act': is 'gelu', which is not supported; expected 'silu' or 'relu2'"),
    ("roberta", {"pad_token_id": 0}, "'pad_token_id': is '0', which is not supported; expected 1"),
    ("llama", {"rope_scaling": 3}, "'rope_scaling': is '3'; expected an object"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -1.0}},
     "factor -1.0, share 1.0; expected theta above 1, a pos"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}},
     "low_freq_factor 4.0 and high_freq_factor 1.0"),
    ("llama", {"num_hidden_layers": 1}, "tensor 'model.layers.1..*: is no part of llama with 1 layers"),
    ("llama", {"num_hidden_layers": 3}, "tensor 'blk.2.attn_norm.weight': is missing"),
    ("llama", {"model_type": "qwen3"}, "tensor 'blk.0.attn_q_norm.weight': is missing"),
    ("llama", {"hidden_size": 32}, r"tensor 'token_embd.weight': has shape \[264, 64\]; expected shape \[264, 32\]"),
    ("phi3-long", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6}},
     "rope_scaling.short_factor': has 1 values; expected 6 positive"),
    ("qwen2", {"use_sliding_window": True}, "'use_sliding_window': is 'True', which is not supported"),
    ("qwen3", {"model_type": "llama"}, "q_norm.weight': is no part of llama with 2 layers"),
    ("gemma3", {"layer_types": ["full_attention"]}, "'layer_types': has 1 items of full_attention; expected 7"),
    ("gemma3", {"hidden_activation": "relu"}, "'hidden_activation': is 'relu'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("bert", {"hidden_act": "relu"}, "'hidden_act': is 'relu'"),
    ("bert", {"position_embedding_type": "relative_key"}, "'position_embedding_type'"),
    ("bert", {"max_position_embeddings": 65}, "'bert.context_length': is 65; expected at most 64"),
    ("bert", {"num_attention_heads": 5}, "'bert.attention.head_count': 5 heads of a width of 64"),
])
def test_what_is_not_supported_is_refused_by_name(tmp_path, name, changes, message):
    with pytest.raises(ModelFileError, match=message) as caught:
        models = Models()
        models.assembly(models.load(str(altered(tmp_path / "model", name, **changes))))
    assert str(tmp_path / "model") in str(caught.value) and "\n" not in str(caught.value)


def test_the_order_of_layers_with_a_window_is_the_configurations(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
    models = Models()
    text = models.assembly(models.load(str(altered(tmp_path / "model", "gemma3", layer_types=kinds))))
    attention = [line for line in text.splitlines() if " ATTN " in line]
    assert ["WINDOW=6" in line for line in attention] == [kind == "sliding_attention" for kind in kinds]


def test_defaults_of_a_configuration_that_says_little(tmp_path):
    """gemma3's published files leave most of it out and nest it."""
    folder = altered(tmp_path / "model", "gemma3")
    config = json.loads((folder / "config.json").read_text())
    text = {key: config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text | {
        "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}))
    found = HFFolder(folder).metadata
    assert (found["gemma3.attention.head_count"], found["gemma3.attention.key_length"]) == (8, 256)
    assert (found["gemma3.rope.freq_base"], found["gemma3.rope.freq_base_swa"]) == (1e6, 1e4)
    assert (found["gemma3.rope.scaling.type"], found["gemma3.rope.scaling.factor"]) == ("linear", 8.0)
    assert found["gemma3.attention.sliding_window_pattern"].tolist() == [True] * 5 + [False, True]


def test_tensors_of_other_types_are_refused(tmp_path):
    folder = altered(tmp_path / "model", "qwen2")
    shapes = make_tiny_folders.shapes("qwen2")
    make_tiny_folders.write_safetensors(folder / "model.safetensors", {
        name: ("F64", shape, bytes(8 * int(np.prod(shape)))) for name, shape in shapes.items()})
    with pytest.raises(ModelFileError, match="tensor 'model.embed_tokens.weight': has dtype F64; expected one of F32"):
        HFFolder(folder)


def test_gains_that_mean_one_more_are_read_as_the_sum(folders):
    folder = HFFolder(folders["gemma2"])
    stored = make_tiny_folders.values("gemma2", "model.norm.weight", (64,))
    found = folder.tensor_bytes("output_norm.weight").view(np.float32)
    assert np.array_equal(found, np.float32(1) + stored) and not found.flags.writeable
    assert folder.tensor_bytes("token_embd.weight").base is not None
    assert folder.tensor("output_norm.weight").nbytes == 256


def test_tensors_that_are_computed_or_put_together(folders):
    def of(name: str, tensor: str) -> np.ndarray:
        return folders_of[name].tensor_bytes(tensor).view(np.float32).reshape(folders_of[name].tensor(tensor).shape)

    def stored(name: str, tensor: str) -> np.ndarray:
        return make_tiny_folders.values(name, tensor, make_tiny_folders.shapes(name)[tensor])

    folders_of = {name: HFFolder(folders[name]) for name in ("mamba", "mamba2", "granite", "qwen3moe", "roberta")}
    decay = stored("mamba", "backbone.layers.1.mixer.A_log")
    assert np.allclose(of("mamba", "blk.1.ssm_a"), -np.exp(decay.astype(np.float64)), rtol=2e-7)
    assert of("mamba2", "blk.0.ssm_a").shape == (8, 1) and of("mamba2", "blk.0.ssm_norm.weight").shape == (2, 64)
    taps = stored("mamba", "backbone.layers.0.mixer.conv1d.weight")
    assert np.array_equal(of("mamba", "blk.0.ssm_conv1d.weight"), taps[:, 0])
    both = stored("granite", "model.layers.0.shared_mlp.input_linear.weight")
    halves = [of("granite", f"blk.0.ffn_{part}.weight") for part in ("gate", "up")]
    assert np.array_equal(np.concatenate(halves), both)
    experts = of("qwen3moe", "blk.0.ffn_down_exps.weight")
    assert experts.shape == (4, 64, 40)
    for e in range(4):
        assert np.array_equal(experts[e], stored("qwen3moe", f"model.layers.0.mlp.experts.{e}.down_proj.weight"))
    positions = stored("roberta", "embeddings.position_embeddings.weight")
    assert np.array_equal(of("roberta", "position_embd.weight"), positions[2:])


def test_experts_that_are_missing(tmp_path):
    folder = altered(tmp_path / "model", "mixtral")
    shapes = make_tiny_folders.shapes("mixtral")
    make_tiny_folders.write_safetensors(folder / "model.safetensors", {
        name: ("F32", shape, bytes(4 * int(np.prod(shape)))) for name, shape in shapes.items()
        if ".experts.2." not in name})
    with pytest.raises(ModelFileError, match="experts.0.w1.weight': is one of 3 whose numbers have gaps"):
        HFFolder(folder)


def test_the_key_of_caches_sees_changes(folders, tmp_path):
    first, second = HFFolder(folders["qwen2"]), HFFolder(altered(tmp_path / "model", "qwen2", rope_theta=5.0))
    assert first.content_hash == HFFolder(folders["qwen2"]).content_hash != second.content_hash


def test_the_full_hash_is_of_the_content_alone(folders, tmp_path):
    """The time of a file makes another key of caches, not another model."""
    first, folder = HFFolder(folders["qwen2"]), shutil.copytree(folders["qwen2"], tmp_path / "twin")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    second, other = HFFolder(folder), HFFolder(altered(tmp_path / "model", "qwen2", rope_theta=5.0))
    assert first.content_hash != second.content_hash and first.full_hash() == second.full_hash() != other.full_hash()
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    assert HFFolder(folder).full_hash() != first.full_hash()


def test_what_is_no_model_folder(tmp_path):
    with pytest.raises(ModelFileError, match="config.json: cannot be opened .No such file"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "bert"}')
    with pytest.raises(ModelFileError, match="'model_type': appears twice"):
        HFFolder(tmp_path)
    assert cli(["run", str(tmp_path / "sub"), "--prompt", "a"]) == 1


def test_logits_need_the_matrix_that_is_said_to_be_there(tmp_path):
    """A folder whose embeddings are not tied and that lacks lm_head generates nothing, but gives vectors."""
    folder = altered(tmp_path / "model", "qwen2", tie_word_embeddings=False)
    models = Models()
    with pytest.raises(ModelFileError, match="tensor 'output.weight': is missing"):
        models.assembly(models.load(str(folder)))
    assert " rLogits" not in models.embedding(models.load(str(folder)))


def test_a_file_of_weights_points_to_its_folder(folders, capfd):
    assert cli(["run", str(folders["qwen2"] / "model.safetensors"), "--prompt", "a"]) == 1
    assert "holds weights alone; give its folder" in capfd.readouterr().err


ODD = [None, True, False, 0, 1, 2, 3, -1, 10**30, 0.5, -0.5, 1e-300, float("inf"), float("nan"), "silu", "auto", "x",
       [], [1], {}, ["full_attention"], ["sliding_attention"] * 2, {"rope_type": "yarn"},
       {"rope_type": "yarn", "factor": 2},
       {"rope_type": "yarn", "factor": 1e300}, {"type": "linear", "factor": 1e-300}, {"full_attention": 3},
       {"full_attention": {"rope_type": 3}}, {"type": "longrope", "factor": 3, "short_factor": [1], "long_factor": [1]},
       {"rope_type": "llama3", "factor": 1e-9, "low_freq_factor": 1e-9, "high_freq_factor": 1e9},
       {"rope_type": "default", "rope_theta": 1}]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_configuration_is_compiled_or_refused(tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(make_tiny_folders.FOLDERS)))
    folder = Path(tmp_path_factory.getbasetemp()) / "mutated" / name
    if not folder.exists():
        make_tiny_folders.write_folder(folder, name)
        (word_pieces if name in ENCODERS else byte_pairs)(folder, 264)
    config = dict(make_tiny_folders.FOLDERS[name][2])
    keys = sorted({*config, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "head_dim",
                   "text_config", "sliding_window_pattern", "partial_rotary_factor",
                   "original_max_position_embeddings"})
    config |= data.draw(st.dictionaries(st.sampled_from(keys), st.sampled_from(ODD), min_size=1, max_size=2))
    (folder / "config.json").write_text(json.dumps(config))
    try:
        models = Models()
        models.assembly(models.load(str(folder)))
    except ModelFileError:
        pass
