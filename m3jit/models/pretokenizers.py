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


# Letters with upper and lower case, as DeepSeek's tokenisers list them.
_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
_CLASSES = {"L": unicode_classes.LETTER, "M": unicode_classes.MARK, "N": unicode_classes.NUMBER,
            "P": unicode_classes.PUNCTUATION, "Y": unicode_classes.SYMBOL, "S": _WHITE_SPACE, "C": _CASED}


def _expand(pattern: str) -> str:
    """Replace `<L>`, `<M>`, `<N>`, `<P>`, `<Y>`, `<S>` (letters, marks, numbers, punctuation, symbols, white space) and
    `<C>` (cased letters), all inside brackets, by ranges of code points."""
    return re.sub("<([LMNPYSC])>", lambda found: _members(_CLASSES[found[1]]), pattern)


# Contractions, letters, numbers and the rest each with an optional leading space, white space. A run of white space
# leaves its last character to the word that follows.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[<L>]+| ?[<N>]+| ?[^<S><L><N>]+|[<S>]+(?![^<S>])|[<S>]+"
_LLAMA3 = (r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n<L><N>]?[<L>]+|[<N>]{1,3}"
           r"| ?[^<S><L><N>]+[\r\n]*|[<S>]*[\r\n]+|[<S>]+(?![^<S>])|[<S>]+")
_QWEN2 = _LLAMA3.replace("[<N>]{1,3}", "[<N>]")
_QWEN35 = _QWEN2.replace("?[<L>]+", "?[<L><M>]+").replace("[^<S><L><N>]+", "[^<S><L><M><N>]+")
_SEED = _QWEN2.replace(r"[^<S><L><N>]+[\r\n]*", r"[^<S><L><N>\r\n]+")
_EXAONE_MOE = _QWEN2.replace("[<L>]+", "(?:[<L>][<M>]*(?: [<L>][<M>]*)*)+").replace(r"+[\r\n]*", r"+[\r\n/]?")
_SPACE_RUNS = "|".join(f"[<S>]{{{1 << n}}}(?![^<S>])" for n in range(9, 1, -1))
_JAIS2 = _LLAMA3.replace("[<S>]+(?![^<S>])|[<S>]+", _SPACE_RUNS + "|[<S>]{1,2}(?![^<S>])|[<S>]")
_DEFAULT = (r"[<P>$+<=>^~|]+", _GPT2, "[<N>]+", "[0-9][0-9][0-9]")
_FALCON = (r"[<P>$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = " ?[^(<S>|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# A word starts with capitals or ends with small letters; of letters outside ASCII either may stand in both places.
_CAPITAL, _SMALL = "[<L>&&[^a-z]]", "[<L>&&[^A-Z]]"
_CAPITAL_MARKED, _SMALL_MARKED = "[<L><M>&&[^a-z]]", "[<L><M>&&[^A-Z]]"
_OWN = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"


def _by_case(contraction: str, digits: str, capital: str = _CAPITAL, small: str = _SMALL) -> str:
    return "|".join((rf"[^\r\n<L><N>]?{capital}*{small}+{contraction}",
                     rf"[^\r\n<L><N>]?{capital}+{small}*{contraction}",
                     digits, r" ?[^<S><L><N>]+[\r\n/]*|[<S>]*[\r\n]+|[<S>]+(?![^<S>])|[<S>]+"))


# White space counts as such inside the ranges of ideographs too.
_IDEOGRAPHS = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^<S>]]+"
_DEEPSEEK = (r"[\r\n]", "[<S>]?[<C>]+",
             r"[<S>]?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]+",
             r"[<S>]+\z", _IDEOGRAPHS, "[<N>]+")
_DEEPSEEK_CODER = (r"[\r\n]", "[<S>]?[<L>]+", "[<S>]?[<P>]+", _IDEOGRAPHS, "[<N>]")
_DEEPSEEK3 = ("[<N>]{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
              r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n<L><P><Y>]?[<L><M>]+"
              r"| ?[<P><Y>]+[\r\n]*|[<S>]*[\r\n]+|[<S>]+(?![^<S>])|[<S>]+")


_SPARK = (*_DEEPSEEK3[:2], _DEEPSEEK3[2].replace(r"[<P><Y>]+[\r\n]*|[<S>]*[\r\n]+", r"[<P><Y>]+|[\r\n]"), "[<N>]")
_UFAKZEKA = _QWEN2[_QWEN2.index(r"[^\r\n<L>"):]          # Turkish suffixes stand behind apostrophes, too
_LINES = r"[^\n]+|[\n]+"


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
                            "mpt olmo jais exaone4 trillion granite-docling jina-v1-en jina-v2-code "
                            "roberta-bpe",
    _DIGITS_APART: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral "
                                                              "midm-2.0 lfm2 jina-v5-nano",
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((_LLAMA3,), whole_words=True): "glm4 glm5",
    PreTokenizer((_JAIS2,)): "jais-2",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
                             "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer((_SEED,)): "seed-coder",
    PreTokenizer((_EXAONE_MOE,)): "exaone-moe",
    PreTokenizer(("[<N>]{1,3}", _LLAMA3.replace("[<N>]{1,3}", "[<N>]+")), whole_words=True): "minicpm5",
    PreTokenizer((_LINES, _QWEN2)): "laguna",
    PreTokenizer((_UFAKZEKA,)): "ufakzeka",
    PreTokenizer(_SPARK): "spark2_5",
    PreTokenizer(_FALCON): "falcon",
    PreTokenizer((_by_case(_OWN, "[<N>]{1,3}"),)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer((_by_case(_OWN, "[<N>]{1,3}", _CAPITAL_MARKED, _SMALL_MARKED),), whole_words=True):
        "granite-embed-multi-97m",
    PreTokenizer((_by_case("", "[<N>]"),), whole_words=True, add_bos=True): "tekken",
    PreTokenizer(_DEEPSEEK): "deepseek-llm",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizer(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((_BLOOM, "[<N>]")): "viking",
}
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for kind, names in _FAMILIES.items() for name in names.split()}
