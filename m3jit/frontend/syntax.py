"""Logical lines to statements: labels, a head word, operands; no meaning yet."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterator

from m3jit.frontend.lexer import LogicalLine, Source, Token

MAX_NESTING = 8


@dataclass
class Value:
    """kind: word number string shape symbol address list.  token: where it starts; items: of a list."""
    kind: str
    token: Token
    items: list["Value"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.token.text if self.kind != "list" else "[" + ", ".join(i.text for i in self.items) + "]"


@dataclass
class Operand:
    """`value`, or `KEY=value`."""
    value: Value
    key: Token | None = None

    @property
    def token(self) -> Token:
        return self.key or self.value.token


@dataclass
class Statement:
    """labels, then a mnemonic or directive with operands.  params: of `.func name(a, b)`."""
    labels: list[Token] = field(default_factory=list)
    head: Token | None = None
    operands: list[Operand] = field(default_factory=list)
    params: list[Token] | None = None


class _Problem(Exception):
    def __init__(self, token: Token, message: str, hint: str = ""):
        super().__init__(message)
        self.token, self.message, self.hint = token, message, hint


def parse(source: Source) -> Iterator[Statement]:
    """Every statement that can be read; problems go to `source.errors`."""
    for line in source.lines:
        if any(t.kind == "bad" for t in line.tokens):
            continue                                # reported by the lexer
        try:
            yield _statement(line)
        except _Problem as p:
            source.errors.append(source.error(p.token, p.message, p.hint))


def _statement(line: LogicalLine) -> Statement:
    t, out, i = line.tokens, Statement(), 0
    while i + 1 < len(t) and t[i].kind == "word" and t[i + 1].kind == ":" and not t[i].text.startswith("."):
        out.labels.append(t[i])
        i += 2
    if i == len(t):
        return out
    if t[i].kind != "word":
        raise _Problem(t[i], f"expected a label, a directive or a mnemonic, found {t[i].text!r}")
    out.head = t[i]
    i += 1
    if i < len(t) and t[i].kind == "word" and t[i].text.lower() == ".equ" and not out.head.text.startswith("."):
        out.operands.append(Operand(Value("word", out.head)))         # NAME .equ value
        out.head = t[i]
        i += 1
    comma: Token | None = None
    while i < len(t):
        if t[i].kind == ",":
            if comma is not None or not out.operands:
                raise _Problem(t[i], "a comma with no operand before it")
            comma = t[i]
            i += 1
            continue
        if t[i].kind == "(":
            i = _params(t, i, out)
            continue
        comma = None
        i = _operand(t, i, out)
    if comma is not None:
        raise _Problem(comma, "a comma at the end, but no operand follows")
    return out


def _operand(t: list[Token], i: int, out: Statement) -> int:
    key = None
    if t[i].kind == "word" and i + 1 < len(t) and t[i + 1].kind == "=":
        key = t[i]
        i += 2
        if i == len(t):
            raise _Problem(key, f"{key.text}= without a value")
    value, i = _value(t, i, 0)
    out.operands.append(Operand(value, key))
    return i


def _value(t: list[Token], i: int, depth: int) -> tuple[Value, int]:
    token = t[i]
    if token.kind != "[":
        if token.kind in ("=", ":", "]", "(", ")", ","):
            raise _Problem(token, f"expected an operand, found {token.text!r}")
        return Value(token.kind, token), i + 1
    if depth == MAX_NESTING:
        raise _Problem(token, f"lists nest at most {MAX_NESTING} deep")
    value, i, separated = Value("list", token), i + 1, True
    while True:
        if i == len(t):
            raise _Problem(token, "a list without its closing bracket")
        if t[i].kind == "]":
            if separated and value.items:
                raise _Problem(t[i], "a comma before the closing bracket")
            return value, i + 1
        if t[i].kind == ",":
            if separated:
                raise _Problem(t[i], "a comma with no entry before it")
            separated = True
            i += 1
            continue
        item, i = _value(t, i, depth + 1)
        value.items.append(item)
        separated = False


def _params(t: list[Token], i: int, out: Statement) -> int:
    if out.params is not None or len(out.operands) != 1 or out.head is None or out.head.text.lower() != ".func":
        raise _Problem(t[i], "parentheses belong to `.func name(rA, rB)` only")
    out.params = []
    i += 1
    while i < len(t) and t[i].kind != ")":
        if t[i].kind == "word":
            out.params.append(t[i])
        elif t[i].kind != ",":
            raise _Problem(t[i], f"expected a parameter name, found {t[i].text!r}")
        i += 1
    if i == len(t):
        raise _Problem(t[-1], "a parameter list without its closing parenthesis")
    return i + 1
