"""Linear probes: how well a linear map of frozen states predicts the labels of texts or of words.

The data are a labelled set of texts, or a tagged set. A text is the mean of the states of its
tokens, a word the state of its first token; a pair, or two spans in a text, with means u and v is
(u, v, |u - v|, u * v) (Conneau and Kiela 2018). Each layer has a ridge regression on standardised
states, fitted to the one-hot labels of the train split, with the ridge of the fewest leave-one-out
errors. (The squared error of one-hot labels is no guide: if states say little, it is least for a
ridge that predicts the majority class.) For real values, which are fitted directly, the squared
error chooses the ridge. The valid split chooses the layer, because the last one misleads: a causal
model's last states are about the next token.

Shapes: N items, D width, F inputs of the regression, K classes.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.labelled import baselines
from metaseq_lm.data.labelled.sentence_rows import SentenceRows
from metaseq_lm.data.labelled.sets import LabelledSet, held_out_from
from metaseq_lm.data.storage.indexed import concatenate_ranges
from metaseq_lm.data.storage.manifest import LABELLED, Manifest
from metaseq_lm.data.tokenizers.base import DICT_FILE
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.data.words.subwords import TaggedRows, tagged_rows
from metaseq_lm.data.worlds.measures import READERS
from metaseq_lm.evaluation.benchmarks import LabelledItems, labelled_results
from metaseq_lm.evaluation.suites import (
    OVERALL,
    STATES,
    GroupMetrics,
    HiddenStates,
    References,
    Results,
    Suite,
    by_metric,
    exact_labels,
    exact_scores,
    hits_of,
    share_known,
)

_TRAIN, VALID = "train", "valid"
ACCURACY = "accuracy"
FORMS = ("single", "pair", "spans")
PART = 5  # without a valid split, one in PART training items chooses the layer
RIDGES = 10.0 ** np.arange(-6, 3.5, 0.5)  # per item
_UNLIMITED = 1 << 30  # tokens in a row


_LabelledRows = SentenceRows | TaggedRows


@dataclass
class ProbedSet:
    """A labelled or tagged set; each split is opened once.

    Attributes:
        folder: Its folder.
        splits: The names of its splits.
    """

    folder: Path
    splits: tuple[str, ...]
    _rows: dict[str, _LabelledRows] = field(default_factory=dict)

    def rows(self, split: str, longest: int = _UNLIMITED) -> _LabelledRows:
        """Return the rows of a split.

        Args:
            split: Its name.
            longest: Largest number of tokens in a row, if the split is not open yet. Words and
                labels do not depend on it.

        Raises:
            UsageError: The split has no labels, or no items.
        """
        if split not in self._rows:
            self._rows[split] = _open_rows(self.folder, split, longest)
        return self._rows[split]


@dataclass(frozen=True)
class ProbePart:
    """Texts, or words, of a split with their labels.

    Attributes:
        rows: The rows of the whole split.
        samples: The numbers of the rows to read.
        labels: The classes of the texts or words in the order of these rows, int64 (N,), or real
            values, float64.
    """

    rows: _LabelledRows
    samples: np.ndarray
    labels: np.ndarray

    def states(self, states: HiddenStates) -> list[np.ndarray]:
        """Return each layer's states of the texts or words, (N, D), or pairs, (N, 2, D)."""
        if isinstance(self.rows, TaggedRows):
            return states.at_targets(self.rows, self.samples)
        if self.rows.data.form == "single":
            return states.means(self.rows, self.samples)
        return states.means_of_parts(self.rows, self.samples)

    def metrics(self, values: np.ndarray) -> dict[str, float]:
        """Return the metrics of the set's benchmark, the main one first, and the accuracy.

        Args:
            values: A value for each class, (N, K), the greatest is predicted; (N, 1) for real
                values.
        """
        data = None if isinstance(self.rows, TaggedRows) else self.rows.data
        metrics: dict[str, float] = {}
        if data is not None and (data.benchmark or data.regression):
            facts = data.rows and [data.rows[sample] for sample in self.samples]
            items = LabelledItems(data.benchmark, self.labels, facts, data.label_names)
            metrics = labelled_results(items, values)[OVERALL].metrics
        if data is None or not data.regression:
            metrics.setdefault(ACCURACY, float((values.argmax(1) == self.labels).mean()))
        return metrics

    def hits(self, values: np.ndarray) -> tuple[int, ...]:
        """Return the right answers in blocks of the items, see `hits_of`; () for real values."""
        if values.shape[1] == 1:
            return ()
        return hits_of(values.argmax(1) == self.labels)


class Probe(Suite[ProbedSet, HiddenStates]):
    """A linear probe of the states of each layer, for labels of texts or of words."""

    patterns = ("manifest.json", "train.*", "valid.*", "{split}.*")
    takes = STATES

    def check(self, folder: Path) -> None:
        self.read(folder)

    def read(self, folder: Path) -> ProbedSet:
        self.files(folder)
        manifest = Manifest.load(folder)
        _check_set(folder, manifest)
        for split in (_TRAIN, self.config.split):
            if split not in manifest.splits:
                raise UsageError(
                    f"{folder}: has no split '{split}', only {', '.join(manifest.splits)}; name "
                    "the one that is scored with split=NAME"
                )
        if self.config.split == _TRAIN:
            raise UsageError("split=train: the probe is fitted to it; name another")
        return ProbedSet(folder, tuple(manifest.splits))

    def score(self, items: ProbedSet, probabilities: HiddenStates) -> Results:
        train, chooser, test = parts = self.parts(items, probabilities.longest)
        scores, hits = [], []  # by layer
        exact = exact_labels(items.folder)
        for layers in zip(*(part.states(probabilities) for part in parts)):
            inputs = [_inputs_of(layer) for layer in layers]
            ridge = _Ridge.fit(inputs[0], train.labels, len(_classes_of(train.rows)))
            values = ridge.values(inputs[2])
            metrics = test.metrics(values)
            hits.append(test.hits(values))
            chosen_by = chooser.metrics(ridge.values(inputs[1]))
            if exact:
                metrics |= share_known(metrics[ACCURACY], exact)
                chosen_by |= share_known(chosen_by[ACCURACY], exact)
            valid = {f"{VALID}_{name}": value for name, value in chosen_by.items()}
            scores.append({**metrics, **valid, "ridge": ridge.ridge})
        main = f"{VALID}_{next(iter(metrics))}"
        # A correlation with constant values is nan, which counts as worst.
        layer = int(np.argmax(np.nan_to_num([score[main] for score in scores], nan=-np.inf)))
        count = len(test.labels)
        overall = {**scores[layer], "layer": float(layer)}
        results = {OVERALL: GroupMetrics(count, overall, hits[layer])}
        for number, score in enumerate(scores):
            results[f"layer_{number}"] = GroupMetrics(count, score)
        states = layers[2].reshape(-1, layers[2].shape[-1])
        last = {**scores[-1], "effective_rank": _effective_rank(states)}
        results["last"] = GroupMetrics(count, last)
        return results

    def references(self, items: ProbedSet, folder: Path) -> References:
        train, _, test = self.parts(items)
        n_classes = len(_classes_of(train.rows))
        if not n_classes:
            return {}
        most = baselines.majority(train.labels, n_classes)
        predicted = {"majority": np.full(len(test.labels), most), **_by_words(train, test)}
        one_hot = np.eye(n_classes)
        scores = {"chance": {ACCURACY: 1 / n_classes}}
        scores |= {name: test.metrics(one_hot[classes]) for name, classes in predicted.items()}
        if not self.config.test:
            exact = exact_scores(folder.parent, "labelled").get(folder.name, {})
            names = [name for name in READERS if name in exact]
            scores |= {name: {ACCURACY: exact[name]} for name in names}
        levels = by_metric(scores)
        exact = exact_labels(folder)
        for name, value in exact.items():
            for metric, share in share_known(value, exact).items():
                levels.setdefault(metric, {})[name] = share
        return {OVERALL: levels}

    def parts(
        self, items: ProbedSet, longest: int = _UNLIMITED
    ) -> tuple[ProbePart, ProbePart, ProbePart]:
        """Return the items to fit the probe to, to choose the layer with, and to score.

        Raises UsageError if one of these parts has no item.
        """
        parts = self._split(items, longest)
        for part, use in zip(parts, ("to learn from", "to choose the layer by", "to score")):
            if not len(part.labels):
                raise UsageError(
                    f"{items.folder}: no labelled item {use}; a set without a valid split needs "
                    "two in train, or more than train=N takes"
                )
        return parts

    def _split(self, items: ProbedSet, longest: int) -> tuple[ProbePart, ProbePart, ProbePart]:
        """Return the same parts, possibly without items."""
        options, rows = self.config, items.rows(_TRAIN, longest)
        held_out = options.test or _UNLIMITED
        test = _part_of(items.rows(options.split, longest), 0, held_out)
        stop = min(options.train or _UNLIMITED, int(_item_numbers(rows)[-1]) + 1)
        if VALID in items.splits and options.split != VALID:
            chooser = _part_of(items.rows(VALID, longest), 0, held_out)
            return _part_of(rows, 0, stop), chooser, test
        first = stop - max(1, stop // PART)
        if isinstance(rows, SentenceRows) and first > 0:
            first = held_out_from(rows.data, stop, stop - first)
        return _part_of(rows, 0, first), _part_of(rows, first, stop), test


# ------------------------------------------------------------------------ data


def _check_set(folder: Path, manifest: Manifest) -> None:
    """Raise UsageError unless each item of a set has one class, or one real value."""
    if manifest.kind not in ("tags", LABELLED):
        raise UsageError(
            f"{folder}: a probe reads labelled sets, and tagged sets made by preprocess --tagged "
            "NAME --tokenizer-from DATA"
        )
    if manifest.kind == LABELLED and manifest.details.get("form") not in FORMS:
        raise UsageError(
            f"{folder}: a set of form '{manifest.details.get('form')}'; a probe reads sentences, "
            "pairs of them or of spans, with one class or real value each"
        )


def _open_rows(folder: Path, split: str, longest: int) -> _LabelledRows:
    """Return the rows of a split; UsageError for one without labels or items."""
    rows: _LabelledRows
    if Manifest.load(folder).kind == LABELLED:
        data = LabelledSet(folder, split)
        if data.labels is None:
            raise UsageError(f"{folder}: split '{split}' has no labels; name another: split=NAME")
        rows = SentenceRows(data, Vocabulary.load(folder.parent / DICT_FILE), longest)
    else:
        rows = tagged_rows(folder, split, longest)
    if not len(rows):
        raise UsageError(f"{folder}: split '{split}' is empty")
    return rows


def _item_numbers(rows: _LabelledRows) -> np.ndarray:
    """Return the number of each row's text or sentence."""
    return rows.sentence if isinstance(rows, TaggedRows) else np.arange(len(rows))


def _part_of(rows: _LabelledRows, first: int, stop: int) -> ProbePart:
    """Return the texts or sentences `first` to `stop` - 1 of a split."""
    numbers = _item_numbers(rows)
    samples = np.flatnonzero((numbers >= first) & (numbers < stop))
    if isinstance(rows, TaggedRows):
        labels = rows.targets[rows.words(samples)]
        return ProbePart(rows, samples, labels[labels >= 0])
    assert rows.data.labels is not None
    return ProbePart(rows, samples, rows.data.labels[samples])


def _classes_of(rows: _LabelledRows) -> list[str]:
    return rows.classes if isinstance(rows, TaggedRows) else rows.data.label_names


def _by_words(train: ProbePart, test: ProbePart) -> dict[str, np.ndarray]:
    """Return the predictions of classifiers that see only the labelled word, or a bag of words."""
    n_classes = len(_classes_of(train.rows))
    if isinstance(train.rows, TaggedRows):
        forms = [_words_of(train), _words_of(test)]
        _, numbers = np.unique(np.concatenate(forms), return_inverse=True)
        known, others = np.split(numbers.ravel(), [len(forms[0])])
        predicted = baselines.class_of_word(known, train.labels, others, n_classes)
        return {"word": predicted}
    size = len(train.rows.vocabulary)
    bags = [_bags_of(train), _bags_of(test)]
    predicted = baselines.naive_bayes(bags[0], train.labels, bags[1], n_classes, size)
    return {"bag_of_words": predicted}


def _words_of(part: ProbePart) -> np.ndarray:
    """Return the labelled words of a part of a tagged set, as text (N,)."""
    rows = part.rows
    assert isinstance(rows, TaggedRows)
    words = rows.words(part.samples)
    labelled = words[rows.targets[words] >= 0]
    forms = rows.data.form_numbers(np.arange(len(rows.data)))[labelled]
    texts = [rows.data.form_text(number) for number in range(len(rows.data.surface_forms))]
    return np.asarray(np.array(texts)[forms])


def _bags_of(part: ProbePart) -> baselines.Bags:
    """Return the texts of a part of a labelled set as bags of tokens, one bag for a pair."""
    rows = part.rows
    assert isinstance(rows, SentenceRows)
    tokens, texts = [], []
    for column in rows.data.inputs:
        sizes = column.sizes[part.samples]
        tokens.append(
            column.tokens[concatenate_ranges(column.starts[part.samples], sizes)].astype(np.int64)
        )
        texts.append(np.repeat(np.arange(len(sizes)), sizes))
    return baselines.Bags(np.concatenate(tokens), np.concatenate(texts), len(part.samples))


# ------------------------------------------------------------------------ ridge regression


def _inputs_of(states: np.ndarray) -> np.ndarray:
    """Return the regression's inputs (N, F) for states (N, D), or for pairs of them, (N, 2, D)."""
    if states.ndim == 2:
        return states
    u, v = states[:, 0], states[:, 1]
    return np.concatenate([u, v, np.abs(u - v), u * v], axis=1)


def _effective_rank(states: np.ndarray) -> float:
    """Return in how many directions states vary, as a share of the largest number, 0 to 1.

    It is the exponential of the entropy of the singular values' shares (Roy and Vetterli 2007) of
    the centred states, over min(N - 1, D); 0 for states that do not vary.

    Args:
        states: (N, D).
    """
    x = states.astype(np.float64)
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)
    # The mean of equal float32 states differs from them by a rounding error.
    values = values[values > np.finfo(np.float32).eps * np.linalg.norm(x)]
    if not len(values):
        return 0.0
    shares = values / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()) / max(1, min(len(x) - 1, x.shape[1])))


@dataclass(frozen=True)
class _Ridge:
    """A ridge regression of one-hot labels, or of real values (K = 1), on standardised inputs.

    Attributes:
        mean: Means of the inputs, (F,).
        scale: Standard deviations of the inputs, 1 for a constant one, (F,).
        weights: Weights of standardised inputs, (F, K).
        intercept: The shares of the classes, (K,), or the mean of the values.
        ridge: Factor of the squared weights, per item.
    """

    mean: np.ndarray
    scale: np.ndarray
    weights: np.ndarray
    intercept: np.ndarray
    ridge: float

    @classmethod
    def fit(cls, inputs: np.ndarray, labels: np.ndarray, n_classes: int) -> "_Ridge":
        """Return the regression with the ridge in RIDGES that has the fewest errors.

        An error is an item to which the regression on all others gives another class. With centred
        inputs X (N, F) and labels Y (N, K), X X^T = U S U^T and r = N * ridge, the fitted values
        are H Y, H = U S / (S + r) U^T + 1 / N, where the last term is the intercept, and a left-out
        item has Y - (Y - H Y) / (1 - diag H) (Allen 1974); all items share the standardisation.
        Among equal ridges, and for real values, the least squared error of left-out items decides.

        Args:
            inputs: X, (N, F).
            labels: Classes, (N,), or real values.
            n_classes: K, 0 for real values.
        """
        x = inputs.astype(np.float64)
        mean, scale = x.mean(axis=0), x.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        x = (x - mean) / scale
        targets = np.eye(n_classes)[labels] if n_classes else labels[:, None]
        intercept = targets.mean(axis=0)
        y = targets - intercept
        # X^T X has the same S without the zeros, and F is usually less than N.
        squares, basis = np.linalg.eigh(x.T @ x)
        squares = squares.clip(min=0)
        rotated = x @ basis  # U S^(1/2), (N, F)
        product = rotated.T @ y  # S^(1/2) U^T Y, (F, K)
        count = len(x)
        errors = []
        for ridge in RIDGES:
            inverse = 1 / (squares + count * ridge)
            free = 1 - 1 / count - (rotated**2) @ inverse
            residuals = (y - rotated @ (product * inverse[:, None])) / free.clip(1e-12)[:, None]
            left_out = (targets - residuals).argmax(axis=1)
            missed = float((left_out != labels).mean()) if n_classes else 0.0
            errors.append((missed, float((residuals**2).sum())))
        best = float(RIDGES[min(range(len(RIDGES)), key=errors.__getitem__)])
        weights = basis @ (product / (squares + count * best)[:, None])
        return cls(mean, scale, weights, intercept, best)

    def values(self, inputs: np.ndarray) -> np.ndarray:
        """Return the values of the classes (M, K) for inputs (M, F)."""
        values = (inputs - self.mean) / self.scale @ self.weights + self.intercept
        return np.asarray(values)
