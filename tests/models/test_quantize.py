"""Model files with their matrices in another type: the bytes of the gguf package, types by rule, errors."""
from __future__ import annotations

import io
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from m3jit.ir import eager_encode
from m3jit.isa.types import DTYPES
from m3jit.models.gguf_file import GGUFFile
from m3jit.models.gguf_shards import open_gguf
from m3jit.models.gguf_writer import NewTensor, write_gguf
from m3jit.models.ggml_types import GGML_TYPES
from m3jit.models.model_error import ModelFileError
from m3jit.models.quantize import TYPES, Choice, quantize

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_models  # noqa: E402


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_tiny_models.build(tmp_path_factory.mktemp("tiny"), ("F32",))["F32"]


def packed(source: Path, target: Path, *choice, **options) -> gguf.GGUFReader:
    with target.open("wb") as out:
        quantize(open_gguf(source), Choice(*choice, **options), out, threads=2)
    return gguf.GGUFReader(target)


def made(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected(values: np.ndarray, kind: str) -> np.ndarray:
    if kind in ("Q4_K", "Q6_K"):
        return eager_encode.encode(DTYPES[kind], values)
    return values.astype(np.float16) if kind == "F16" else gguf.quants.quantize(values, Type[kind])


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_are_packed_as_the_gguf_package_packs_them(tmp_path, whole, kind):
    before, after = gguf.GGUFReader(whole), packed(whole, tmp_path / "out.gguf", kind, output="Q8_0", embedding=kind)
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors]
    for old, new in zip(before.tensors, after.tensors):
        wanted = "F32" if len(old.shape) == 1 else "Q8_0" if old.name == "output.weight" else kind
        assert new.tensor_type.name == wanted and new.shape.tolist() == old.shape.tolist()
        want = old.data if wanted == "F32" else expected(old.data, wanted)
        assert new.data.tobytes() == want.tobytes(), old.name
    kept = {k: f.contents() for k, f in before.fields.items() if not k.startswith("GGUF.")}
    found = {k: f.contents() for k, f in after.fields.items() if not k.startswith("GGUF.")}
    version = {} if kind in ("F32", "F16", "BF16") else {"general.quantization_version": 2}
    assert found == kept | version | {"general.file_type": found["general.file_type"]}


def types(reader: gguf.GGUFReader) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in reader.tensors}


def test_output_and_token_table_by_rule(tmp_path, whole):
    for kind, output, table in (("Q4_K", "Q6_K", "Q4_K"), ("Q8_0", "Q8_0", "Q8_0"), ("Q4_0", "Q6_K", "Q4_0"),
                                ("TQ2_0", "Q6_K", "Q4_K"), ("MXFP4", "Q6_K", "Q4_K"), ("F16", "F16", "F16")):
        found = types(packed(whole, tmp_path / f"{kind}.gguf", kind))
        names = ("output.weight", "token_embd.weight", "blk.0.attn_q.weight")
        assert tuple(found[n] for n in names) == (output, table, kind)


def test_a_tied_token_table_is_an_output_matrix_and_small_tensors_stay(tmp_path):
    x = np.random.default_rng(0).normal(0, 1, (4, 64)).astype(np.float32)
    names = ("blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ssm_conv1d.weight", "a.bias", "b.table")
    path = made(tmp_path / "m.gguf", {"token_embd.weight": x, "blk.0.attn_q.weight": np.hstack([x] * 4)[:, :96],
                                      "odd.weight": x[:, :40].copy(), "double.weight": x.astype(np.float64),
                                      "blk.0.ffn_up_exps.weight": np.stack([x, x]), **dict.fromkeys(names, x),
                                      "ids.weight": np.arange(64, dtype=np.int32).reshape(2, 32)})
    summary_file = io.BytesIO()
    summary = quantize(open_gguf(path), Choice("Q4_K"), summary_file)
    (tmp_path / "o.gguf").write_bytes(summary_file.getvalue())
    found = types(gguf.GGUFReader(tmp_path / "o.gguf"))
    assert found == {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q5_0", "odd.weight": "F16",
                     "double.weight": "Q5_0", "blk.0.ffn_up_exps.weight": "Q5_0", "ids.weight": "I32",
                     **dict.fromkeys(names, "F32")}
    assert set(summary.fallbacks) == {n for n, t in found.items() if t in ("Q5_0", "Q8_0", "F16")}
    assert summary.after == sum(t.n_bytes for t in gguf.GGUFReader(tmp_path / "o.gguf").tensors)


def test_a_split_model_becomes_one_file(tmp_path, whole):
    make_tiny_models.write_model(tmp_path / "p.gguf", "F32", split=7)
    parts = packed(tmp_path / "p-00002-of-00003.gguf", tmp_path / "one.gguf", "Q4_0")
    together = packed(whole, tmp_path / "same.gguf", "Q4_0")
    assert types(parts) == types(together) and not [k for k in parts.fields if k.startswith("split.")]
    assert all(a.data.tobytes() == b.data.tobytes() for a, b in zip(parts.tensors, together.tensors))


def test_packed_models_need_permission(tmp_path, whole):
    packed(whole, tmp_path / "a.gguf", "Q8_0")
    with pytest.raises(ModelFileError, match=r"'token_embd.weight': is in blocks already \(Q8_0\); .*--requantize"):
        packed(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0")
    again = packed(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0", requantize=True)
    decoded = gguf.quants.dequantize(gguf.GGUFReader(tmp_path / "a.gguf").tensors[7].data, Type.Q8_0)
    assert again.tensors[7].data.tobytes() == gguf.quants.quantize(decoded, Type.Q4_0).tobytes()
    same = packed(tmp_path / "a.gguf", tmp_path / "c.gguf", "Q8_0")
    assert types(same)["output.weight"] == "Q8_0"


def test_values_that_cannot_be_packed_are_named(tmp_path):
    x = np.ones((3000, 512), np.float32)
    x[2900, 17] = np.nan
    path = made(tmp_path / "m.gguf", {"w.weight": x})
    with pytest.raises(ModelFileError, match=r"tensor 'w.weight': holds nan in row 2900, column 17; expected finite"):
        packed(path, tmp_path / "o.gguf", "Q4_K")
    for value in (1e9, 1e12, 1e30, 3e38):
        x[2900, 17] = value
        path = made(tmp_path / "n.gguf", {"w.weight": x[2896:]})
        for kind in ("Q8_0", "Q4_K", "Q6_K", "F16", "TQ1_0"):
            with pytest.raises(ModelFileError, match=rf"tensor 'w.weight': cannot be packed as {kind}: .*65504"):
                packed(path, tmp_path / "o.gguf", kind)


def test_the_writer_counts_bytes():
    t = NewTensor("w", GGML_TYPES["Q8_0"], (2, 32))
    with pytest.raises(ValueError, match=r"tensor 'w' \(Q8_0 \[2, 32\]\) got 10 bytes, not 68"):
        write_gguf(io.BytesIO(), [], [t], lambda _: [bytes(10)])


def test_what_is_written_reads_back(tmp_path):
    tensors = [NewTensor("w", GGML_TYPES["Q8_0"], (2, 3, 32)), NewTensor("b", GGML_TYPES["F32"], (5,))]
    data = {"w": bytes(range(204)), "b": bytes(20)}
    with (tmp_path / "m.gguf").open("wb") as out:
        size = write_gguf(out, [("k", 4, bytes([7, 0, 0, 0]))], tensors, lambda t: [data[t.name][:7], data[t.name][7:]])
    assert size == (tmp_path / "m.gguf").stat().st_size
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.metadata["k"] == 7 and {n: t.shape for n, t in file.tensors.items()} == {"w": (2, 3, 32), "b": (5,)}
        assert file.tensor_bytes("w").tobytes() == data["w"] and file.metadata.stored("k") == (4, b"\x07\0\0\0")
