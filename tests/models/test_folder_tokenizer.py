"""Tokenisers of Hugging Face folders."""
from __future__ import annotations

import json

import pytest
from folder_tokenizers import byte_pairs, word_pieces

from m3jit.models.chat_template import ChatTemplate
from m3jit.models.folder_tokenizer import FolderTokenizer
from m3jit.models.model_error import ModelFileError
from m3jit.models.stream_decoder import StreamDecoder


def test_word_pieces(tmp_path):
    word_pieces(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    ids = tokenizer.encode("The river runs, running to the SEA")
    assert ids == [2, 5, 6, 7, 1, 1, 10, 5, 11, 3]     # framed, not truncated or padded as the file would have it
    assert tokenizer.encode("rivers", add_bos=False, add_eos=False) == [6, 8]
    assert tokenizer.encode("[CLS]") == [2, 1, 1, 1, 3] and tokenizer.encode("[CLS]", special=True) == [2, 2, 3]
    assert b"".join(map(tokenizer.decode_bytes, [2, 5, 6, 8, 3])) == b" the rivers"
    assert tokenizer.decode_bytes(2, special=True) == b"[CLS]" and tokenizer.decode([5, 6, 8]) == "the rivers"
    assert (tokenizer.padding, tokenizer.bos, tokenizer.eos, tokenizer.ends) == (0, None, None, frozenset())
    assert len(tokenizer) == 14 and tokenizer.id_of("sea") == 11 and tokenizer.id_of("Sea") is None


def test_byte_pairs(tmp_path):
    byte_pairs(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 3]}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = FolderTokenizer(tmp_path)
    text = "the naïve\n<|end|>"
    assert b"".join(map(tokenizer.decode_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.encode("the")[0] == 257 and tokenizer.encode("<|end|>", special=True) == [258]
    assert tokenizer.encode("the", add_eos=True)[-1] == 258 == tokenizer.eos and tokenizer.ends == {258, 3}
    assert tokenizer.decode_bytes(258) == b"" and tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.encode("\ud800") == tokenizer.encode("\ufffd")
    with pytest.raises(IndexError, match="token id 259"):
        tokenizer.decode_bytes(259)
    with pytest.raises(ValueError, match="no begin-of-text"):
        tokenizer.encode("the", add_bos=True)


@pytest.mark.parametrize("text, message", [
    ("", "not valid JSON"), ("[]", "is a list"), ("{}", "'none', which is not supported"),
    ('{"model": {"type": "Magic"}}', "'Magic', which is not supported"),
    ('{"model": {"type": "BPE"}}', "cannot be read"), (None, "holds no tokenizer.json. Other forms"),
    ('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4294967295}, "unk_token": "a"}, '
     '"added_tokens": []}', "ids below|cannot be read")])
def test_a_damaged_file_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFileError, match=message):
        tokenizer = FolderTokenizer(tmp_path)
        assert tokenizer.encode("a") and len(tokenizer)


def scored(folder):
    """A tokeniser with byte fallback that writes spaces as U+2581, one before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcxyz", "ab", "\u2581ab"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("a", "b"), ("\u2581", "ab")],
                                     byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("make, texts", [
    (word_pieces, ["the river runs to a sea", "guitars"]),
    (byte_pairs, ["the na\u00efve \U0001f600 \n", " the<|end|>"]),
    (scored, ["ab xyz  abc", " ab", "\U0001f600 a\u00e9\n", ""])])
def test_text_comes_out_as_the_library_decodes_it(tmp_path, make, texts):
    make(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    for text in texts:
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        stream = StreamDecoder(tokenizer, strip_space=True)
        assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids), text


def test_a_chat_template_keeps_control_tokens_of_messages_as_text(tmp_path):
    byte_pairs(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|end|>")
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.control_texts() and tokenizer.split_control("a<|end|><|end|>b") == ["a", 258, 258, "b"]
    tokens = ChatTemplate(tokenizer).tokens([{"role": "user", "content": "the <|end|>"}])
    assert tokens.count(258) == 1 and tokens[-1] == 258
    assert tokens[:-1] == tokenizer.encode("the <|end|>", add_bos=False, add_eos=False)


def test_tokens_that_end_a_turn_are_known_by_name(tmp_path):
    byte_pairs(tmp_path, end="<|im_end|>")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = FolderTokenizer(tmp_path)
    assert (tokenizer.eos, tokenizer.end_of_turn, tokenizer.ends) == (None, 258, {258})
