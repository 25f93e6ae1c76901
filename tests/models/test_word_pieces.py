"""WordPiece: the tokenizers library with a "##" vocabulary as oracle, llama.cpp where both read Unicode alike."""
from __future__ import annotations

import gzip
import json
import os
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from vocabularies import ORACLES, WORD_PIECES

from m3jit.models.gguf_file import GGUFFile
from m3jit.models.stream_decoder import StreamDecoder
from m3jit.models.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from nasty_strings import nasty_strings  # noqa: E402


@pytest.fixture(scope="module", params=WORD_PIECES)
def named(request, tmp_path_factory) -> tuple[str, Tokenizer]:
    path = tmp_path_factory.mktemp("words") / "words.gguf"
    WORD_PIECES[request.param](path)
    return request.param, Tokenizer(GGUFFile(path))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("words") / "words.gguf"
    WORD_PIECES["word pieces"](path)
    return Tokenizer(GGUFFile(path))


def library(tokenizer: Tokenizer, lowercase: bool):
    """The same vocabulary as Hugging Face writes it."""
    from tokenizers import BertWordPieceTokenizer
    texts = tokenizer.vocabulary.texts.tolist()
    words = {text[1:] if text.startswith("▁") else text if token < 5 else "##" + text: token
             for token, text in enumerate(texts)}
    made = BertWordPieceTokenizer(words, lowercase=lowercase)
    made.add_special_tokens(texts[:5])
    return made


def test_agrees_with_the_library(named):
    name, tokenizer = named
    oracle = library(tokenizer, "cased" not in name)
    for text in nasty_strings(1000):
        assert tokenizer.encode(text, special=True) == oracle.encode(text).ids, ascii(text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == " ".join(oracle.decode(ids).split(" ")), ascii(text)


@cache
def alike(text: str) -> bool:
    """Whether both read the text alike: no format, control or unassigned characters, no marks but old nonspacing ones,
    none that decompose to several letters, no long words."""
    kind, old = unicodedata.category, unicodedata.ucd_3_2_0.category
    return all((kind(c) not in ("Cn", "Co", "Cf", "Cc", "Me", "Mc") and (kind(c) != "Mn" or old(c) == "Mn") or
                c in " \t\n\r") and sum(kind(part) != "Mn" for part in unicodedata.normalize("NFD", c)) <= 1
               for c in text) and all(len(word) <= 100 for word in text.split())


def test_agrees_with_llama_cpp_where_both_read_alike(named):
    name, tokenizer = named
    stored = json.loads(gzip.decompress((ORACLES / "tokenizer_variants.json.gz").read_bytes()))
    pairs = [(text, ids) for text, ids in zip(stored["strings"], stored["ids"][name]) if alike(text)]
    assert len(pairs) > 150 and sum(len(ids) for _, ids in pairs) > 900
    wrong = [text for text, ids in pairs if tokenizer.encode(text, special=True) != ids]
    assert not wrong, f"{len(wrong)} strings differ, first {ascii(wrong[0])}"


def test_frame_and_special_tokens(tokenizer):
    hello = tokenizer.encode("Hello", add_bos=False, add_eos=False)
    assert tokenizer.encode("Hello") == [2, *hello, 3] and tokenizer.encode("") == [2, 3]
    assert tokenizer.encode("[MASK]", special=True) == [2, 4, 3] and 4 not in tokenizer.encode("[MASK]")
    assert tokenizer.encode("\u4eff\U0001f600") == [2, tokenizer.id_of("▁\u4eff") or 1, 1, 3]
    assert tokenizer.encode("x" * 101) == [2, 1, 3] and tokenizer.encode("x" * 100) != [2, 1, 3]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.padding) == (2, None, 0)


def test_case_and_accents(tokenizer):
    assert tokenizer.encode("CAFÉ über") == tokenizer.encode("cafe uber")
    assert tokenizer.decode(tokenizer.encode("Well, wait \n there?!")) == "well, wait there?!"


def test_text_comes_out_as_it_is_decoded(tokenizer):
    for text in ("the naïve user, waiting.", "don't", "[SEP] x", "\u4e2d \u4e2e"):
        ids = tokenizer.encode(text, special=True)
        stream = StreamDecoder(tokenizer, strip_space=True)
        assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)
        assert b"".join(map(tokenizer.decode_bytes, ids)).decode() == " " + tokenizer.decode(ids)


@pytest.mark.slow
def test_the_tokeniser_of_a_real_model(tmp_path):
    """MiniLM's own tokenizer.json against its words in a GGUF file."""
    folder = os.environ.get("M3JIT_TEST_MINILM")
    if folder is None:
        pytest.skip("set M3JIT_TEST_MINILM to the folder of all-MiniLM-L6-v2")
    import gguf
    from tokenizers import Tokenizer as Library
    oracle = Library.from_file(str(Path(folder) / "tokenizer.json"))
    oracle.no_truncation()
    oracle.no_padding()
    words = sorted(oracle.get_vocab().items(), key=lambda item: item[1])
    special = {token for token, added in oracle.get_added_tokens_decoder().items() if added.special}
    writer = gguf.GGUFWriter(tmp_path / "minilm.gguf", "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list([text if token in special else text[2:] if text.startswith("##") else "▁" + text
                           for text, token in words])
    writer.add_token_types([3 if token in special else 1 for _, token in words])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer(GGUFFile(tmp_path / "minilm.gguf"))
    for text in nasty_strings():
        assert tokenizer.encode(text, special=True) == oracle.encode(text).ids, ascii(text)
