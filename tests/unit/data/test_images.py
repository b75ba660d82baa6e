"""Image folders: what is read is what was written; everything else is refused with its name."""

import image_data
import numpy as np
import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.images import FILE, Images, load_images, normalise_images, save_images
from metaseq_lm.data.storage.manifest import verify


def test_round_trip(tmp_path):
    written = image_data.make(5, 1)
    save_images(tmp_path, {"train": written}, written.names)
    found = load_images(tmp_path, "train")
    assert (found.images == written.images).all() and (found.labels == written.labels).all()
    assert found.names == written.names and found.labels.dtype == np.int64
    assert verify(tmp_path) == []


def test_normalised_has_the_given_mean_and_deviation():
    images = image_data.make(50, 1).images
    mean = (images / 255).mean((0, 1, 2))
    sd = (images / 255).std((0, 1, 2))
    found = normalise_images(images, mean, sd)
    assert found.shape == (200, 3, 8, 8) and found.dtype == np.float32
    assert np.allclose(found.mean((0, 2, 3)), 0, atol=1e-4)
    assert np.allclose(found.std((0, 2, 3)), 1, atol=1e-4)
    assert found[3, 2, 5, 6] == pytest.approx(
        (images[3, 5, 6, 2] / 255 - mean[2]) / sd[2], abs=1e-4
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"images": np.zeros((4, 8, 8, 3))}, "must be uint8"),
        ({"images": np.zeros((4, 8, 8), np.uint8)}, "must be uint8"),
        ({"images": np.zeros((4, 8, 8, 2), np.uint8)}, "1 or 3 channels"),
        ({"images": np.zeros((4, 0, 0, 3), np.uint8)}, "one pixel at least"),
        ({"labels": np.zeros(3, np.int64)}, "one whole number for each"),
        ({"labels": np.zeros(4)}, "one whole number for each"),
        ({"labels": np.array([0, 1, 2, 9])}, "labels from 0 to 9"),
        ({"labels": np.array([0, 1, -1, 1])}, "labels from -1 to 1"),
    ],
)
def test_wrong_arrays_are_refused_on_both_sides(change, words, tmp_path):
    parts = {"images": np.zeros((4, 8, 8, 3), np.uint8), "labels": np.arange(4)} | change
    wrong = Images(parts["images"], parts["labels"], image_data.NAMES)
    with pytest.raises(MetaseqError, match=words):
        save_images(tmp_path / "none", {"train": wrong}, image_data.NAMES)
    assert not (tmp_path / "none").exists()
    arrays = {f"train_{name}": value for name, value in parts.items()}
    np.savez(tmp_path / FILE, names=np.array(image_data.NAMES), **arrays)
    with pytest.raises(MetaseqError, match=f"images.npz: train.*{words}"):
        load_images(tmp_path, "train")


def test_damaged_files_are_refused(tmp_path):
    with pytest.raises(MetaseqError, match="no such file"):
        load_images(tmp_path, "train")
    image_data.write(tmp_path)
    with pytest.raises(MetaseqError, match="'dev'.*test, train"):
        load_images(tmp_path, "dev")
    whole = (tmp_path / FILE).read_bytes()
    central = whole.index(b"PK\x01\x02")
    # Bytes of zipfile's own errors: one says that a member is encrypted, one how it is packed.
    locked = whole[: central + 8] + b"\1" + whole[central + 9 :]
    packed = whole[: central + 10] + b"\7" + whole[central + 11 :]
    for damaged in (whole[: len(whole) // 2], b"", b"PK\x03\x04" + b"x" * 99, locked, packed):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(MetaseqError, match="damaged"):
            load_images(tmp_path, "train")


def test_one_array_and_one_name_are_refused(tmp_path):
    with open(tmp_path / FILE, "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(MetaseqError, match="images.npz: damaged"):
        load_images(tmp_path, "train")
    arrays = {"train_images": np.zeros((1, 8, 8, 3), np.uint8), "train_labels": np.zeros(1, int)}
    np.savez(tmp_path / FILE, names=np.array("a"), **arrays)
    with pytest.raises(MetaseqError, match="images.npz: damaged"):
        load_images(tmp_path, "train")


def test_objects_are_not_unpickled(tmp_path):
    """An npz can hold pickled objects; they are refused, not loaded."""
    evil = np.array([{"a": 1}], dtype=object)
    np.savez(
        tmp_path / FILE, names=np.array(["a"]), train_images=evil, train_labels=np.zeros(1, int)
    )
    with pytest.raises(MetaseqError, match="damaged.*pickle"):
        load_images(tmp_path, "train")
