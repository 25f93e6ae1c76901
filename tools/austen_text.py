"""The training text of the default model: the six novels of Jane Austen, from Debian's ``r-cran-janeaustenr``.

The novels were published between 1811 and 1817 and are in the public domain; the Debian package that carries them
(upstream: https://cran.r-project.org/package=janeaustenr, by Julia Silge) is under the MIT licence.

``load(cache)`` downloads the package once with ``apt-get download``, checks the sha256 of its data file, and
returns the novels as lists of paragraphs. R keeps them in a *lazy-load database*: ``Rdata.rdx`` is an index and
``Rdata.rdb`` a sequence of records, each a big-endian uint32 (length once inflated) and a zlib stream holding one R
object in R's XDR serialisation (R Internals, section 1.8). Only character vectors are decoded here; every other
record is skipped.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
RDB_SHA256 = "8fb5198960d0da724b1562f96e4221e5c1b41ff455000280b02c55980c3d8f21"
RDB_PATH = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
SOURCE = "https://cran.r-project.org/package=janeaustenr"
LICENSE = "text: public domain (Jane Austen, 1811-1817); weights: Apache-2.0"
TITLES = ("SENSE AND SENSIBILITY", "PRIDE AND PREJUDICE", "MANSFIELD PARK", "EMMA", "NORTHANGER ABBEY", "PERSUASION")

_R_CHARSXP, _R_STRSXP, _R_XDR_HEADER = 9, 16, b"X\n"
_EDITORIAL = "A NOTE ON THE TEXT"  # a modern editor's note at the end of Northanger Abbey: not Austen, so left out
_CHAPTER = re.compile(r"^(VOLUME|CHAPTER|Chapter) ([IVXL]+|\d+)\.?$")


@dataclass(frozen=True)
class Novel:
    """``title`` in capitals; ``chapters``: each a list of paragraphs, a paragraph being one line of plain text."""

    title: str
    chapters: list[list[str]]


def load(cache: Path) -> list[Novel]:
    """Return the six novels in order of publication; ``cache`` keeps the downloaded package between runs."""
    rdb = cache / "Rdata.rdb"
    if not rdb.exists():
        rdb.write_bytes(_download(cache))
    data = rdb.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != RDB_SHA256:
        raise SystemExit(f"{rdb}: sha256 is {digest}, expected {RDB_SHA256}: another version of {PACKAGE}; the "
                         f"published figures hold for version 1.0.0 only (delete the file to download it again)")
    novels = [_novel(lines) for lines in character_vectors(data)]
    return sorted(novels, key=lambda novel: TITLES.index(novel.title))


def _download(cache: Path) -> bytes:
    cache.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", PACKAGE], cwd=cache, check=True, timeout=300)
    debs = sorted(cache.glob(f"{PACKAGE}_*.deb"))
    if not debs:
        raise SystemExit(f"apt-get download {PACKAGE} left no package in {cache}; run apt-get update and try again")
    subprocess.run(["dpkg-deb", "-x", debs[-1].name, "package"], cwd=cache, check=True, timeout=60)
    return (cache / "package" / RDB_PATH).read_bytes()


def character_vectors(rdb: bytes) -> list[list[str]]:
    """Decode every character vector of an R lazy-load database, in file order; a missing string (NA) is ''."""
    vectors, at = [], 0
    while at < len(rdb):
        (size,) = struct.unpack_from(">I", rdb, at)
        inflate = zlib.decompressobj()
        record = inflate.decompress(rdb[at + 4:])
        if len(record) != size:
            raise SystemExit(f"Rdata.rdb: the record at byte {at} inflates to {len(record)} bytes, expected {size}")
        at = len(rdb) - len(inflate.unused_data)
        vector = _character_vector(record)
        if vector is not None:
            vectors.append(vector)
    return vectors


def _character_vector(record: bytes) -> list[str] | None:
    """One serialised R object → its strings, or None where it is not a character vector."""
    if record[:2] != _R_XDR_HEADER:
        return None
    (version,) = struct.unpack_from(">i", record, 2)
    at = 14  # format, then three int32: version, R that wrote it, oldest R that reads it
    if version >= 3:  # version 3 adds the name of the native encoding
        at += 4 + struct.unpack_from(">i", record, at)[0]
    flags, count = struct.unpack_from(">ii", record, at)
    if flags & 0xFF != _R_STRSXP:
        return None
    at += 8
    strings = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", record, at)
        if flags & 0xFF != _R_CHARSXP:
            raise SystemExit(f"Rdata.rdb: expected a string at byte {at} of a record, found R type {flags & 0xFF}")
        at += 8
        strings.append(record[at:at + length].decode("utf-8") if length >= 0 else "")
        at += max(length, 0)
    return strings


def _novel(lines: list[str]) -> Novel:
    """Join the wrapped lines of each paragraph and cut the novel at its chapter headings.

    Underscores (italics) go, and runs of spaces become one: they are typography, not words. What stands before the
    first heading (title, author) is dropped except for the title itself.
    """
    title = next(line.strip() for line in lines if line.strip())
    chapters: list[list[str]] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        text = " ".join(paragraph.replace("_", "").split())
        if not text:
            continue
        if text == _EDITORIAL:
            break
        if _CHAPTER.match(text):
            if text.upper().startswith("VOLUME"):
                continue
            chapters.append([text.upper().rstrip(".")])
        elif chapters:
            chapters[-1].append(text)
    return Novel(title.upper(), chapters)


def split(novels: list[Novel], held_out: float = 0.05) -> tuple[list[str], list[str]]:
    """(training, held-out) chapters as text, one paragraph a line: of each novel, its last chapters are held out.

    Whole chapters are taken from the end until ``held_out`` of the novel's bytes is reached, so no held-out sentence
    stands between two training sentences.
    """
    train: list[str] = []
    test: list[str] = []
    for novel in novels:
        texts = ["\n".join(chapter) + "\n" for chapter in novel.chapters]
        total, taken, cut = sum(map(len, texts)), 0, len(texts)
        while taken < held_out * total:
            cut -= 1
            taken += len(texts[cut])
        train += texts[:cut]
        test += texts[cut:]
    return train, test
