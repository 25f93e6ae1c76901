"""Write m3jit/models/unicode_classes.py: the character classes that pre-tokenisers are made of.

Byte-pair tokenisers split text by Unicode general category. Regular-expression engines and Python releases carry
different Unicode versions, and a character assigned in one but not the other would be split differently, so the
classes are fixed here at one version. Which one is a matter of agreement with other programs: llama.cpp's tables are
Unicode 15.1.

Run:  pip install unicodedata2==15.1.0 && python tools/make_unicode_classes.py
Data: Unicode Character Database 15.1, Unicode licence v3.
"""

import sys
import textwrap
from pathlib import Path

UNICODE_VERSION = "15.1.0"
TARGET = Path(__file__).parent.parent / "m3jit" / "models" / "unicode_classes.py"
HEADER = '''"""Character classes of Unicode {version}, written by tools/make_unicode_classes.py; do not edit.

Each class is a list of code point ranges in hexadecimal, "first-last" or a single one.
Source: Unicode Character Database {version}, general categories (Unicode licence v3).
"""

UNICODE_VERSION = "{version}"
'''


def ranges(members: list[int]) -> str:
    """Sorted code points as "41-5A 61-7A AA"."""
    runs: list[list[int]] = []
    for point in members:
        if runs and runs[-1][1] == point - 1:
            runs[-1][1] = point
        else:
            runs.append([point, point])
    return " ".join(f"{first:X}" if first == last else f"{first:X}-{last:X}" for first, last in runs)


def main() -> None:
    import unicodedata2

    if unicodedata2.unidata_version != UNICODE_VERSION:
        sys.exit(f"unicodedata2 holds Unicode {unicodedata2.unidata_version}; install unicodedata2=={UNICODE_VERSION}")
    majors: dict[str, list[int]] = {}
    for point in range(0x110000):
        majors.setdefault(unicodedata2.category(chr(point))[0], []).append(point)
    parts = [HEADER.format(version=UNICODE_VERSION)]
    for name, major in (("LETTER", "L"), ("MARK", "M"), ("NUMBER", "N"), ("PUNCTUATION", "P"), ("SYMBOL", "S")):
        body = textwrap.fill(ranges(majors[major]), 116, break_on_hyphens=False)
        parts.append(f'{name} = """\n{body}\n"""\n')
    TARGET.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
