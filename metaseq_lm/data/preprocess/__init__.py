"""What `metaseq-lm preprocess` makes; importing this package registers the built-in kinds."""

from metaseq_lm.data.preprocess import (
    benchmarks,
    corpus,
    labelled,
    parallel,
    squad,
    word_sets,
    words,
    world,
)

_BUILT_IN = (benchmarks, corpus, labelled, parallel, squad, word_sets, words, world)
