"""Small languages with exact answers; importing this package registers the built-in worlds."""

from metaseq_lm.data.worlds import garden, mirrored, quad, recall

_BUILT_IN = (garden, mirrored, quad, recall)
