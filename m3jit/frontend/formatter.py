"""`m3jit fmt`: one canonical layout of a source; comments stay, and the program's bytes do not change.

Labels at the margin, instructions indented by four, one statement a line, operands separated by ", ", mnemonics and
keys in capitals, directives in small letters, comments two blanks behind the code or at the depth of the next
statement, at most one empty line in a row.  A statement that was written on several lines stays on several lines.
"""
from __future__ import annotations

import bisect

from m3jit.frontend.errors import AssemblyError
from m3jit.frontend.lexer import LogicalLine, Source, Token, split
from m3jit.frontend.source_data import TYPES

INDENT = "    "


def format_source(text: str, filename: str = "<text>") -> str:
    """The canonical text.  AssemblyError when the source has characters that are no tokens; formatting the result gives
    it again."""
    source = split(text.replace("\r\n", "\n"), filename)
    if source.errors:
        raise AssemblyError(source.errors)
    out: list[str] = []
    starts = {line.tokens[0].line: line for line in source.lines}
    inside = {t.line for line in source.lines for t in line.tokens} | \
             {n for line in source.lines for n in range(line.tokens[0].line, line.tokens[-1].line + 1)}
    blank = False
    for number in range(1, len(source.physical) + 1):
        comment = source.comments.get(number, "")
        if number in starts:
            if blank and out:
                out.append("")
            out += _statement(source, starts[number])
            blank = False
        elif number in inside:
            continue                               # a continuation: written with its statement
        elif comment:
            if blank and out:
                out.append("")
            out.append(_comment_indent(source, number) + comment)
            blank = False
        else:
            blank = True
    return "\n".join(out) + "\n" if out else ""


def _comment_indent(source: Source, number: int) -> str:
    i = bisect.bisect_right(source.lines, number, key=lambda line: line.tokens[0].line)
    following = source.lines[i] if i < len(source.lines) else None
    return INDENT if following is not None and _is_instruction(following) else ""


def _is_instruction(line: LogicalLine) -> bool:
    t = line.tokens
    return not _labels(t) and not t[0].text.startswith(".") and not (len(t) > 1 and t[1].text.lower() == ".equ")


def _labels(tokens: list[Token]) -> int:
    """How many tokens labels take."""
    n = 0
    while n + 1 < len(tokens) and tokens[n].kind == "word" and tokens[n + 1].kind == ":":
        n += 2
    return n


def _statement(source: Source, line: LogicalLine) -> list[str]:
    """The physical lines of a statement; each keeps its comment."""
    tokens = line.tokens
    n = _labels(tokens)
    head = tokens[n] if n < len(tokens) else None
    data = head is not None and (head.text.lower() in TYPES or head.text.lower() == ".str")
    out: list[str] = []
    first = tokens[0].line
    if n and not data:
        for i in range(0, n, 2):
            out.append(f"{tokens[i].text}:")
        if head is None:
            out[-1] += _trailing(source, first, tokens[-1].line)
            return out
    rows: dict[int, list[Token]] = {}
    for t in tokens[n if not data else 0:]:
        rows.setdefault(t.line, []).append(t)
    last = tokens[-1].line
    equ = n + 1 < len(tokens) and tokens[n + 1].text.lower() == ".equ"
    plain = head is None or not head.text.startswith(".") and not equ
    for k, (number, row) in enumerate(rows.items()):
        margin = INDENT if plain else ""
        if k:
            margin += INDENT
        text = margin + _row(row, head, line)
        if k == 0 and n and not data and number != first:
            out[-1] += _trailing(source, first, first)
        stop = min((m for m in rows if m > number), default=last + 1) - 1
        out += _with_comments(source, text, number, stop)
    return out


def _trailing(source: Source, first: int, last: int) -> str:
    notes = [source.comments[i] for i in range(first, last + 1) if i in source.comments]
    return "  " + "  ".join(notes) if notes else ""


def _with_comments(source: Source, text: str, first: int, last: int) -> list[str]:
    """A row with the comment of its line; comments of lines between rows follow on lines of their own."""
    out = [text + _trailing(source, first, first)]
    return out + [INDENT * 2 + source.comments[i] for i in range(first + 1, last + 1) if i in source.comments]


def _row(row: list[Token], head: Token | None, line: LogicalLine) -> str:
    out, previous = "", None
    for i, t in enumerate(row):
        following = row[i + 1] if i + 1 < len(row) else None
        out += _gap(previous, t, head, line) + _spelling(t, following, head)
        previous = t
    return out


def _gap(before: Token | None, t: Token, head: Token | None, line: LogicalLine) -> str:
    if before is None or t.kind in (",", "]", ")", ":", "=", "(") or before.kind in ("[", "(", "="):
        return ""
    if before is head or before.kind == ":":
        return " "
    if before.kind == ",":
        return " "
    if head is not None and (head.text.startswith(".") and head.text.lower() not in TYPES or t is head
                             or t.text.lower() == ".equ" or _second(line) == ".equ"):
        return " "
    typed = head is not None and head.text.lower() in TYPES
    if typed and before.kind == "]" and t.kind == "[" and _depth(line, t) == 0:
        return " "
    return ", "


def _second(line: LogicalLine) -> str:
    return line.tokens[1].text.lower() if len(line.tokens) > 1 else ""


def _depth(line: LogicalLine, token: Token) -> int:
    depth = 0
    for t in line.tokens:
        if t is token:
            break
        depth += (t.kind == "[") - (t.kind == "]")
    return depth


def _spelling(t: Token, following: Token | None, head: Token | None) -> str:
    if t.kind == "word":
        if t is head:
            return t.text.lower() if t.text.startswith(".") else t.text if following is not None and \
                following.text.lower() == ".equ" else t.text.upper()
        if t.text.lower() == ".equ":
            return ".equ"
        if following is not None and following.kind == "=":
            return t.text.upper()
    return t.text
