"""Small languages with exact answers; importing this package registers the built-in worlds."""

from metaseq_lm.data.worlds import quad, recall

BUILT_IN = (quad, recall)
