"""Strings that tokenisers get wrong, made from a seed: the same list on every machine and Python version.

Families: handwritten cases, whitespace runs, digit runs, contractions, combining marks, emoji joined by ZWJ, scripts
of all planes, control characters, non-characters and private use, very long words, special-token lookalikes, code,
mixtures of all of these, and text whose UTF-8 bytes have no token of their own. Every string encodes to UTF-8 (no
surrogates) and has no NUL; the longest is 2,000 characters.
"""
from __future__ import annotations

import random
from collections.abc import Callable

SEED = 20262
COUNT = 2000

SPACES = [
    " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\v", "\f", "\u0085", "\u00a0", "\u1680", "\u2000", "\u2009",
    "\u2028", "\u2029", "\u202f", "\u205f", "\u3000",
]
INVISIBLE = [
    "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u180e", "\u200e", "\u200f", "\u202a", "\u202e",
    "\u2066", "\u2069", "\ufe0f", "\ufe0e", "\U000e0061", "\U000e007f",
]
CONTRACTIONS = [
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'VE", "'M", "'LL", "'D", "\u2019s", "\u2019re",
    "'", "''", "'ss", "'l", "'v", "'r", " 's", " 've", "n't", "o'clock", "y'all'd've",
]
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
    "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>",
]
LOOKALIKES = [
    "<|im_start", "|im_start|>", "<|im_end|", "< |im_end|>", "<|IM_START|>", "<|im_start|", "<|endoftext|",
    "<|im_start |>", "<<|im_end|>>", "<|unk|>", "<s>", "</s>", "[INST]", "<0x0A>", "<unk>", "<repo_name", "<|>",
    "\uff1c|im_end|\uff1e",
]
DIGITS = [
    "0", "7", "12", "2024", "3.14159", "1,000,000", "1e-9", "0x1F", "\u0663\u0664", "\u0969\u096a", "\uff11\uff12",
    "\u00b2\u00b3", "\u00bd", "\u2167", "\u216b", "\u2460", "\u3007", "\u4e09", "\U0001d7d8\U0001d7d9", "\u0bf0",
    "\u3251", "\U00010107", "\U0001f101",
]
EMOJI = [
    "\U0001f600", "\u2764\ufe0f", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\U0001f9d1\U0001f3ff\u200d\U0001f52c", "1\ufe0f\u20e3",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "\u2620", "\u00a9",
]
WORDS = [
    "the", "Hello", "world", "na\u00efve", "r\u00e9sum\u00e9", "stra\u00dfe", "STRASSE", "\u0130stanbul", "tokeniser",
    "iPhone", "HTTPServer", "snake_case", "kebab-case", "camelCase", "\ufb01ne", "\u017fuch", "A", "z", "\u212aelvin",
    "\u0441\u043b\u043e\u0432\u043e", "\u03bb\u03cc\u03b3\u03bf\u03c2", "\u05e9\u05dc\u05d5\u05dd", "\u4e2d\u6587",
    "\u0645\u0631\u062d\u0628\u0627", "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8", "\ud55c\uad6d\uc5b4",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u10d2\u10d0\u10db\u10d0",
    "\u0561\u0580\u0565\u0582", "\u1275\u121d\u1205\u122d\u1275", "\U00010330\U00010331", "\U0001d49c\U0001d4b7",
]
PUNCTUATION = [
    "!", "?", "...", "\u2026", "--", "\u2014", "::", "->", "=>", "/*", "*/", "//", "#", "$", "\u20ac", "@", "^", "`",
    "```", "~", "\\", "\\n", "\u00ab", "\u00bb", "\u3002", "\u3001", "(", ")", "[", "]", "{", "}", "<", ">", "&",
    "&amp;", "|", "%", "_", "__", "\u2022", "\u221e", "\u2260", "+", "=",
]
CODE = [
    "def f(x):\n    return x**2\n", "for (int i=0;i<n;++i){a[i]+=b[i];}", "\tif err != nil {\n\t\treturn err\n\t}\n",
    "SELECT * FROM t WHERE a='b';", "<div class=\"x\">&nbsp;</div>", "#include <stdio.h>\r\n", "λ x → x",
    "x = {'a': [1]}", "https://example.org/a?b=c&d=%20#e", "user@example.org", "C:\\Users\\x", "\x1b[31mred\x1b[0m",
    "git log --oneline",
]
# Scripts and oddities by range of code points: (first, last)
RANGES = [
    (0x20, 0x7E), (0xA1, 0xFF), (0x100, 0x24F), (0x250, 0x2AF), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58F),
    (0x591, 0x5F4), (0x600, 0x6FF), (0x900, 0x97F), (0xB80, 0xBFF), (0xE01, 0xE5B), (0xF00, 0xFDA), (0x10A0, 0x10FF),
    (0x1100, 0x11FF), (0x1200, 0x137F), (0x13A0, 0x13FF), (0x16A0, 0x16F0), (0x1780, 0x17F9), (0x1E00, 0x1FFF),
    (0x2000, 0x206F), (0x2070, 0x209C), (0x20A0, 0x20BF), (0x2100, 0x218B), (0x2190, 0x23FF), (0x2460, 0x24FF),
    (0x2500, 0x27BF), (0x3001, 0x30FF), (0x3200, 0x33FF), (0x4E00, 0x9FFF), (0xA000, 0xA48C), (0xAC00, 0xD7A3),
    (0xE000, 0xE0FF), (0xF900, 0xFAD9), (0xFB00, 0xFDFF), (0xFE00, 0xFE6F), (0xFF01, 0xFFEE), (0xFFF9, 0xFFFF),
    (0x10000, 0x100FA), (0x10300, 0x1034A), (0x10900, 0x1091F), (0x12000, 0x12399), (0x13000, 0x1342E),
    (0x16800, 0x16A38), (0x1D100, 0x1D1E8), (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF),
    (0x30000, 0x3134A), (0x3FFFE, 0x3FFFF), (0x40000, 0xBFFFF), (0xE0001, 0xE01EF), (0xF0000, 0xF00FF),
    (0x10FF00, 0x10FFFF),
]

HANDWRITTEN = [
    "", " ", "  ", "\n", "\n\n", "\t", "a", " a", "a ", "  a", "a  ", "a  b", "a   b", "a \n b", "a\n\nb", "a\t\tb",
    "a \t b", " \n", "\n ", "\r\n\r\n", "   \n   ", "word\n", "word \n", "\n word", "x  1", "x   12", "1 2", "1  2",
    "12 ", " 12", "a1b2", "don't", "DON'T", "don\u2019t", "it's", "it 's", "'s", "''s", "we'll've", "I'M",
    "rock 'n' roll", "'tis", "e\u0301", "\u00e9", "A\u030a", "\u00c5", "\u1100\u1161\u11a8", "\uac01",
    "q\u0307\u0323", "\u0301", " \u0301", "a \u0301", "\ufeffBOM", "zero\u200bwidth", "soft\u00adhyphen",
    "nb\u00a0sp", "\u00a0", "\u00a0\u00a0a", "a\u3000b", "\u3000\u3000x", "\u2028", "a\u2029b", "\u0085x",
    "\x1c\x1d\x1e\x1f", "\x01\x02\x03", "\x04", "\x06a", "a\x13b", "\x7f", "\x80\x9f", "\ufffd", "\ufffe", "\uffff",
    "\U0010ffff", "\ud7ff", "\ue000", "\U0001fffe", "\U000f0000", "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|><|im_start|>", "a<|endoftext|>b", " <|im_end|> ", "<|im_<|im_end|>end|>", "<|im_start|>1 2",
    "1<|im_end|>2", "  <|im_end|>  x", "\u0120", "\u010a", "\u0120the", "\u2581the", "\u0100\u0101", "\u0142",
    "\U000c0000", "\U00040000", "\U00080000\U000fffff", "\u06001", "\u0e33", "\u0dcf", "\u01c5", "\u02b0",
    "\u00aa\u00ba",
]


def _join(rng: random.Random, pools: list[list[str]], low: int, high: int) -> str:
    return "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(low, high)))


def _planes(rng: random.Random) -> str:
    spans = rng.sample(RANGES, rng.randint(1, 3))
    return "".join(chr(rng.randint(*rng.choice(spans))) for _ in range(rng.randint(1, 14)))


def _marks(rng: random.Random) -> str:
    marks = [(0x300, 0x36F), (0x483, 0x489), (0x591, 0x5BD), (0x64B, 0x65F), (0x93A, 0x94F), (0x1AB0, 0x1AC0),
             (0x20D0, 0x20F0), (0xFE20, 0xFE2F), (0x1D165, 0x1D169), (0xE0100, 0xE0110)]
    out = []
    for _ in range(rng.randint(1, 8)):
        out.append(rng.choice(["a", "e", "Z", "1", " ", "\n", ".", "\u0915", "\u05d0", "\u0627", "\u4e2d"]))
        out.extend(chr(rng.randint(*rng.choice(marks))) for _ in range(rng.randint(0, 4)))
    return "".join(out)


def _controls(rng: random.Random) -> str:
    return "".join(chr(rng.choice([rng.randint(1, 31), rng.randint(127, 159), rng.randint(32, 126)]))
                   for _ in range(rng.randint(1, 16)))


def _long_word(rng: random.Random) -> str:
    length = rng.choice([40, 100, 300, 700])
    pool = rng.choice(["a", "ab", "abcdefghijklmnopqrstuvwxyz", "\u0430\u0431\u0432\u0433", "\u4e00\u4e8c\u4e09",
                       "etaoinshrdlu", "AaBb", "\u0e01\u0e02", "=", "-_", "\u2500", "!?", "0123456789", "\U0001f600"])
    return rng.choice(["", " ", "x "]) + "".join(rng.choice(pool) for _ in range(length))


def _sentence(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(2, 12)):
        parts.append(rng.choice(WORDS))
        parts.append(rng.choice(CONTRACTIONS) if rng.random() < 0.2 else "")
        parts.append(rng.choice(PUNCTUATION) if rng.random() < 0.2 else "")
        parts.append(rng.choice([" ", " ", " ", " ", rng.choice(SPACES), ""]))
    return "".join(parts)


FAMILIES: dict[str, Callable[[random.Random], str]] = {
    "spaces": lambda rng: _join(rng, [SPACES, SPACES, WORDS, PUNCTUATION], 1, 12),
    "only spaces": lambda rng: _join(rng, [SPACES], 1, 20),
    "digits": lambda rng: _join(rng, [DIGITS, DIGITS, [" ", ".", ",", "-", "a", "  ", "\n"]], 1, 12),
    "contractions": lambda rng: _join(rng, [WORDS, CONTRACTIONS, [" ", ""]], 1, 9),
    "marks": _marks,
    "emoji": lambda rng: _join(rng, [EMOJI, EMOJI, [" ", "a", "\u200d", "\ufe0f", "!"]], 1, 8),
    "planes": _planes,
    "controls": _controls,
    "invisible": lambda rng: _join(rng, [INVISIBLE, WORDS, SPACES], 1, 9),
    "long word": _long_word,
    "lookalikes": lambda rng: _join(rng, [LOOKALIKES, SPECIALS, WORDS, SPACES], 1, 7),
    "code": lambda rng: _join(rng, [CODE, CODE, SPACES, PUNCTUATION], 1, 4),
    "sentence": _sentence,
    "mixture": lambda rng: _join(rng, [SPACES, INVISIBLE, CONTRACTIONS, SPECIALS, LOOKALIKES, DIGITS, EMOJI, WORDS,
                                       PUNCTUATION], 3, 20),
}


def nasty_strings(count: int = COUNT, seed: int = SEED) -> list[str]:
    """`count` different strings: the handwritten ones, two of 2,000 characters, then the families in turn."""
    rng = random.Random(seed)
    made = dict.fromkeys([*HANDWRITTEN, "a" * 2000, "ab cd " * 333])
    families = list(FAMILIES.values())
    turn = 0
    while len(made) < count:
        made[families[turn % len(families)](rng)] = None
        turn += 1
    return list(made)[:count]


def special_strings(count: int = 240, seed: int = SEED + 1) -> list[str]:
    """`count` different strings rich in special tokens, for tokenising with special tokens parsed."""
    rng = random.Random(seed)
    made = dict.fromkeys([*SPECIALS, *LOOKALIKES, *(text for text in HANDWRITTEN if "<|" in text), "", " "])
    while len(made) < count:
        made[_join(rng, [SPECIALS, SPECIALS, LOOKALIKES, WORDS, SPACES, DIGITS, CONTRACTIONS], 1, 9)] = None
    return list(made)[:count]
