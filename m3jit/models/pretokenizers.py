"""Pre-tokenisers: how byte-pair models cut text into words before merging, by the name in `tokenizer.ggml.pre`.

A pre-tokeniser is a list of patterns. Each one cuts every piece left by the one before into its matches and the gaps
between them; look-ahead ends at the piece. Merging then happens inside pieces only.
Patterns spell their character classes out (`unicode_classes`), so the result depends on no library's Unicode version.
"""

import re
from dataclasses import dataclass

from m3jit.models import unicode_classes

_WHITE_SPACE = "9-D 20 85 A0 1680 2000-200A 2028-2029 202F 205F 3000"  # Unicode property White_Space


def _members(ranges: str) -> str:
    """Code point ranges as the inside of a bracket expression."""
    return "".join("-".join(f"\\x{{{point}}}" for point in part.split("-")) for part in ranges.split())


_CLASSES = {"L": _members(unicode_classes.LETTER), "N": _members(unicode_classes.NUMBER),
            "P": _members(unicode_classes.PUNCTUATION), "S": _members(_WHITE_SPACE)}


def _expand(pattern: str) -> str:
    """Replace `<L>`, `<N>`, `<P>`, `<S>` (letters, numbers, punctuation, white space; inside brackets) by ranges."""
    return re.sub("<([LNPS])>", lambda found: _CLASSES[found[1]], pattern)


# Contractions, letters, numbers and the rest each with an optional leading space, white space. A run of white space
# leaves its last character to the word that follows.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[<L>]+| ?[<N>]+| ?[^<S><L><N>]+|[<S>]+(?![^<S>])|[<S>]+"
_LLAMA3 = (r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n<L><N>]?[<L>]+|[<N>]{1,3}"
           r"| ?[^<S><L><N>]+[\r\n]*|[<S>]*[\r\n]+|[<S>]+(?![^<S>])|[<S>]+")
_QWEN2 = _LLAMA3.replace("[<N>]{1,3}", "[<N>]")
_DEFAULT = (r"[<P>$+<=>^~|]+", _GPT2, "[<N>]+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` in order of use; `whole_words`: a piece that is itself a token is taken as that token without
    merging; `add_bos`: the default when the file has no `tokenizer.ggml.add_bos_token`."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False

    def expanded(self) -> tuple[str, ...]:
        """The patterns as regular expressions (Oniguruma syntax) free of named classes."""
        return tuple(_expand(pattern) for pattern in self.patterns)


_DIGITS_APART = PreTokenizer(("[<N>]", _GPT2))
_FAMILIES: dict[PreTokenizer, str] = {
    PreTokenizer(_DEFAULT): "default",
    PreTokenizer((_GPT2,)): "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
                            "mpt olmo jais exaone4 trillion granite-docling",
    _DIGITS_APART: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral "
                                                              "midm-2.0 lfm2 jina-v5-nano",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open",
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for kind, names in _FAMILIES.items() for name in names.split()}
