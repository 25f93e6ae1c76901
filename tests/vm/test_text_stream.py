"""Text from bytes that are cut anywhere."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from m3jit.vm.text_stream import TextStream


def pieces(data: bytes, cuts: list[int]) -> tuple[list[str], TextStream]:
    """`data` cut at the given places: the texts, the stream at the end."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    stream, texts = TextStream(), []
    for start, end in zip(at, at[1:]):
        text, stream = stream.feed(data[start:end])
        texts.append(text)
    return texts, stream


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("é€😀"))),
       cuts=st.lists(st.integers(0, 300)))
def test_any_cut_of_any_text_gives_the_text(text, cuts):
    texts, stream = pieces(text.encode(), cuts)
    assert "".join(texts) == text and stream == TextStream() and stream.end() == ""


@settings(max_examples=300, deadline=None)
@given(data=st.lists(st.one_of(st.binary(max_size=3), st.sampled_from(
    [b"\xf0", b"\xf0\x9f", b"\x98", b"\xe2\x82", b"\xc3", b"a", "é😀".encode(), b"\xed\xa0", b"\xf4\x90",
     b"\xc0"]))).map(
        b"".join), cuts=st.lists(st.integers(0, 40)))
def test_any_cut_of_any_bytes_gives_what_the_whole_gives(data, cuts):
    texts, stream = pieces(data, cuts)
    assert "".join(texts) + stream.end() == data.decode("utf-8", "replace") and len(stream.held) < 4
    whole = data.decode("utf-8", "ignore")
    assert all(c in whole or c == "\ufffd" for text in texts for c in text)


def test_an_unfinished_code_point_becomes_one_replacement():
    for unfinished in (b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe2\x82", b"\xc3"):
        text, stream = TextStream().feed(b"a" + unfinished)
        assert text == "a" and stream.held == unfinished and stream.end() == "\ufffd"
        assert stream.feed(b"b")[0] == "\ufffdb"
    stream = TextStream(b"\xe2\x82")
    assert stream.feed(b"")[1] is stream and stream.feed(b"\xac") == ("€", TextStream())
