"""Modules that give every word its head and relation, each with its own views (Clark et al. 2018, code).

Shapes: B rows, S positions, H hidden units, P parser units, L relations. A class of a word is a pair
of a head and a relation: relation r and ROOT is class r, relation r and the word at position j is
class (1 + j) L + r. There are (1 + S) L.
"""

import torch
from torch import Tensor, nn

from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.words.prediction_modules import (
    FULL,
    HIDDEN,
    Projection,
    Views,
    ViewsEncoder,
    glorot,
)

PARSER_DIM = 128
ROOTS = ("linear", "vector")
IMPOSSIBLE = -100.0  # added to scores of what cannot be


class ParsingModule(nn.Module):
    """Scores of heads and relations, bilinear in the candidate and the dependent.

    Hidden layers with ReLU and dropout for both; the dependent is mapped to P units, the candidate by
    one matrix (H, P) for each relation plus one for all; each is divided by a learned number that
    starts at P^(1/4). ROOT gets scores from a linear layer on the dependent's units ("linear", the
    code), or is a learned vector (H,) that is scored like a candidate ("vector", the dissertation).
    `views` are those of the candidate and of the dependent.
    """

    def __init__(
        self,
        encoder: ViewsEncoder,
        relations: int,
        dropout: Dropout,
        hidden: int = HIDDEN,
        width: int = PARSER_DIM,
        root: str = ROOTS[0],
        views: tuple[str, str] = (FULL, FULL),
    ) -> None:
        super().__init__()
        self.shift, self.relations = 0, relations
        self.candidate = Projection(encoder, views[0], hidden)
        self.dependent = Projection(encoder, views[1], hidden)
        self.dropout = dropout
        self.unit = nn.Linear(hidden, width)
        self.by_relation = nn.Parameter(torch.empty(hidden, relations, width))
        self.shared = nn.Parameter(torch.empty(hidden, width))
        self.scale = nn.Parameter(torch.tensor(float(width) ** 0.25))
        self.root_scores = nn.Linear(width, relations) if root == "linear" else None
        self.root = nn.Parameter(torch.empty(hidden)) if root == "vector" else None
        glorot(self)
        nn.init.xavier_uniform_(self.shared)
        # Glorot as TensorFlow counts it for three axes: much smaller than what all relations share.
        bound = (6 / (hidden * (relations + width))) ** 0.5
        nn.init.uniform_(self.by_relation, -bound, bound)
        if self.root is not None:
            nn.init.uniform_(self.root, 0.0, 2 * hidden**-0.5)  # like hidden units: not negative

    def forward(self, views: Views, scored: Tensor) -> Tensor:
        """Return scores (B, S, (1 + S) L); `scored` (B, S) is true at words.

        Positions that are no words cannot be heads, and only the relation 0 leads to ROOT.
        """
        rows, length = scored.shape
        candidates = self.dropout(self.candidate(views).relu())
        if self.root is not None:
            first = self.root.expand(rows, 1, -1)
            candidates = torch.cat([first, candidates], 1)
        dependents = self.dropout(self.dependent(views).relu())
        units = self.unit(dependents) / self.scale  # (B, S, P)
        weight = (self.by_relation + self.shared.unsqueeze(1)) / self.scale
        contracted = (candidates @ weight.flatten(1)).view(rows, -1, units.shape[-1])
        scores: Tensor = units @ contracted.mT  # (B, S, S L), or ROOT too
        if self.root_scores is not None:
            scores = torch.cat([self.root_scores(units), scores], -1)
        return scores + self._impossible(scored, scores.dtype).unsqueeze(1)

    def _impossible(self, scored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of each class, (B, (1 + S) L)."""
        heads = torch.cat([scored[:, :1], scored], 1)
        allowed = heads.unsqueeze(-1).repeat(1, 1, self.relations)
        allowed[:, 0] = False
        allowed[:, 0, 0] = True
        return (~allowed).flatten(1).to(dtype) * IMPOSSIBLE


def classes_of(heads: Tensor, labels: Tensor, relations: int) -> Tensor:
    """Return the class of each word (B, S) of heads (0 for ROOT, else a position) and relations."""
    return torch.where(heads > 0, (1 + heads) * relations, 0) + labels


def heads_of(classes: Tensor, relations: int) -> tuple[Tensor, Tensor]:
    """Return heads and relations of classes, the inverse of `classes_of`."""
    heads = torch.div(classes, relations, rounding_mode="floor")
    return (heads - 1).clamp(min=0), classes - heads * relations
