"""docs/: commands give the output that stands under them, programs assemble, links lead somewhere."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_docs  # noqa: E402  (found through the path set above)

DOCUMENTS = [p for p in check_docs.documents() if p != ROOT / "README.md"]
PAGES = [p for p in DOCUMENTS if p.parent.name != "reference"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", PAGES, ids=name)
def test_commands_and_programs(document):
    problems = check_docs.check_programs(document) + check_docs.check_commands(document)
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.slow
@pytest.mark.parametrize("document", [p for p in PAGES if "console slow" in p.read_text()], ids=name)
def test_slow_commands(document):
    """These download a model or take minutes."""
    problems = check_docs.check_commands(document, slow=True)
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links(document):
    assert check_docs.check_links(document) == []


def test_every_document_is_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md", ROOT / "docs/README.md"]
    while todo:
        path = todo.pop()
        if path in reached or not path.exists():
            continue
        reached.add(path)
        for _, line in check_docs.outside_fences(path.read_text()):
            todo += [(path.parent / target.partition("#")[0]).resolve() for target in check_docs.links(line)
                     if target.partition("#")[0].endswith(".md")]
    assert set(DOCUMENTS) <= reached


def test_documents_stand_alone():
    """Nothing points to a place on one machine."""
    for path in DOCUMENTS:
        text = path.read_text()
        found = re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|usr/local)/", text)
        assert not found, f"{path} names a place on one machine"


PATH = re.compile(r"`((?:m3jit|kernels|tests|tools|benchmarks|examples|docs)/[\w./*-]*)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_files_exist(document):
    for path in PATH.findall(document.read_text()):
        assert list(ROOT.glob(path.rstrip("/"))), path


# -- the checker itself: it must be able to fail ----------------------------------------------------------------------

def test_changed_output_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(check_docs, "ROOT", ROOT)
    page = ROOT / "docs" / f".check-{tmp_path.name}.md"
    page.write_text("```console\n$ echo one; echo two\none\nthree\n$ echo a b c\na ... c\n$ false; echo $?\n1\n"
                    "$ printf '1\\n2\\n3\\n'\n1\n...\n```\n")
    try:
        problems = check_docs.check_commands(page)
        assert [p.line for p in problems] == [2] and "two" in problems[0].message
        check_docs.check_commands(page, write=True)
        assert check_docs.check_commands(page) == [] and "two" in page.read_text()
    finally:
        page.unlink()


@pytest.mark.parametrize("expected, found, same", [
    ("a\n...\nz", "a\nb\nc\nz", True), ("a\n...\nz", "a\nz", True), ("a\n...\nz", "a\nb", False),
    ("took ... ms", "took 3.5 ms", True), ("took ... ms", "took 3.5 s", False), ("a", "a\nb", False), ("", "", True)])
def test_ellipses(expected, found, same):
    def lines(text):
        return text.split("\n") if text else []
    assert check_docs.matches(lines(expected), lines(found)) is same


def test_wrong_programs_and_links_are_noticed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](gone.md) [b](#here) [c](#there) [d](page.md#here) `[e](code.md)`\n"
                    "```m3asm\nADDD rX\n```\n```m3asm wrong\nADD rX, rX, rX\n```\n```m3asm f.m3asm\n  HALT\n```\n")
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    assert [p.message for p in check_docs.check_links(page)] == ["gone.md leads nowhere",
                                                                 "page.md has no heading for #there"]
    messages = [p.message for p in check_docs.check_programs(page)]
    assert len(messages) == 3 and "ADDD" in messages[0] and "should not" in messages[1] and "layout" in messages[2]
