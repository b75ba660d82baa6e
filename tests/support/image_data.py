"""Small images of four classes: noise with a bright stripe at a position of the class."""

from pathlib import Path

import numpy as np

from metaseq_lm.data.images import Images, save_images

NAMES = ("a", "b", "c", "d")


def make(count: int, seed: int, size: int = 8) -> Images:
    """Return `count` images of each class."""
    rng = np.random.default_rng(seed)
    labels = np.arange(4 * count) % 4
    images = rng.integers(0, 160, (4 * count, size, size, 3))
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 2] += 90
    return Images(images.astype(np.uint8), labels, NAMES)


def write(folder: Path, size: int = 8) -> Path:
    """Write a data folder: 40 images of each class for training, 20 for testing."""
    save_images(folder, {"train": make(40, 1, size), "test": make(20, 2, size)}, NAMES)
    return folder
