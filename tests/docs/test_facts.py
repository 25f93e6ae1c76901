"""Numbers that the documents state are those of the code."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

from benchmarks import table as benchmark_table  # noqa: E402  (found through the path set above)
from m3jit.backends.cpu import cache  # noqa: E402
from m3jit.frontend import container, scopes, source_data  # noqa: E402
from m3jit.frontend.lexer import unquote  # noqa: E402
from m3jit.isa import control, escape, types  # noqa: E402
from m3jit.isa.capabilities import Capability  # noqa: E402
from m3jit.isa.fields import BANK_SIZES  # noqa: E402
from m3jit.isa.table import OPS, RESERVED, load_table  # noqa: E402
from m3jit.models import program  # noqa: E402
from m3jit.models.architectures import ARCHITECTURES, decoder  # noqa: E402
from m3jit.vm import memory, scheduler, snapshots, sources, streams, weights  # noqa: E402

load_table()
CODES = {r.code for r in OPS}


def text(name: str) -> str:
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def rows(name: str, heading: str) -> dict[str, str]:
    """First and second cell of the rows of the first table under a heading."""
    part = (DOCS / name).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    found = re.findall(r"(?m)^\| (.*?) \| (.*?) \|", part.partition("\n## ")[0])
    return dict(found)


LIMITS = {
    "dimensions of a tensor": (types.MAX_RANK,),
    "general, vector, state registers": (BANK_SIZES[0] - 1, BANK_SIZES[1], BANK_SIZES[2]),
    "depth of calls": (control.MAX_CALL_DEPTH,),
    "parameters of a function": (scopes.MAX_PARAMS,),
    "snapshots kept without a register": (snapshots.DEFAULT_WINDOW,),
    "items of a ring, unless the host says otherwise": (streams.DEFAULT_CAPACITY,),
    "items a queue of input keeps for rollbacks": (sources.DEFAULT_REACH,),
    "bytes of addressed memory a context writes": (memory.DEFAULT_LIMIT,),
    "bytes of one arena": (memory.ARENA_LIMIT,),
    "bytes of TEXT, of DATA, of a `.m3b` file": (container.MAX_TEXT, container.MAX_DATA, container.MAX_FILE),
    "bytes of one value in a source's `.data`": (source_data.MAX_BLOB,),
    "bytes of an ESCAPE instruction": (escape.MAX_ESCAPE,),
    "head dimension of a model": (decoder.MAX_HEAD_DIM,),
}


def test_the_guide_lists_these_limits():
    listed = {k: v for k, v in rows("guide.md", "Limits").items() if k != "limit"}
    assert set(listed) == set(LIMITS)
    for name, values in LIMITS.items():
        said = [2 ** int(n[2:]) if n.startswith("2^") else int(n) for n in listed[name].replace(",000", "000").replace(
            "1,024", "1024").split(", ")]
        assert tuple(said) == values, name


@pytest.mark.parametrize("document, sentence", [
    ("guide.md", f"{256 - len(RESERVED) - len({r.code for r in OPS if r.executable})} opcodes are in the "
     f"table without a"),
    ("guide.md", f"at most {cache._DEFAULT_MB} MB (`M3JIT_CACHE_MB`)"),
    ("guide.md", f"at most {weights.LIMIT_BYTES >> 30} GiB"),
    ("guide.md", f"in turns of {scheduler.QUANTUM:,}"),
    ("guide.md", f"A full ring ({streams.DEFAULT_CAPACITY} items)"),
    ("guide.md", f"the newest {sources.DEFAULT_REACH} items"),
    ("guide.md", f"beyond that the newest {snapshots.DEFAULT_WINDOW} are kept"),
    ("add-an-opcode.md", f"{len(CODES)} are taken and {len(RESERVED)} are reserved"),
    ("assembly.md", f"At most {control.MAX_CALL_DEPTH:,} calls are open at once"),
    ("assembly.md", f"Up to {scopes.MAX_PARAMS} registers are given to it"),
    ("assembly.md", ", ".join(f"{c.value.bit_length() - 1} {c.name}" for c in Capability).replace(
        "DUAL_MODE", "DUAL_MODE (64-byte frames)")),
    ("add-a-model.md", f"in chunks of rows ({program.CHUNK} here)"),
    ("determinism.md", f"a sweep of {round(2 ** 32 / 7919, -4):,.0f} arguments"),
])
def test_sentences(document, sentence):
    assert sentence in text(document)


def test_the_guide_names_every_architecture():
    listed = " ".join(rows("guide.md", "Models").values())
    assert set(re.findall(r"`(\w+)`", listed)) == set(ARCHITECTURES)


def test_the_regions_of_memory():
    for number, (name, _) in enumerate(zip(memory.NAMES, range(16))):
        row = next((v for k, v in rows("assembly.md", "Memory").items() if k == f"0x{number:X}"), None)
        others = "WAL, SNAPSHOT, STREAM_RING, CLUSTER_STAGING, FEDERATED, CONFIDENTIAL, SCRATCH_DEVICE, MMIO"
        assert name in (row or others)


def test_string_escapes():
    listed = re.search(r"Strings know `(.*?)`, `(.*?)` .*? and `(.*?)`", text("assembly.md"))
    assert listed and unquote('"' + listed[1].replace(" ", "") + '"') == "\n\t\r\0\\\""
    assert unquote(r'"\x41\u{1F600}"') == "A\U0001F600" and listed[2] == r"\xHH" and listed[3] == r"\u{HHHHHH}"


def test_the_targets_are_rows_of_the_benchmark():
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?m)\| `(\w+)` \|$", page)) == set(benchmark_table.ROWS)


def test_directives_are_all_described():
    from m3jit.frontend.directives import Directives
    words = Directives(None).known
    page = (DOCS / "assembly.md").read_text(encoding="utf-8")
    assert [w for w in words if w not in page] == []
