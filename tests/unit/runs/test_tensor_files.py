"""Files of tensors: only the rows asked for are read, and missing ones are noticed."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.runs.tensor_files import encode, stored_tensors

TENSOR = torch.arange(21, dtype=torch.bfloat16).view(7, 3)


def write(file: Path, tensors: dict[str, torch.Tensor], first_rows: dict | None = None) -> Path:
    file.write_bytes(b"".join(map(bytes, encode(tensors, first_rows))))
    return file


def parts(folder: Path, *ranges: tuple[int, int]) -> list[Path]:
    """Write some rows of TENSOR to a file each."""
    return [
        write(folder / f"{number}.safetensors", {"a": TENSOR[start:stop]}, {"a": start})
        for number, (start, stop) in enumerate(ranges)
    ]


def test_rows_of_files_in_any_order(tmp_path: Path) -> None:
    stored = stored_tensors(parts(tmp_path, (5, 7), (0, 2), (2, 5)))["a"]
    assert stored.shape == (7, 3) and stored.dtype == torch.bfloat16
    assert torch.equal(stored.read(), TENSOR)
    for start in range(8):
        for stop in range(9):
            rows = stored[start:stop]
            assert rows.shape == TENSOR[start:stop].shape
            assert torch.equal(rows.read(), TENSOR[start:stop])
            assert sum(length for *_, length in rows.ranges) == 2 * rows.shape.numel()
    assert torch.equal(stored[3:][:2].read(), TENSOR[3:5])


@pytest.mark.parametrize(
    "ranges", [[(0, 2), (3, 7)], [(1, 7)], [(0, 4), (3, 7)], [(0, 7), (0, 7)]], ids=str
)
def test_rows_that_are_missing_or_there_twice(ranges: list, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows of a"):
        stored_tensors(parts(tmp_path, *ranges))


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    stored = stored_tensors(parts(tmp_path, (0, 7)))["a"]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-2])
    assert torch.equal(stored[:6].read(), TENSOR[:6])
    with pytest.raises(CheckpointError, match="was changed"):
        stored.read()


def test_the_library_reads_and_writes_the_same(tmp_path: Path) -> None:
    """Of every type, numbers, empty tensors, and names beyond ASCII."""
    kinds = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64]
    tensors = {f"{kind} ü": torch.ones(3, 5).to(kind) for kind in kinds}
    tensors |= {"number": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    file = write(tmp_path / "x.safetensors", tensors)
    weights = safetensors.torch.load_file(file)
    assert weights.keys() == tensors.keys()
    assert all(
        torch.equal(weights[n], t) and weights[n].dtype == t.dtype for n, t in tensors.items()
    )
    safetensors.torch.save_file(tensors, file)
    stored = stored_tensors([file])
    assert all(torch.equal(stored[name].read(), tensor) for name, tensor in tensors.items())
