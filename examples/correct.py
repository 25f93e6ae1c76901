"""A model takes a wrong turn in the middle of a sentence; it is seen, cut out, put right, and the text goes on.

    python examples/correct.py [model file or name] [prompt] [what is wrong] [what is right]

A model that follows instructions gets the prompt as a message.
"""
import sys
import time
from dataclasses import dataclass

import m3jit


@dataclass
class Correction:
    """What a correction took: seconds, and tokens."""
    detection: float                # from the token that completed what is wrong until it was seen
    rollback: float                 # going back and putting the correction in
    resume: float                   # until the next token
    kept: int                       # tokens of the answer
    taken_back: int
    injected: int
    evaluated: int                  # before the answer went on; the injected ones among them


def correct(session, wrong, right, show, tokens=120):
    """Generate until `wrong` is in the text, put `right` in its place, and go on; None when it never came."""
    came = time.perf_counter()
    pieces = session.generate(tokens)
    for piece in pieces:
        came = time.perf_counter()
        show(piece.text)
        if wrong not in session.text:
            continue
        seen, tokens_before, evaluated = time.perf_counter(), len(session.tokens), session.evaluated
        taken_back = session.rollback(to_text=wrong, which=-1)
        kept = len(session.tokens)
        session.inject(right)
        injected, back = len(session.tokens) - kept, time.perf_counter()
        show(f" [no: {right}]")
        rest = session.generate(tokens)
        first = next(rest)
        on = time.perf_counter()
        found = Correction(seen - came, back - seen, on - back, kept - session.start, taken_back, injected,
                           session.evaluated - evaluated)
        assert kept + taken_back == tokens_before
        show(first.text)
        for piece in rest:
            show(piece.text)
        return found
    return None


def begin(model, prompt):
    """A session with a prompt; greedy, so that the same text comes each time."""
    try:
        return m3jit.Session(model, [{"role": "user", "content": prompt}], temperature=0)
    except m3jit.UserError:                            # no chat template: the prompt is the beginning of a text
        return m3jit.Session(model, prompt, temperature=0)


def main(reference="default", prompt="It is a truth universally acknowledged, that", wrong="good man",
         right="clever woman"):
    session = begin(m3jit.load_model(reference), prompt)
    found = correct(session, wrong, right, lambda text: print(text, end="", flush=True), tokens=60)
    print()
    if found is None:
        print(f"{wrong!r} did not come")
        return
    print("corrected:", session.text)
    print(f"{found.kept} tokens kept, {found.taken_back} taken back, {found.injected} put in; {found.evaluated} "
          "evaluated before the text went on")
    print(f"seen after {1e3 * found.detection:.2f} ms, rolled back in {1e3 * found.rollback:.2f} ms, next token after "
          f"{1e3 * found.resume:.2f} ms")


if __name__ == "__main__":
    if sys.argv[1:] in (["--help"], ["-h"]):
        sys.exit(print(__doc__.strip()))
    if len(sys.argv) > 5 or any(given.startswith("-") for given in sys.argv[1:]):
        sys.exit(__doc__.strip())
    try:
        main(*sys.argv[1:])
    except m3jit.M3Error as error:
        sys.exit(f"error: {error}")
