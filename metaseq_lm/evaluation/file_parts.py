"""Parts of the files of a suite: the first items, for example for choosing, and later ones."""


def is_apart(one: object, other: object) -> bool:
    """Return whether two suites with these options share no item of the same files.

    They have different splits, or `other` begins where `one` ends, or later.
    """
    splits = [getattr(config, "split", None) for config in (one, other)]
    return splits[0] != splits[1] or 0 < getattr(one, "first", 0) <= getattr(other, "skip", 0)
