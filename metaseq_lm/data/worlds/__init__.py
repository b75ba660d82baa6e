"""Small languages with exact answers; importing this package registers the built-in worlds."""

from metaseq_lm.data.worlds import mirrored, quad

BUILT_IN = (quad, mirrored)
