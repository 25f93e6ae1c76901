"""Low-rank adapters of models: llama.cpp's stored logits with them, the same bytes everywhere, files that do not
fit."""
from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Callable

import gguf
import numpy as np
import pytest

import m3jit
from m3jit.models.model_error import ModelFileError
from m3jit.models.program import Options
from m3jit.models.provider import Models
from tests.cli.command import call
from tests.models.levels import at_levels
from tests.models.peers import near_the_peer, same_bytes_everywhere
from tests.models.test_llama import generate

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_adapters as tiny_adapters  # noqa: E402  (found through the path set above)
import make_tiny_architectures as tiny_models  # noqa: E402
import make_tiny_bert  # noqa: E402
from make_tiny_models import sha256  # noqa: E402

ORACLE = json.loads(gzip.decompress((ROOT / "tests/oracles/tiny_adapters.json.gz").read_bytes()))
PROMPT = ORACLE["prompt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def with_adapters(name: str, folder: Path) -> tuple[Path, tuple]:
    """The model of a case and its adapters."""
    model, wanted = tiny_adapters.CASES[name]
    models = Models()
    return tiny_models.build(folder, model), tuple(
        models.adapter(str(tiny_adapters.build(folder, adapter)), scale) for adapter, scale in wanted)


@pytest.mark.parametrize("name", tiny_adapters.CASES)
def test_logits_and_tokens_against_llama_cpp(name, folder):
    row = ORACLE["cases"][name]
    path, adapters = with_adapters(name, folder)
    for adapter, digest in row["sha256"].items():
        assert sha256(tiny_adapters.build(folder, adapter)) == digest, "the peer ran another file"
    logits = near_the_peer(name, path, row, PROMPT, adapters=adapters)
    _, _, plain = generate(path, "cpu", prompt=PROMPT, tokens=1)
    assert np.abs(plain.get("rLogits").data.ravel() - logits).max() > 10 * row["max_error"], "adapters change nothing"


@at_levels("which", ["two"])
def test_same_bytes_everywhere(which, levels, folder):
    path, adapters = with_adapters(which, folder)
    same_bytes_everywhere(path, PROMPT, levels, adapters=adapters)


def test_a_scale_of_0_changes_no_bit(folder):
    path, (adapter,) = with_adapters("one", folder)
    zero = (type(adapter)(adapter.source, adapter.reference, 0.0),)
    _, _, plain = generate(path, "cpu", prompt=PROMPT, tokens=1)
    _, _, vm = generate(path, "cpu", prompt=PROMPT, tokens=1, adapters=zero)
    assert vm.get("rLogits").data.tobytes() == plain.get("rLogits").data.tobytes()


def test_the_command_line_applies_adapters(folder, capfd):
    path = tiny_models.build(folder, "qwen2/F32")
    lora = tiny_adapters.build(folder, "all")
    shared = ["run", str(path), "-p", "th", "-n", "6", "--temp", "0"]

    def text(*more: str) -> str:
        done = call(capfd, *shared, *more)
        assert done.code == 0, done
        return done.out
    plain = text()
    assert text("--lora", str(lora)) != plain
    assert text("--lora", f"{lora}:0") == plain and text("--lora", f"{lora}:0.0", "--lora", f"{lora}:0") == plain
    assert text("--kv-type", "bf16") and text("--kv-type", "Q8_0")
    done = call(capfd, *shared, "--lora", f"{lora}:inf")
    assert done.code == 2 and "inf is no finite number; expected FILE or FILE:SCALE" in done.err
    done = call(capfd, *shared, "--lora", f"{lora}:-1e300")
    assert done.code == 2 and "-1e300 is more than 1e+06; expected FILE or FILE:SCALE" in done.err
    done = call(capfd, *shared, "--lora", f"{lora}x:1")
    assert done.code == 1 and "lora-all.ggufx" in done.err


def test_vectors_with_adapters(folder, capfd, monkeypatch):
    """`m3jit embed` and a server's embeddings: those of the adapted model, whose output matrix they do not need."""
    path, lora = str(tiny_models.build(folder, "qwen2/F32")), str(tiny_adapters.build(folder, "all"))
    adapter = Models().adapter(lora)
    assert adapter.has("output.weight")
    expected = m3jit.load_embedder(path, options=Options(adapters=(adapter,))).embed("th")[0]

    def vector(*more: str) -> np.ndarray:
        done = call(capfd, "embed", path, "th", *more)
        assert done.code == 0, done
        return np.array(json.loads(done.out), np.float32)
    plain = vector()
    assert np.array_equal(vector("--lora", lora), expected) and np.abs(plain - expected).max() > 0.01
    assert np.array_equal(vector("--lora", f"{lora}:0"), plain)
    assert call(capfd, "embed", path, "th", "--lora", f"{lora}:inf").code == 2
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from m3jit.serve.server import Server
    served: list[np.ndarray] = []

    def run(server: Server) -> None:
        served.append(server.vectors.load().embed("th")[0])
        server.engine.close()
        server.socket.close()
    monkeypatch.setattr(Server, "run", run)
    assert call(capfd, "serve", path, "--port", "0", "--lora", lora).code == 0
    assert np.array_equal(served[0], expected)


def test_an_encoder_with_an_adapter(tmp_path, capfd):
    path = make_tiny_bert.write(tmp_path / "bert.gguf")
    q = Models().load(str(path)).file.tensor("blk.0.attn_q.weight").shape[0]
    pair = {"blk.0.attn_q.weight.lora_a": (2, q), "blk.0.attn_q.weight.lora_b": (q, 2)}
    keys = {"general.architecture": "bert"}
    lora = write(tmp_path / "lora.gguf", pair, dict(keys), lambda shape: np.full(shape, 0.5, np.float32))
    plain, zero, adapted = (call(capfd, "embed", path, "the river", *more) for more in (
        (), ("--lora", f"{lora}:0"), ("--lora", lora)))
    assert plain.code == adapted.code == 0 and plain == zero and adapted.out != plain.out
    unfit = write(tmp_path / "unfit.gguf", {"blk.0.attn_q.weight.lora_a": (2, 9), "blk.0.attn_q.weight.lora_b": (q, 2)},
                  dict(keys))
    for command in (("embed", path, "the river", "-o", tmp_path / "out.npy"), ("serve", path, "--port", "0")):
        if command[0] == "serve":
            pytest.importorskip("starlette", reason="the extra `serve` is not installed")
        done = call(capfd, *command, "--lora", unfit)
        assert done.code == 1 and f"lora_a': has shape [2, 9]; expected shape [2, {q}]" in done.err
    assert not (tmp_path / "out.npy").exists()


def write(path: Path, tensors: dict[str, tuple[int, ...]], keys: dict[str, str | float],
          values: Callable[[tuple[int, ...]], np.ndarray] = lambda shape: np.zeros(shape, np.float32)) -> Path:
    writer = gguf.GGUFWriter(path, str(keys.pop("general.architecture", "qwen2")))
    for key, value in {"general.type": "adapter", "adapter.type": "lora", **keys}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_string)(key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, values(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize("tensors, keys, message", [
    ({Q + ".lora_a": (4, 128), Q + ".lora_b": (256, 4)}, {},
     r"'blk.0.attn_q.weight.lora_a': has shape \[4, 128\]; expected shape \[4, 256\], for blk.0.attn_q.weight"),
    ({Q + ".lora_a": (4, 256), Q + ".lora_b": (256, 5)}, {},
     r"lora_b': has shape \[256, 5\]; expected shape \[256, 4\]"),
    ({Q + ".lora_a": (4, 256)}, {}, "has no partner 'blk.0.attn_q.weight.lora_b'"),
    ({"blk.0.attn_norm.weight": (256,)}, {}, r"belongs to no pair; expected names that end in .lora_a and .lora_b"),
    ({"blk.9.attn_q.weight.lora_a": (4, 256), "blk.9.attn_q.weight.lora_b": (256, 4)}, {},
     r"is for tensor 'blk.9.attn_q.weight', which .* does not have; expected an adapter made for this model"),
    ({"token_embd.weight.lora_a": (4, 256), "token_embd.weight.lora_b": (272, 4)}, {},
     r"lora_a': has shape \[4, 256\]; expected shape \[272, 256\]"),
    ({"output_norm.weight.lora_a": (4, 256), "output_norm.weight.lora_b": (256, 4)}, {}, r"a tensor of shape \[256\]"),
    ({}, {"general.architecture": "llama"}, "'general.architecture': is 'llama'; expected 'qwen2'"),
    ({}, {"adapter.type": "control_vector"}, "'adapter.type': is 'control_vector'; expected 'lora'"),
    ({}, {"adapter.alora.invocation_tokens": "1"}, "expected an adapter that applies to every token"),
])
def test_adapters_that_do_not_fit_are_refused(tensors, keys, message, folder, tmp_path):
    models, model = Models(), str(tiny_models.build(folder, "qwen2/F32"))
    adapter = models.adapter(str(write(tmp_path / "lora.gguf", tensors, dict(keys))))
    with pytest.raises(ModelFileError, match=message):
        models.assembly(models.load(model), options=Options(adapters=(adapter,)))


def test_pairs_that_a_program_cannot_apply_are_refused(folder, tmp_path):
    """Tied embeddings are also the output matrix, whose adapter would need the pair the other way round."""
    models, model = Models(), str(tiny_models.build(folder, "qwen3/F32"))
    pair = {"token_embd.weight.lora_a": (272, 4), "token_embd.weight.lora_b": (256, 4)}
    adapter = models.adapter(str(write(tmp_path / "lora.gguf", pair, {"general.architecture": "qwen3"})))
    with pytest.raises(ModelFileError, match="is for the embeddings, which are also the output matrix"):
        models.assembly(models.load(model), options=Options(adapters=(adapter,)))


def test_models_and_adapters_are_not_confused(folder):
    models = Models()
    adapter, model = tiny_adapters.build(folder, "all"), tiny_models.build(folder, "qwen2/F32")
    with pytest.raises(ModelFileError, match="is an adapter, no model. Run the model it was made for, with --lora"):
        models.assembly(models.load(str(adapter)))
    with pytest.raises(ModelFileError, match="is no adapter; expected 'adapter'"):
        models.adapter(str(model))
