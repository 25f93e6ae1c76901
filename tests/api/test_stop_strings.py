"""Stop strings: what a reader of the whole text would cut, whatever the pieces, and never a part of one too early."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from m3jit.api.stop_strings import LONGEST, MOST, StopStrings, check_stops
from m3jit.errors import UserError

LETTERS = st.text("ab", min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """(text before the stop string that is complete first, that string): read one character at a time."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[:end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(LETTERS, max_size=3))
def test_pieces_do_not_matter(pieces, stops):
    stream = StopStrings(stops)
    given_out = [stream.feed(piece) for piece in pieces]
    text = "".join(given_out) + stream.flush()
    assert (text, stream.found) == cut("".join(pieces), stops)


@settings(max_examples=400, deadline=None)
@given(st.text("ab", max_size=12), st.lists(LETTERS, min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    stream = StopStrings(stops)
    out = ""
    for i, letter in enumerate(text, 1):
        out += stream.feed(letter)
        if stream.found:
            break
        seen = text[:i]
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[:i - held]


@settings(max_examples=600, deadline=None)
@given(st.text("abc", max_size=9), st.lists(st.text("abc", max_size=4), max_size=8), st.lists(LETTERS, max_size=3))
def test_one_may_begin_in_what_was_given_out(behind, pieces, stops):
    """One that ends there is none; what is given out is the text behind, up to the first that ends in it."""
    stream, said = StopStrings(stops, behind), ""
    for piece in pieces:
        said += stream.feed(piece)
    said += stream.flush()
    whole = behind + "".join(pieces)
    ends = [(end, end - len(s), s) for s in stops for end in range(len(behind) + 1, len(whole) + 1)
            if whole[:end].endswith(s)]
    _, at, found = min(ends, default=(0, len(whole), None))
    assert (stream.found, stream.back) == (found, max(0, len(behind) - at))
    assert said == whole[len(behind):max(at, len(behind))]


@pytest.mark.parametrize("stops, message",
                         [([""], "1 to"), (["x" * (LONGEST + 1)], "1 to"), (["x"] * (MOST + 1), "at most"),
                                            ([5], "got 5")])
def test_wrong_stop_strings(stops, message):
    with pytest.raises(UserError, match=message):
        check_stops(stops)
    assert check_stops(None) == () and check_stops("one") == ("one",)
