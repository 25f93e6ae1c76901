"""Source text to logical lines of tokens."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from m3jit.frontend.errors import SourceError
from m3jit.frontend.numbers import PATTERN as NUMBER

MAX_LINE = 1 << 20                 # characters of a physical line
_TOKEN = re.compile(r"""
    (?P<blank>[ \t\r\f]+) |
    (?P<comment>[;\#].*) |
    (?P<string>"(?:[^"\\\n]|\\.)*") |
    (?P<symbol>@[A-Za-z_][\w.]*(?::(?:"(?:[^"\\\n]|\\.)*"|[^\s,\]\[;\#="]+))?) |
    (?P<address>&\.?[A-Za-z_][\w.]*(?:[+-](?:0[xX][0-9a-fA-F]+|[0-9]+))?) |
    (?P<shape>[0-9]+(?:[xX](?:-1|[0-9]+|[rR]\w+))+(?![\w.])) |
    (?P<number>(?:""" + NUMBER + r""")(?![\w.])) |
    (?P<word>\.?[A-Za-z_][\w.]*) |
    (?P<mark>[=,:\[\]()])
""", re.X)
_HEX = re.compile(r"0[xX][0-9a-fA-F_]+\Z")


class Token(NamedTuple):
    """kind: word number string shape symbol address, or the mark itself; "bad" for what is no token (reported)."""
    kind: str
    text: str
    line: int
    column: int


@dataclass
class LogicalLine:
    """A statement's tokens; comments stay with the physical line they end."""
    tokens: list[Token]
    indent: int
    comments: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Source:
    """A text cut into logical lines, and what could not be read as tokens."""
    file: str
    physical: list[str]
    lines: list[LogicalLine] = field(default_factory=list)
    errors: list[SourceError] = field(default_factory=list)
    comments: dict[int, str] = field(default_factory=dict)      # physical line -> comment text

    def error(self, token: Token | None, message: str, hint: str = "", line: int = 1, column: int = 1,
              severity: str = "error") -> SourceError:
        """An error at a token (or place) of this source."""
        width = 1
        if token is not None:
            line, column, width = token.line, token.column, max(1, len(token.text))
        text = self.physical[line - 1] if 0 < line <= len(self.physical) else ""
        return SourceError(self.file, line, column, message, text, width, hint, severity)


def split(text: str, file: str) -> Source:
    """Cut a source into logical lines; never raises."""
    source = Source(file, text.split("\n"))
    current: LogicalLine | None = None
    for number, raw in enumerate(source.physical, 1):
        tokens = _tokens(source, raw, number)
        if not tokens:
            continue
        indent = len(raw) - len(raw.lstrip(" \t"))
        if current is not None and _continues(current, tokens, indent):
            current.tokens.extend(tokens)
        else:
            current = LogicalLine(tokens, indent)
            source.lines.append(current)
    return source


def _continues(current: LogicalLine, tokens: list[Token], indent: int) -> bool:
    last = current.tokens[-1].kind
    if last in (",", "["):
        return True
    if tokens[0].kind == "]" and _depth(current.tokens) > 0:
        return True
    keyed = len(tokens) > 2 and tokens[0].kind == "word" and tokens[1].kind == "="
    return keyed and last != ":" and indent > current.indent


def _depth(tokens: list[Token]) -> int:
    return sum((t.kind == "[") - (t.kind == "]") for t in tokens)


def _tokens(source: Source, raw: str, number: int) -> list[Token]:
    out: list[Token] = []
    if len(raw) > MAX_LINE:
        source.errors.append(source.error(None, f"a line of {len(raw)} characters; {MAX_LINE} are allowed",
                                          line=number))
        return out
    at = 0
    while at < len(raw):
        m = _TOKEN.match(raw, at)
        if m is None:
            end = _bad(source, raw, at, number)
            out.append(Token("bad", raw[at:end], number, at + 1))
            at = end
            continue
        kind = m.lastgroup or ""
        if kind == "comment":
            source.comments[number] = m[0].rstrip()
            break
        if kind == "shape" and _HEX.match(m[0]):
            kind = "number"
        if kind == "mark":
            kind = m[0]
        if kind != "blank":
            out.append(Token(kind, m[0], number, at + 1))
        at = m.end()
    return out


def _bad(source: Source, raw: str, at: int, number: int) -> int:
    """Report what is no token; where to go on."""
    if raw[at] == '"':
        token = Token("string", raw[at:], number, at + 1)
        source.errors.append(source.error(token, "a string without its closing quote"))
        return len(raw)
    m = re.compile(r"[^\s,\[\]=;#\"]+").match(raw, at)
    token = Token("word", m[0] if m else raw[at], number, at + 1)
    source.errors.append(source.error(token, f"{token.text!r} is not a token of the language"))
    return at + len(token.text)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"'}
_ESCAPE = re.compile(r"\\(?:u\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|(.))", re.S)


def unquote(text: str) -> str:
    r"""A string token's value: \n \t \r \0 \\ \" \xHH (a code point below 256) and \u{HHHHHH}.  ValueError
    otherwise."""
    def one(m: re.Match) -> str:
        if m[3] is not None:
            if m[3] not in _ESCAPES:
                raise ValueError(f"unknown escape \\{m[3]} in a string")
            return _ESCAPES[m[3]]
        n = int(m[1] or m[2], 16)
        if n > 0x10FFFF or 0xD800 <= n < 0xE000:
            raise ValueError(f"{m[0]} is not a Unicode character")
        return chr(n)
    value = _ESCAPE.sub(one, text[1:-1])
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a string with half a surrogate pair") from None
    return value


def quote(value: str) -> str:
    """The token that unquotes to this value: printable characters as they are."""
    names = {v: "\\" + k for k, v in _ESCAPES.items()}
    return '"' + "".join(names.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in value) + '"'
