"""Labelled images in an npz file: `SPLIT_images` (N, H, W, C), `SPLIT_labels` (N,), `names`.

A data folder of images holds it as `images.npz`, and `manifest.json` of the kind "images".
Shapes: N images, H height, W width, C channels (1 or 3), K classes.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metaseq_lm.core.batch import ImageBatch, as_tensor
from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.storage.manifest import FILE_NAME, Manifest

IMAGES = "images"
FILE = "images.npz"


@dataclass(frozen=True)
class Images:
    """Images uint8 (N, H, W, C) and their labels int64 (N,), indices into `names`.

    Scorers of labelled sets need the other members.
    """

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    regression = False
    multi_label = False
    benchmark = None
    rows = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: np.ndarray) -> "Images":
        """Return the images with these numbers."""
        return Images(self.images[chosen], self.labels[chosen], self.names)

    def check(self, source: object) -> None:
        """Raise MetaseqError, beginning with `source`, if types, shapes or labels are wrong."""
        images, labels = self.images, self.labels
        shape = images.shape
        if images.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape[1:]:
            raise MetaseqError(
                f"{source}: images of type {images.dtype} and shape {shape}; they must be uint8 "
                "(N, H, W, C) with 1 or 3 channels and one pixel at least"
            )
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or not len(labels):
            raise MetaseqError(
                f"{source}: {len(images)} images and labels of type {labels.dtype} and shape "
                f"{labels.shape}; there must be one whole number for each image, and one image at "
                "least"
            )
        if not 0 <= labels.min() <= labels.max() < len(self.names):
            raise MetaseqError(
                f"{source}: labels from {labels.min()} to {labels.max()}, but there are "
                f"{len(self.names)} names of classes"
            )

    @property
    def label_names(self) -> list[str]:
        """The names of the classes."""
        return list(self.names)

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of the images for a stream: each counts as one token."""
        return np.ones(len(self), np.int64)

    def batch(
        self,
        mean: Sequence[float],
        sd: Sequence[float],
        samples: np.ndarray,
        keys: np.ndarray,
        width: int,
    ) -> ImageBatch:
        """Return images (B, C, H, W), normalised, and targets (B,); the size is "rows"."""
        return ImageBatch(
            images=as_tensor(normalise_images(self.images[samples], mean, sd)),
            targets=self.labels[samples],
            samples=samples,
            sizes={"rows": len(samples)},
        )


def load_images(folder: str | Path, split: str) -> Images:
    """Read a split of a data folder of images; MetaseqError if it is missing or damaged."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise MissingError(f"{path}: no such file; make it with examples/tartan/images.py")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = sorted(n.removesuffix("_images") for n in file if n.endswith("_images"))
            if split not in names:
                raise MetaseqError(
                    f"{path}: no split '{split}'; there are {', '.join(names) or 'none'}"
                )
            images, labels = file[f"{split}_images"], file[f"{split}_labels"]
            classes = tuple(str(name) for name in file["names"])
    except MetaseqError:
        raise
    except Exception as error:  # whatever numpy and zipfile raise for a file that is not theirs
        raise MetaseqError(f"{path}: damaged, or not such a file: {error}") from error
    Images(images, labels, classes).check(f"{path}: {split}")
    return Images(images, labels.astype(np.int64), classes)


def save_images(
    folder: str | Path, splits: Mapping[str, Images], names: Sequence[str], command: str = ""
) -> None:
    """Write a data folder of images with its manifest; MetaseqError if a split is not sound."""
    folder = Path(folder)
    arrays: dict[str, np.ndarray] = {"names": np.array(list(names), dtype=np.str_)}
    for split, part in splits.items():
        if not FILE_NAME.fullmatch(split):
            raise MetaseqError(f"split {split!r}: a name of letters, digits, '_', '-' and '.'")
        part.check(split)
        arrays |= {f"{split}_images": part.images, f"{split}_labels": part.labels}
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE, content.getvalue())
    sizes = {split: {"rows": len(part)} for split, part in splits.items()}
    about = {"name": "none", "hash": "", "size": 0}
    manifest = Manifest(IMAGES, about, sizes, command, {"labels": list(names)})
    manifest.add_files(folder, [FILE])
    manifest.save(folder)


def require_channels(images: Images, options: Mapping[str, int]) -> None:
    """Raise UsageError unless each of `options`, name to channels, agrees with the images."""
    channels = images.images.shape[3]
    for name, expected in options.items():
        if expected != channels:
            raise UsageError(f"{name} is for {expected} channel(s), but the images have {channels}")


def require_scale(images: Images, mean: Sequence[float], sd: Sequence[float]) -> None:
    """Raise UsageError unless there are a mean and an sd for each channel of the images."""
    require_channels(images, {"task.mean": len(mean), "task.sd": len(sd)})


def normalise_images(images: np.ndarray, mean: Sequence[float], sd: Sequence[float]) -> np.ndarray:
    """Return images uint8 (B, H, W, C) as float32 (B, C, H, W), (x / 255 - mean) / sd by channel.

    The channels stay last in memory: convolutions and norms are faster and keep that order.
    """
    scaled = images.astype(np.float32) / 255 - np.asarray(mean, np.float32)
    scaled /= np.asarray(sd, np.float32)
    return scaled.transpose(0, 3, 1, 2)


def shift_images(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Return images (B, H, W, C), each moved by its shifts (B, 2) in pixels.

    Row 0 of the shifts is down, row 1 to the right, both at most H - 1 or W - 1 either way; pixels
    that come in at an edge are the image reflected there.
    """
    count, height, width, _ = images.shape
    down = _reflected(np.arange(height) - shifts[:, :1], height)  # (B, H)
    right = _reflected(np.arange(width) - shifts[:, 1:], width)
    image = np.arange(count)[:, None, None]
    return np.asarray(images[image, down[:, :, None], right[:, None, :]])


def _reflected(places: np.ndarray, size: int) -> np.ndarray:
    """Return places that lie outside 0 to size - 1 mirrored at the first or the last one."""
    places = np.abs(places)
    return np.where(places >= size, 2 * (size - 1) - places, places)
