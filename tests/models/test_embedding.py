"""Vectors of texts: tiny random models against transformers' stored hidden states."""
from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from folder_tokenizers import byte_pairs, word_pieces

import m3jit
from m3jit.errors import UserError
from m3jit.models.model_error import ModelFileError

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_bert  # noqa: E402
import make_tiny_folders  # noqa: E402

ORACLE = json.loads(gzip.decompress((ROOT / "tests/oracles/folder_logits.json.gz").read_bytes()))
PROMPT, ROWS = ORACLE["prompt"], ORACLE["models"]
LLAMA = json.loads(gzip.decompress((ROOT / "tests/oracles/bert_llama.json.gz").read_bytes()))


def folder(path: Path, name: str) -> Path:
    found = make_tiny_folders.write_folder(path / name, name)
    (word_pieces if name in ("bert", "roberta", "distilbert") else byte_pairs)(found, 264)
    return found


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("bert"), "bert")


def unit(vector: np.ndarray | list[float]) -> np.ndarray:
    return np.array(vector) / np.linalg.norm(vector)


def sentence_modules(path: Path, pooling: dict, *more: str) -> None:
    """What sentence-transformers writes beside a model."""
    kinds = ["Transformer", "Pooling", *more]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_hidden_states_of_an_encoder(name, tmp_path):
    """As near to the float64 model as transformers is in float32, up to the order of sums."""
    embedder = m3jit.load_embedder(folder(tmp_path, name), pooling="none", normalize=False, backend="cpu")
    apart = np.abs(embedder.rows(PROMPT) - np.array(ROWS[name]["rows"]))
    assert apart.shape == (len(PROMPT), 64) and apart.max() < 4 * ROWS[name]["float32_error"]


@pytest.mark.parametrize("pooling, wanted", [("mean", ROWS["bert"]["mean"]), ("cls", ROWS["bert"]["rows"][0]),
                                             ("last", ROWS["bert"]["last"]), (None, ROWS["bert"]["mean"])])
def test_pooling(bert, pooling, wanted):
    raw = m3jit.load_embedder(bert, pooling=pooling, normalize=False).rows(PROMPT)
    assert raw.shape == (1, 64) and np.abs(raw[0] - np.array(wanted)).max() < 1e-5
    found = m3jit.load_embedder(bert, pooling=pooling).rows(PROMPT)[0]
    assert abs(np.linalg.norm(found.astype(np.float64)) - 1) < 1e-6 and np.abs(found - unit(wanted)).max() < 1e-5


def test_a_vector_of_zeros_stays_one(bert, tmp_path):
    """Dividing by a length of zero gives no NaN."""
    model = make_tiny_folders.write_folder(tmp_path / "zeros", "bert")
    word_pieces(model, 264)
    shapes = make_tiny_folders.shapes("bert")
    make_tiny_folders.write_safetensors(model / "model.safetensors", {
        name: ("F32", shape, bytes(4 * int(np.prod(shape)))) for name, shape in shapes.items()})
    assert not m3jit.load_embedder(model).rows(PROMPT).any()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mamba"])
def test_models_that_generate_give_their_last_states(name, tmp_path):
    """Up to the cache's F16 (tests/models/test_hf_folder.py); chunks change no byte."""
    model = folder(tmp_path, name)
    for pooling in ("mean", "last"):
        found = m3jit.load_embedder(model, pooling=pooling, normalize=False).rows(PROMPT)[0]
        assert np.abs(found - np.array(ROWS[name][pooling])).max() < 0.02, pooling


def test_what_a_folder_says_is_done(tmp_path):
    model = folder(tmp_path, "bert")
    sentence_modules(model, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    embedder = m3jit.load_embedder(model)
    assert (embedder.pooling, embedder.normalize, embedder.width, embedder.context) == ("cls", False, 64, 64)
    assert np.abs(embedder.rows(PROMPT)[0] - np.array(ROWS["bert"]["rows"][0])).max() < 1e-5
    sentence_modules(model, {"pooling_mode": "mean"}, "Normalize")
    embedder = m3jit.load_embedder(model)
    assert (embedder.pooling, embedder.normalize) == ("mean", True)
    embedder = m3jit.load_embedder(model, pooling="last", normalize=False)
    assert (embedder.pooling, embedder.normalize) == ("last", False)


def test_a_model_that_generates_may_say_it_too(tmp_path):
    model = folder(tmp_path, "qwen2")
    sentence_modules(model, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "Normalize")
    embedder = m3jit.load_embedder(model)
    assert (embedder.pooling, embedder.normalize) == ("last", True)
    assert np.abs(embedder.rows(PROMPT)[0] - unit(ROWS["qwen2"]["last"])).max() < 0.01


@pytest.mark.parametrize("pooling, more, message", [
    ({"pooling_mode_max_tokens": True}, (), "pools by pooling_mode_max_tokens, which is not supported"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, (), "pools by"),
    ({}, (), "pools by nothing"), ({"pooling_mode": "mean"}, ("Dense",), "module of type 'Dense'")])
def test_other_ways_of_pooling_are_refused(tmp_path, pooling, more, message):
    model = folder(tmp_path, "bert")
    sentence_modules(model, pooling, *more)
    with pytest.raises(ModelFileError, match=message):
        m3jit.load_embedder(model)


def test_one_program_embeds_text_after_text(bert):
    from m3jit.models.provider import Models
    models = Models()
    program = models.program(models.load(str(bert)))
    vm = m3jit.VM(program, models=models)
    texts, out = ["the river", "runs", "to the sea"], []
    vm.set_sink("OUTPUT", out.append)
    for text in texts:
        vm.push_input(text)
    vm.close_input()
    vm.run()
    assert np.concatenate(out).tobytes() == m3jit.load_embedder(bert).embed(texts).tobytes()


def test_texts_without_a_vector(bert, tmp_path):
    embedder = m3jit.load_embedder(bert)
    assert embedder.embed([]).shape == (0, 64) and embedder.embed("").shape == (1, 64)  # [CLS] and [SEP] are tokens
    with pytest.raises(UserError, match="text 2: the text has 66 tokens, the context 64; embed it in parts"):
        embedder.embed(["a", "the " * 64])
    with pytest.raises(UserError, match="without tokens has no vector"):
        embedder.rows([])
    with pytest.raises(UserError, match="one of none, mean, cls, last is expected, got 'max'"):
        m3jit.load_embedder(bert, pooling="max")
    with pytest.raises(UserError, match="a vector for each token; use rows"):
        m3jit.load_embedder(bert, pooling="none").embed("a")
    model = make_tiny_folders.write_folder(tmp_path / "nan", "bert")
    word_pieces(model, 264)
    raw = bytearray((model / "model.safetensors").read_bytes())
    raw[-4:] = np.array([np.nan], np.float32).tobytes()
    (model / "model.safetensors").write_bytes(raw)
    with pytest.warns(match="layer_output_norm.bias.* holds NaN at 63"), \
            pytest.raises(UserError, match="holds no numbers .NaN or infinity.; its weights are damaged"):
        m3jit.load_embedder(model).embed("a")


def test_a_program_says_which_text_is_too_long(bert):
    embedder = m3jit.load_embedder(bert)
    vm = m3jit.VM(embedder._program, models=embedder._models)
    vm.push_input(np.zeros(65, np.int64))
    with pytest.raises(m3jit.Trap, match="longer than the model's context of 64 tokens"):
        vm.run()


# GGUF files.

@pytest.fixture(scope="module")
def gguf_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bert.write(tmp_path_factory.mktemp("gguf") / "bert.gguf")


def test_a_file_and_a_folder_give_the_same_bytes(bert, gguf_bert):
    """Equal weights under the two names are the same program over the same numbers."""
    found, wanted = (m3jit.load_embedder(path, pooling="none").rows(PROMPT) for path in (gguf_bert, bert))
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_against_llama_cpp(gguf_bert, pooling):
    """llama.cpp takes GELU from a table of F16 values of its approximation by tanh and rounds attention to F16: its
    vectors, whose elements reach 3, differ from float32 throughout by up to 0.0017."""
    assert hashlib.sha256(gguf_bert.read_bytes()).hexdigest() == LLAMA["sha256"]
    embedder = m3jit.load_embedder(gguf_bert, pooling=pooling, normalize=False, backend="cpu")
    for text, ids, vector in zip(LLAMA["texts"], LLAMA["tokens"], LLAMA[pooling]):
        assert embedder.encode(text) == ids
        assert np.abs(embedder.embed(text)[0] - np.array(vector)).max() < 0.004


def test_what_a_file_says_is_done(gguf_bert, tmp_path):
    assert (m3jit.load_embedder(gguf_bert).pooling, m3jit.load_embedder(gguf_bert).normalize) == ("mean", True)
    other = make_tiny_bert.write(tmp_path / "cls.gguf", pooling=make_tiny_bert.CLS)
    assert m3jit.load_embedder(other).pooling == "cls"
    assert m3jit.load_embedder(make_tiny_bert.write(tmp_path / "none.gguf", pooling=None)).pooling == "mean"
    rank = make_tiny_bert.write(tmp_path / "rank.gguf", pooling=make_tiny_bert.gguf.PoolingType.RANK)
    with pytest.raises(ModelFileError, match="'bert.pooling_type': is 4; expected 0 .none., 1 .mean."):
        m3jit.load_embedder(rank)


@pytest.mark.parametrize("kind, limit", [("F16", 0.005), ("Q8_0", 0.1)])
def test_other_weights(gguf_bert, tmp_path, kind, limit):
    path = make_tiny_bert.write(tmp_path / "bert.gguf", kind)
    ids = LLAMA["tokens"][2]
    exact = m3jit.load_embedder(gguf_bert, normalize=False).rows(ids)
    found = m3jit.load_embedder(path, normalize=False, backend="cpu").rows(ids)
    assert 0 < np.abs(found - exact).max() < limit
    assert m3jit.load_embedder(path, normalize=False, backend="interpreter").rows(ids).tobytes() == found.tobytes()
