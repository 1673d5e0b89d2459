import os

import pytest
import torch

from dino_vit.core.storage import StorageError, read_tensors, replacing, write_bytes, write_tensors
from tests.support.runs import limit_files, server

TENSORS = {
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "one without stride": torch.tensor(2.0).expand(1),
    "without stride": torch.zeros(0).as_strided((0,), (0,)),  # as some empty arrays of NumPy
    "half": torch.randn(3, 5).bfloat16(),
    "strided": torch.randn(4, 6).t(),
    "whole": torch.arange(7),
}


def test_what_was_written_is_read_bit_for_bit(tmp_path):
    path = tmp_path / "deep" / "file.safetensors"
    write_tensors(path, TENSORS, "a test")
    tensors, metadata = read_tensors(path)
    assert metadata == {"dino_vit": "a test"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    assert os.listdir(path.parent) == ["file.safetensors"], "no partial file is left"


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"a": torch.arange(8.0)}, "step 100")
    whole = path.read_bytes()
    for position in range(8, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(StorageError):
            read_tensors(path)


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, length):
    path = tmp_path / "file.safetensors"
    write_tensors(path, TENSORS, "")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StorageError, match=r"file\.safetensors"):
        read_tensors(path)


def write_on_a_full_disk(path):
    limit_files(10_000)
    with pytest.raises(StorageError, match="could not be written and was left as it was"):
        write_tensors(path, {"a": torch.zeros(100_000)}, "new")


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"a": torch.ones(4)}, "old")
    process = server.Process(target=write_on_a_full_disk, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(read_tensors(path)[0]["a"], torch.ones(4))
    assert os.listdir(tmp_path) == ["file.safetensors"]


def test_bytes_are_written_whole_or_not_at_all(tmp_path):
    write_bytes(tmp_path / "new" / "a.json", b"first")
    write_bytes(tmp_path / "new" / "a.json", b"second")
    assert (tmp_path / "new" / "a.json").read_bytes() == b"second"

    def write_half(path):
        with replacing(path) as partial:
            partial.write_bytes(b"half")
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        write_half(tmp_path / "new" / "a.json")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    with pytest.raises(StorageError, match="could not be written and was left as it was"):
        write_bytes(tmp_path / "new", b"in place of a folder")
