"""Models split over several GGUF files, and F64 tensors."""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from m3jit.models.gguf_file import GGUFFile
from m3jit.models.gguf_shards import open_gguf
from m3jit.models.model_error import ModelFileError
from m3jit.models.provider import SourceModel


def shard(path: Path, number: int, count: int, total: int, names: list[str], value: float = 0.0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if number == 0:
        writer.add_name("in parts")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    for i, name in enumerate(names):
        writer.add_tensor(name, np.full((2, 32), value + i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def three(folder: Path, total: int = 5, names: tuple = (["a", "b"], ["c"], ["d", "e"])) -> list[Path]:
    return [shard(folder / f"m-{i + 1:05}-of-00003.gguf", i, 3, total, list(n), 10.0 * i) for i, n in enumerate(names)]


@pytest.mark.parametrize("opened", range(3))
def test_any_file_opens_the_model(tmp_path, opened):
    paths = three(tmp_path)
    with open_gguf(paths[opened]) as model:
        assert list(model.tensors) == ["a", "b", "c", "d", "e"] and model.path == str(paths[0])
        assert model.value("general.name", str) == "in parts" and model.value("none", int, 3) == 3
        assert model.tensor_bytes("e").view("<f4").tolist() == [21.0] * 64
        assert model.tensor("c").shape == (2, 32) and model.size == sum(p.stat().st_size for p in paths)
        with pytest.raises(ModelFileError, match="in none of the 3 files"):
            model.tensor("f")
        assert model.content_hash == open_gguf(paths[0]).content_hash
    assert SourceModel(paths[opened]).tensor("d").data[1, 31] == 20.0


def test_one_file_is_one_file(tmp_path):
    assert isinstance(open_gguf(shard(tmp_path / "m.gguf", 0, 1, 1, ["a"])), GGUFFile)


def test_a_changed_file_changes_the_hash(tmp_path):
    def hashes() -> tuple[str, ...]:
        with open_gguf(tmp_path / "m-00001-of-00003.gguf") as model:
            return model.content_hash, model.full_hash(), model.metadata_hash("general.")
    three(tmp_path)
    before = hashes()
    shard(tmp_path / "m-00002-of-00003.gguf", 1, 3, 5, ["c"], 99.0)
    after = hashes()
    assert before[0] != after[0] and before[1] != after[1] and before[2] == after[2]


def test_a_missing_file_is_named(tmp_path):
    paths = three(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003.gguf: part 2 of 3 of the model is missing; expected it "
                                             r"beside .*m-00001-of-00003.gguf. Obtain all files"):
        open_gguf(paths[0])


def test_a_tensor_in_two_files(tmp_path):
    paths = three(tmp_path, 5, (["a", "b"], ["a"], ["d", "e"]))
    with pytest.raises(ModelFileError, match=r"m-00002.*tensor 'a': is also in .*m-00001-of-00003.gguf"):
        open_gguf(paths[2])


def test_a_wrong_count_of_tensors(tmp_path):
    with pytest.raises(ModelFileError, match=r"'split.tensors.count': is 6; expected 5, the tensors in the 3 files"):
        open_gguf(three(tmp_path, 6)[0])


def test_names_and_numbers_must_agree(tmp_path):
    paths = three(tmp_path)
    other = tmp_path / "renamed.gguf"
    other.write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelFileError, match=r"part 2 of 3 by its metadata, but not by its name; expected a name that "
                                             r"ends in -00002-of-00003.gguf"):
        open_gguf(other)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003.gguf: .*part 2 of 3 by its metadata; expected part 3"):
        open_gguf(paths[0])
    with pytest.raises(ModelFileError, match=r"split.no.*is 3 of 3; expected a number below split.count"):
        open_gguf(shard(tmp_path / "x-00004-of-00003.gguf", 3, 3, 1, ["a"]))
    with pytest.raises(ModelFileError, match=r"is 0 of 5000; expected .* at most 4096"):
        open_gguf(shard(tmp_path / "y-00001-of-05000.gguf", 0, 5000, 1, ["a"]))


def test_f64_tensors_are_read_as_f32(tmp_path):
    values = np.array([1 / 3, 1e-300, 1e300, 1 + 2.0 ** -24, -2.5])
    writer = gguf.GGUFWriter(tmp_path / "d.gguf", "llama")
    writer.add_tensor("w", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = SourceModel(tmp_path / "d.gguf").tensor("w")
    with np.errstate(over="ignore"):
        assert got.dtype.name == "F32" and got.data.tobytes() == values.astype(np.float32).tobytes()
