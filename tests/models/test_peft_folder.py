"""Adapters in PEFT's folders: the same as the merged weights, the same as a GGUF adapter, folders that do not fit."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import m3jit
from m3jit.models.model_error import ModelFileError
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.models.safetensors_file import SafetensorsFile
from tests.models.folder_tokenizers import byte_pairs
from tests.models.test_llama import generate

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_architectures as tiny_models  # noqa: E402  (found through the path set above)
import make_tiny_folders as tiny_folders  # noqa: E402

RANK, ALPHA, PROMPT = 4, 6.0, [5, 99, 17, 200, 3, 42, 7]
PREFIX = "base_model.model."
Arrays = dict[str, np.ndarray]


def noise(*shape: int, seed: int) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * 0.15).astype(np.float32)


def write_adapter(folder: Path, tensors: Arrays, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"],
              "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tiny_folders.write_safetensors(folder / "adapter_model.safetensors", {
        name: ("F32", a.shape, np.ascontiguousarray(a, np.float32).tobytes()) for name, a in tensors.items()})
    return folder


def pairs(shapes: dict[str, tuple[int, int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Module -> (A [rank, K], B [N, rank])."""
    return {name: (noise(RANK, k, seed=i), noise(n, RANK, seed=i + 100))
            for i, (name, (n, k)) in enumerate(shapes.items())}


def stored(given: dict[str, tuple[np.ndarray, np.ndarray]]) -> Arrays:
    out = {}
    for module, (a, b) in given.items():
        part = "lora_embedding_{}" if module.endswith("embed_tokens") else "lora_{}.weight"
        out |= {f"{PREFIX}{module}.{part.format('A')}": a, f"{PREFIX}{module}.{part.format('B')}": b}
    return out


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_what_the_merged_weights_are(tmp_path, rslora):
    base = tiny_folders.write_folder(tmp_path / "base", "llama")
    byte_pairs(base, 264)
    weights = SafetensorsFile(base / "model.safetensors")
    given = pairs({name.removesuffix(".weight"): t.shape[::-1] if "embed" in name else t.shape
                   for name, t in weights.tensors.items() if len(t.shape) == 2})
    assert any("q_proj" in name for name in given) and any("embed_tokens" in name for name in given)
    scale = ALPHA / (RANK ** 0.5 if rslora else RANK)
    merged, tensors = tmp_path / "merged", {}
    for name, t in weights.tensors.items():
        w = weights.tensor_bytes(name).view(np.float32).reshape(t.shape)
        pair = given.get(name.removesuffix(".weight"))
        if pair is not None:
            a, b = (x.astype(np.float64) for x in pair)
            delta = scale * (b @ a)                        # of embeddings the other way round: A [rank, vocabulary]
            w = w + (delta.T if "embed" in name else delta)
        tensors[name] = ("F32", t.shape, w.astype(np.float32).tobytes())
    merged.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (merged / file.name).write_bytes(file.read_bytes())
    tiny_folders.write_safetensors(merged / "model.safetensors", tensors)
    adapter = Models().adapter(str(write_adapter(tmp_path / "lora", stored(given), use_rslora=rslora)), 1.0)
    plain, want, got = (generate(path, "cpu", prompt=PROMPT, tokens=1, adapters=adapters)[2].get("rLogits").data
                        for path, adapters in ((base, ()), (merged, ()), (base, (adapter,))))
    assert np.abs(got - want).max() < 0.02 < 0.5 < np.abs(plain - want).max()
    rows = [m3jit.load_embedder(path, pooling="none", normalize=False, options=Options(adapters=adapters)).rows(PROMPT)
            for path, adapters in ((base, ()), (merged, ()), (base, (adapter,)))]
    assert np.abs(rows[2] - rows[1]).max() < 0.02 < 0.5 < np.abs(rows[0] - rows[1]).max()


def reordered(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads with pairs (i, i + d/2) as rows with pairs (2i, 2i + 1), one by one."""
    d = len(rows) // heads
    out = np.empty_like(rows)
    for h in range(heads):
        for i in range(d // 2):
            out[h * d + 2 * i], out[h * d + 2 * i + 1] = rows[h * d + i], rows[h * d + d // 2 + i]
    return out


def test_rows_follow_the_order_of_gguf_files_of_llama(tmp_path):
    """The bytes are those of a GGUF adapter that has the rows in order."""
    model = tiny_models.build(tmp_path, "llama-linear/F32")
    given = pairs({"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.self_attn.k_proj": (128, 256),
                   "model.layers.1.mlp.up_proj": (256, 256)})
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for (a, b), name, heads in zip(given.values(), ("blk.0.attn_q", "blk.1.attn_k", "blk.1.ffn_up"), (4, 2, 0)):
        writer.add_tensor(f"{name}.weight.lora_a", a)
        writer.add_tensor(f"{name}.weight.lora_b", reordered(b, heads) if heads else b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder, logits = write_adapter(tmp_path / "lora", stored(given)), []
    for path in (folder, tmp_path / "lora.gguf"):
        adapter = Models().adapter(str(path))
        logits.append(generate(model, "cpu", prompt=PROMPT, tokens=1, adapters=(adapter,))[2].get("rLogits").data)
    plain = generate(model, "cpu", prompt=PROMPT, tokens=1)[2].get("rLogits").data
    assert logits[0].tobytes() == logits[1].tobytes() != plain.tobytes()


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("config, tensors, message", [
    ({"peft_type": "IA3"}, {}, "'peft_type': is 'IA3'; expected 'LORA'"),
    ({"use_dora": True}, {}, "'use_dora': is 'True'; expected False"),
    ({"rank_pattern": {"q_proj": 8}}, {}, "'rank_pattern': is .*; expected one rank and one alpha"),
    ({"bias": "all"}, {}, "'bias': is 'all'; expected 'none'"),
    ({"r": None}, {}, "key 'r': is missing; expected a number above 0"),
    ({}, {f"{PREFIX}model.layers.0.self_attn.w_pack.lora_A.weight": noise(4, 8, seed=1)},
     "w_pack.lora_A.weight': belongs to no matrix that is known"),
    ({}, {f"{PREFIX}{Q}.lora_A.weight": noise(5, 256, seed=1)}, r"has shape \[5, 256\]; expected rank 4"),
    ({}, {f"{PREFIX}{Q}.lora_A.weight": noise(4, 256, seed=1)}, "has no partner 'blk.0.attn_q.weight.lora_b'"),
    ({}, {f"{PREFIX}{Q}.lora_A.weight": noise(4, 8, seed=1), f"{PREFIX}{Q}.lora_B.weight": noise(256, 4, seed=1)},
     r"'blk.0.attn_q.weight.lora_a': has shape \[4, 8\]; expected shape \[4, 256\]"),
])
def test_folders_that_do_not_fit_are_refused(config, tensors, message, tmp_path):
    models, model = Models(), tiny_models.build(tmp_path, "llama-linear/F32")
    folder = write_adapter(tmp_path / "lora", tensors, **config)
    with pytest.raises(ModelFileError, match=message):
        adapter = models.adapter(str(folder))
        models.assembly(models.load(str(model)), options=Options(adapters=(adapter,)))


def test_an_unknown_order_of_rows_is_refused(tmp_path):
    """A GGUF file of an architecture whose converter may reorder rows."""
    from m3jit.models.adapters import Adapter
    folder = write_adapter(tmp_path / "lora", stored(pairs({Q: (256, 256)})))
    adapter = Models().adapter(str(folder))

    class Other:
        path = "other.gguf"
        def value(self, key, kind, default=None): return "granitehybrid"
    with pytest.raises(ModelFileError,
                       match="is for a granitehybrid model in a GGUF file, whose rows may have another"):
        Adapter(adapter.source, "lora").b_name("blk.0.attn_q.weight", Other())


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "lora", {})
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="adapter_model.safetensors"):
        Models().adapter(str(folder))
