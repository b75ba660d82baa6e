"""Make a data folder of images for task tartan_vision.

  python examples/tartan/images.py DATA --train FOLDER --test FOLDER [--size 32]
  python examples/tartan/images.py DATA --train train.npz --test test.npz --names cat,dog,...

A FOLDER holds one folder of PNG or JPEG files for each class; a .npz holds `x`, uint8 (N, H, W, C),
and `y`, whole numbers (N,), and --names gives the classes in the order of these numbers.
"""

import argparse
import shlex
import sys
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.images import Images, save_images

SUFFIXES = (".png", ".jpg", ".jpeg")


def read_folder(folder: Path, size: int) -> Images:
    """Read a folder of class folders, in the order of the names; all images get the same size."""
    from PIL import Image, UnidentifiedImageError

    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    images, labels = [], []
    for label, place in enumerate(classes):
        for path in sorted(p for p in place.iterdir() if p.suffix.lower() in SUFFIXES):
            try:
                with Image.open(path) as file:
                    image = file.convert("RGB")
            except (OSError, UnidentifiedImageError) as error:
                raise MetaseqError(f"{path}: not readable as an image: {error}") from error
            if image.size != (size, size):
                image = image.resize((size, size))
            images.append(np.asarray(image, np.uint8))
            labels.append(label)
    if not images:
        raise MetaseqError(f"{folder}: no class folders with {', '.join(SUFFIXES)} files")
    return Images(np.stack(images), np.array(labels), tuple(p.name for p in classes))


def read_npz(path: Path, names: tuple[str, ...]) -> Images:
    """Read `x` and `y` of an npz file."""
    if not names:
        raise UsageError(f"{path}: say with --names which classes its numbers stand for")
    try:
        with np.load(path, allow_pickle=False) as file:
            return Images(file["x"], file["y"], names)
    except Exception as error:  # whatever numpy and zipfile raise for a file that is not theirs
        raise MetaseqError(f"{path}: no npz file with x and y: {error}") from error


def read(path: Path, size: int, names: tuple[str, ...]) -> Images:
    """Read one split of either kind."""
    if not path.exists():
        raise MetaseqError(f"{path}: there is no such file or folder")
    return read_folder(path, size) if path.is_dir() else read_npz(path, names)


def main() -> int:
    """Write the data folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA", help="data folder to make")
    parser.add_argument("--train", type=Path, required=True, metavar="PATH")
    parser.add_argument("--test", type=Path, required=True, metavar="PATH")
    parser.add_argument("--names", default="", metavar="A,B,...", help="classes of npz files")
    parser.add_argument("--size", type=int, default=32, help="pixels (default: %(default)s)")
    args = parser.parse_args()
    names = tuple(name.strip() for name in args.names.split(",") if name.strip())
    try:
        splits = {s: read(getattr(args, s), args.size, names) for s in ("train", "test")}
        if splits["train"].names != splits["test"].names:
            raise MetaseqError("the class folders of --train and --test have not the same names")
        save_images(args.data, splits, splits["train"].names, shlex.join(sys.argv))
    except MetaseqError as error:
        print(f"images.py: {error}", file=sys.stderr)
        return error.exit_code
    for split, part in splits.items():
        counts = np.bincount(part.labels, minlength=len(part.names))
        print(f"{split}: " + ", ".join(f"{n} {c}" for n, c in zip(part.names, counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
