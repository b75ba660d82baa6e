"""Cross-entropy of the head and the relation of every word (Clark et al. 2018)."""

from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.tagging import TaggingConfig, WordLabels


@register_criterion("parsing")
class Parsing(WordLabels):
    """The mean over words of the cross-entropy over all pairs of a head and a relation, not smoothed."""

    def __init__(self, config: object = None) -> None:
        super().__init__(TaggingConfig(label_smoothing=0.0))
