"""Language modelling in both directions: cross-entropy of the next and of the previous token.

Shapes: B rows, S length.
"""

from torch import Tensor, nn

from metaseq_lm.core.batch import Term, Terms, TokenBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import IGNORE, cross_entropy
from metaseq_lm.models.bilstm import BiLSTMLM


def without_padding(targets: Tensor, padding: Tensor | None) -> Tensor:
    """Return targets (B, S - 1), IGNORE where the position or the next one is padding (B, S)."""
    return targets if padding is None else targets.masked_fill(padding[:, 1:], IGNORE)


@register_criterion("language_modeling")
class LanguageModeling(Criterion):
    """The mean of the forward and the backward loss per token (Peters et al. 2018, equation of 3.1).

    In a row `[CLS] x [SEP]` the forward direction predicts x and [SEP], the backward one x and
    [CLS]. The model is a BiLSTMLM; UsageError for another.
    """

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        if not isinstance(model, BiLSTMLM):
            raise UsageError("criterion language_modeling needs --model bilstm_lm")
        tokens, padding = batch.tokens, batch.padding
        forward, backward = model.directions(tokens, batch.layout)
        known = model.encoder.known(tokens)
        following = without_padding(known[:, 1:], padding)
        previous = without_padding(known[:, :-1], padding)
        return {
            "forward": Term(cross_entropy(forward, following).sum(), "targets", 0.5),
            "backward": Term(cross_entropy(backward, previous).sum(), "targets", 0.5),
        }
