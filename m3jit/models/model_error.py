"""The one error raised for a model file that cannot be used."""

import os

from m3jit.errors import UserError


POINTER = b"version https://git-lfs"                   # how a file begins that stands for one git lfs has not fetched
FETCH = "This is git-lfs's pointer to the file: fetch the file itself with git lfs pull."


class ModelFileError(UserError):
    """A model file is damaged, hostile, or of a kind that is not supported.

    Message: `FILE: byte OFFSET: ITEM: what is wrong; expected EXPECTED. REMEDY`, parts that do not apply left out.
    The parts stay available as attributes (`path`, `offset`, `item`, `problem`, `expected`, `remedy`).
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, *, offset: int | None = None,
                 item: str | None = None, expected: str | None = None, remedy: str | None = None) -> None:
        self.path = os.fspath(path)
        self.problem, self.offset, self.item, self.expected, self.remedy = problem, offset, item, expected, remedy
        where = [self.path]
        if offset is not None:
            where.append(f"byte {offset}")
        if item is not None:
            where.append(item)
        text = ": ".join([*where, problem])
        if expected is not None:
            text += f"; expected {expected}"
        text += "." if not text.endswith((".", "!", "?")) else ""
        if remedy is not None:
            text += f" {remedy}"
        super().__init__(text)
