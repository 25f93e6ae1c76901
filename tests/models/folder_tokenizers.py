"""Small tokenizer.json files for folders of random models."""
from __future__ import annotations

import json
from pathlib import Path

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "runs", "##s", "##ing", "to", "sea", "a",
         "guitar"]


def word_pieces(folder: Path, size: int = 0) -> None:
    """A lower-casing WordPiece tokeniser that frames a text as [CLS] text [SEP]; `size`: add unused words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    words = WORDS + [f"unused{i}" for i in range(size - len(WORDS))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "cls_token": "[CLS]"}))


def byte_pairs(folder: Path, size: int = 0, end: str = "<|end|>") -> None:
    """A byte-level tokeniser of 256 bytes, the merges "th", "the" and an end token; `size`: add unused tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "th", "the"]
    tokens += [f"unused{i}" for i in range(size - len(tokens) - 1)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": end}}))
