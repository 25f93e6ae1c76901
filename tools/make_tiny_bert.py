"""Write the tiny random bert of `make_tiny_folders.py` as a GGUF file, and store what llama.cpp computes with it.

Tensor names are those of the gguf package's own table. tests/oracles/bert_llama.json.gz holds the SHA-256 of the file,
and for each text llama.cpp's token ids and its vectors, pooled and of single tokens, not normalised.

    python tools/make_tiny_bert.py FILE.gguf [--type F32 | F16 | Q8_0]
    python tools/make_tiny_bert.py --oracle tests/oracles/bert_llama.json.gz       (needs llama-cpp-python)
"""
from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf

sys.path.insert(0, str(Path(__file__).parent))
from make_tiny_folders import FOLDERS, shapes, values  # noqa: E402
from make_tiny_models import finish  # noqa: E402

CONFIG = FOLDERS["bert"][2]
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "river", "runs", "to", "sea", "a", "guitar", "an", "instrument", "of", "wood", ".", ",")
PIECES = ("s", "ing", "er", "wood", "y")
TEXTS = ("the river runs to the sea", "A guitar is an instrument of wood.", "wooding, riverer; woody guitars", "")
KINDS = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16,
         "Q8_0": gguf.GGMLQuantizationType.Q8_0}
MEAN, CLS = gguf.PoolingType.MEAN, gguf.PoolingType.CLS


def vocabulary() -> tuple[list[str], list[int]]:
    """Tokens as GGUF files spell them, and their types."""
    tokens = [*SPECIALS, *("\u2581" + word for word in WORDS), *PIECES]
    tokens += [f"\u2581unused{i}" for i in range(CONFIG["vocab_size"] - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIALS))
    kinds[1] = gguf.TokenType.UNKNOWN
    return tokens, [int(kind) for kind in kinds]


def write(path: Path, kind: str = "F32", pooling: gguf.PoolingType | None = MEAN) -> Path:
    """Write the model; matrices of the layers have the weight type `kind`, all else is F32."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("tiny random bert")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_layer_norm_eps(CONFIG["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    tokens, kinds = vocabulary()
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_type_count(CONFIG["type_vocab_size"])
    for name, token in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(token)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, CONFIG["num_hidden_layers"])
    for theirs, shape in shapes("bert").items():
        if theirs.startswith("pooler."):
            continue
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        weights = values("bert", theirs, shape)
        stored = KINDS[kind] if len(shape) == 2 and name.startswith("blk.") else KINDS["F32"]
        packed = weights if stored is KINDS["F32"] else gguf.quants.quantize(weights, stored)
        writer.add_tensor(name, packed, raw_dtype=stored)
    finish(writer)
    return path


def llama_vectors(path: Path, pooling: int) -> list[Any]:
    """llama.cpp's vectors of TEXTS: with pooling 0 a list for each token."""
    from llama_cpp import Llama
    model = Llama(str(path), embedding=True, pooling_type=pooling, n_ctx=64, n_threads=2, verbose=False)
    return [model.embed(text, normalize=False) for text in TEXTS]


def llama_tokens(path: Path) -> list[list[int]]:
    from llama_cpp import Llama
    model = Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=False) for text in TEXTS]


def rounded(vectors: Any) -> Any:
    return [rounded(v) for v in vectors] if isinstance(vectors, list) else round(vectors, 6)


def oracle() -> dict[str, Any]:
    import llama_cpp
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "bert.gguf")
        return {"llama_cpp": llama_cpp.__version__, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "texts": TEXTS, "tokens": llama_tokens(path), "mean": rounded(llama_vectors(path, int(MEAN))),
                "cls": rounded(llama_vectors(path, int(CLS))), "rows": rounded(llama_vectors(path, 0))}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a tiny random bert as a GGUF file.")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--type", default="F32", choices=KINDS)
    parser.add_argument("--oracle", type=Path, metavar="FILE", help="store what llama.cpp computes")
    options = parser.parse_args(arguments)
    if options.file:
        write(options.file, options.type)
    if options.oracle:
        options.oracle.write_bytes(gzip.compress(json.dumps(oracle()).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
