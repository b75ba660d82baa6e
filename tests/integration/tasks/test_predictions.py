"""Prefix LM, masked next token and masked diffusion: losses by loops, bounds, scores."""

from itertools import combinations, pairwise, product
from math import comb, log
from pathlib import Path

import battery
import numpy as np
import pytest
import torch
from scipy.special import beta
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.criterions import MaskedDiffusionConfig
from metaseq_lm.core.batch import Layout, ScoredBatch
from metaseq_lm.core.errors import UsageError
from metaseq_lm.criterions.predictions import MaskedDiffusion
from metaseq_lm.data.corpus.predictions import PredictionBatch, prediction_batch
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.data.streams import Shard
from metaseq_lm.forward.passes import weighted_loss
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.models.transformer.flops_rules import Sizes, masked_lm
from metaseq_lm.runs.flops import Counter
from metaseq_lm.tasks.protocols import reach_of
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun
from metaseq_lm.training.scoring import SentenceScorer

MNTP, DIFFUSION, PREFIX = "masked_next_token", "masked_diffusion", "prefix_lm"
MODELS = [[], battery.MODERN]


def open_parts(data: Path, save: Path, name: str, *more: str) -> Parts:
    """Return an untrained run in float64 without dropout."""
    config = battery.configure(data, save, (name, 0), *battery.exact(*more))
    parts = build_parts(prepare_config(config), dry_run=True)
    parts.model.eval()
    return parts


def first_batch(parts: Parts, split: str = "train", number: int = 0) -> PredictionBatch:
    """Return a whole global batch of a split."""
    stream = parts.task.build_streams(split)[split]
    (batch,) = parts.engine.to_device(stream.micro_batches(number, Shard()))
    return batch


def padded_batch(parts: Parts) -> PredictionBatch:
    """Return a training batch with padding: its first row is the end of the text."""
    stream = parts.task.build_streams("train")["train"]
    samples = np.append(len(stream.lengths) - 1, np.arange(7))
    rows, width = np.arange(8), int(stream.lengths[samples].max())
    batch = stream.gather(3, samples, rows, width, rows)
    assert batch.layout.padding is not None
    return parts.engine.to_device([batch])[0]


WINDOWS = ["task.sample_break_mode=none", "task.tokens_per_sample=13", "task.batch_size=8"]


def loss_of(parts: Parts, batch: PredictionBatch) -> Tensor:
    return weighted_loss(parts.task.criterion(parts.model, batch), batch.sizes, {})


def gradient(loss: Tensor, model: nn.Module) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([p.flatten() for p in parts if p is not None])


def rows_of(batch: PredictionBatch) -> list[tuple[Tensor, list[tuple[int, int, float]]]]:
    """Return each row without padding, and (position, token, weight) of its predictions."""
    length = batch.tokens.shape[1]
    padding = batch.layout.padding_of(batch.tokens)
    rows = [(row[~hidden], []) for row, hidden in zip(batch.tokens, padding)]
    for number, (source, target) in enumerate(zip(batch.sources.tolist(), batch.targets.tolist())):
        if target >= 0:
            weight = 1.0 if batch.weights is None else float(batch.weights[number])
            rows[source // length][1].append((source % length, target, weight))
    return rows


@pytest.mark.parametrize("model", MODELS, ids=["classic", "modern"])
def test_masked_next_tokens_by_a_loop(model, moons, tmp_path):
    """Row by row, without padding: loss and gradient."""
    hidden = ["task.mask_prob=0.4", "task.random_token_prob=0", "task.leave_unmasked_prob=0"]
    parts = open_parts(moons, tmp_path, MNTP, *model, *WINDOWS, *hidden)
    batch, losses = padded_batch(parts), []
    for text, predictions in rows_of(batch):
        logits = parts.model(text[None])[0]
        for position, target, _ in predictions:
            losses.append(F.cross_entropy(logits[position], torch.tensor(target)))
            assert text[position + 1] == parts.task.vocabulary.mask
    expected = torch.stack(losses).mean()
    loss = loss_of(parts, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    differ = gradient(loss, parts.model) - gradient(expected, parts.model)
    assert differ.abs().max() < 1e-11


@pytest.mark.parametrize("model", MODELS, ids=["classic", "modern"])
@pytest.mark.parametrize("shifted", [False, True])
def test_diffusion_by_a_loop(shifted, model, moons, tmp_path):
    """The sum of -log p / t over masked tokens, per token of the text, and its gradient."""
    more = [*model, *WINDOWS, f"criterion.shifted={str(shifted).lower()}"]
    parts = open_parts(moons, tmp_path, DIFFUSION, *more)
    batch, mask = padded_batch(parts), parts.task.vocabulary.mask
    total, count, seen = torch.zeros((), dtype=torch.float64), 0, set()
    for text, predictions in rows_of(batch):
        log_probs = parts.model(text[None])[0]
        log_probs[:, mask] = -torch.inf
        log_probs = log_probs.log_softmax(-1)
        count += len(text) - 2
        for position, target, weight in predictions:
            assert text[position + shifted] == mask
            total = total - log_probs[position, target] * weight
        assert (text == mask).sum() == len(predictions)
        seen |= {weight for _, _, weight in predictions}
    assert len(seen) > 4 and min(seen) >= 1
    loss = loss_of(parts, batch)
    torch.testing.assert_close(loss, total / count, rtol=1e-12, atol=1e-12)
    differ = gradient(loss, parts.model) - gradient(total / count, parts.model)
    assert differ.abs().max() < 1e-10


def test_a_prefix_is_seen_and_later_tokens_are_not(moons, tmp_path):
    """Gradients of the first prediction: zero from later tokens, not from any of the prefix."""
    parts = open_parts(moons, tmp_path, PREFIX)
    batch, embeddings = first_batch(parts), parts.model.encoder.embeddings
    lengths = (~batch.layout.padding_of(batch.tokens)).sum(1)
    prefix = batch.layout.prefix
    assert prefix is not None and len(set(prefix.tolist())) > 3
    for row, (text, predictions) in enumerate(rows_of(batch)):
        first, length = int(prefix[row]), int(lengths[row])
        assert [p for p, _, _ in predictions] == list(range(first - 1, length - 1))
        assert [t for _, t, _ in predictions] == text[first:].tolist()
        x = embeddings(text[None]).detach().requires_grad_()
        layout = Layout(reach="prefix", prefix=prefix[row : row + 1])
        states = parts.model.encoder.stack(x, layout)
        logits = parts.model.predict(states)[0, first - 1]
        (grad,) = torch.autograd.grad(F.cross_entropy(logits, text[first]), x)
        norms = grad[0].norm(dim=-1)
        assert (norms[:first] > 0).all() and (norms[first:] == 0).all()


@pytest.mark.parametrize("name", [MNTP, DIFFUSION, PREFIX])
def test_packed_rows_have_the_losses_of_their_documents(name, moons, tmp_path):
    parts = open_parts(moons, tmp_path, name)
    mask, criterion = parts.task.vocabulary.mask, parts.task.criterion
    texts = [np.array([[3, 10, 11, 12, 2]]), np.array([[3, 12, 13, 2]])]
    hidden = [np.array([[0, 1, 0, 1, 0]], bool), np.array([[0, 0, 1, 0]], bool)]
    if name == PREFIX:
        hidden = [np.arange(t.shape[1])[None] >= 2 for t in texts]
    shifted, whole = name != DIFFUSION, torch.tensor([2])

    def total(rows: np.ndarray, chosen: np.ndarray, documents: Tensor | None) -> Tensor:
        tokens = rows if name == PREFIX else np.where(chosen, mask, rows)
        reach = {"reach": "prefix", "prefix": whole} if name == PREFIX else {}
        layout = Layout(documents=documents, **reach)
        batch = prediction_batch(rows, tokens, layout, chosen, shifted)
        batch.mask_id = mask
        return next(iter(criterion(parts.model, batch).values())).sum

    alone = sum(total(t, h, None) for t, h in zip(texts, hidden))
    documents = torch.tensor([[0] * 5 + [1] * 4])
    together = total(np.concatenate(texts, 1), np.concatenate(hidden, 1), documents)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------ bounds

SYMBOLS, LENGTH, MASK = 3, 3, 3


class Conditionals(nn.Module):
    """The exact conditionals of a table of probabilities of strings, (3, 3, 3), as states.

    They are raised to a power; the logit of [MASK] is `mask_logit`.
    """

    def __init__(self, table: Tensor, power: float, mask_logit: float) -> None:
        super().__init__()
        self.table, self.power, self.mask_logit = table, power, mask_logit

    def forward(self, tokens: Tensor, layout: Layout, segments: Tensor | None = None) -> Tensor:
        logits = torch.zeros(*tokens.shape, SYMBOLS + 1, dtype=torch.float64)
        for row, position in product(range(len(tokens)), range(LENGTH)):
            index = [slice(None) if t == MASK else int(t) for t in tokens[row]]
            index[position] = slice(None)
            axes = [a for a in range(LENGTH) if isinstance(index[a], slice)]
            others = tuple(i for i, a in enumerate(axes) if a != position)
            seen = self.table[tuple(index)]
            probs = seen.sum(others) if others else seen
            logits[row, position, :SYMBOLS] = (probs / probs.sum()).log() * self.power
        logits[..., MASK] = self.mask_logit
        return logits


class Exact(TransformerLM):
    """A model whose logits are those of `Conditionals`."""

    def __init__(self, table: Tensor, power: float = 1.0, mask_logit: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.encoder = Conditionals(table, power, mask_logit)

    def predict(
        self, x: Tensor, positions: Tensor | None = None, head: str | None = None
    ) -> Tensor:
        return x if positions is None else x.gather(1, positions[..., None].expand(-1, -1, 4))


def strings() -> np.ndarray:
    return np.array(list(product(range(SYMBOLS), repeat=LENGTH)))


def bounds(model: nn.Module) -> Tensor:
    """Return the bound of each string, (27,): over all sets of masked tokens."""
    totals = []
    for string in strings():
        subsets = [s for k in range(1, LENGTH + 1) for s in combinations(range(LENGTH), k)]
        chosen = np.array([np.isin(np.arange(LENGTH), s) for s in subsets])
        k = chosen.sum(1)
        # The weight n / k, and the probability 1 / n / C(n, k).
        weights = np.array([1 / (count * comb(LENGTH, count)) for count in k.tolist()])
        # The same for continuous times: the integral of t^k (1 - t)^(n - k) / t.
        assert weights == pytest.approx(beta(k, LENGTH - k + 1), abs=1e-12)
        rows = np.tile(string, (len(subsets), 1))
        tokens = np.where(chosen, MASK, rows)
        batch = prediction_batch(rows, tokens, Layout(), chosen, False, weights)
        batch.mask_id = MASK
        batch.sizes["tokens"] = LENGTH
        totals.append(MaskedDiffusion()(model, batch)["denoising"].sum)
    return torch.stack(totals)


def chain() -> Tensor:
    """Return the probabilities of the strings of a Markov chain, (3, 3, 3)."""
    generator = torch.Generator().manual_seed(5)
    start = torch.rand(SYMBOLS, generator=generator, dtype=torch.float64).softmax(0)
    step = (3 * torch.rand(SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64)).softmax(1)
    return start[:, None, None] * step[:, :, None] * step[None]


def test_the_bound_is_the_likelihood_of_a_consistent_model():
    expected = -chain().log().flatten()
    assert (bounds(Exact(chain())) - expected).abs().max() < 1e-10


def test_the_bound_tightens():
    """On strings of a chain it is above the entropy, and falls as conditionals become exact."""
    table = chain()
    entropy = -(table * table.log()).sum()
    means = [(table.flatten() * bounds(Exact(table, p))).sum() for p in (0, 0.25, 0.5, 0.75, 1)]
    assert means[0].item() == pytest.approx(LENGTH * log(SYMBOLS), abs=1e-10)
    assert all(a > b + 1e-3 for a, b in pairwise(means))
    assert means[-1].item() == pytest.approx(entropy.item(), abs=1e-10)


def test_the_logit_of_mask_has_no_influence(moons, tmp_path):
    low, high = (bounds(Exact(chain(), mask_logit=m)) for m in (-9.0, 30.0))
    assert torch.equal(low, high)
    parts = open_parts(moons, tmp_path, DIFFUSION)
    batch, bias = first_batch(parts), parts.model.heads["lm"].bias
    before = loss_of(parts, batch)
    (grad,) = torch.autograd.grad(before, bias)
    assert grad[batch.mask_id] == 0 and grad.abs().sum() > 0
    with torch.no_grad():
        bias[batch.mask_id] += 20
    assert loss_of(parts, batch) == before


def scored(rows: list[list[int]]) -> ScoredBatch:
    tokens = torch.tensor(rows)
    return ScoredBatch(
        tokens=tokens, scored=torch.ones_like(tokens) > 0, mask_id=MASK, batch_tokens=64
    )


@pytest.mark.parametrize("samples", [1, 4])
def test_scores_of_a_constant_model_have_no_variance(samples):
    """n log(V - 1), whatever is masked."""
    model = Exact(torch.full((3, 3, 3), 1 / 27, dtype=torch.float64))
    for seed in range(5):
        criterion = MaskedDiffusion(MaskedDiffusionConfig(score_samples=samples, score_seed=seed))
        scores = criterion.token_log_probs(model, scored([[0, 2, 1], [1, 1, 0]]))
        assert scores.sum(1).tolist() == pytest.approx([-3 * log(3)] * 2, abs=1e-12)


def test_scores_estimate_the_bound_and_comparisons_are_single_masks():
    model, rows = Exact(chain(), 0.5), [[0, 2, 1], [2, 2, 0]]
    at = [row[0] * 9 + row[1] * 3 + row[2] for row in rows]
    many = MaskedDiffusion(MaskedDiffusionConfig(score_samples=600))
    estimate = many.token_log_probs(model, scored(rows)).sum(1)
    assert estimate.tolist() == pytest.approx((-bounds(model)[at]).tolist(), abs=0.06)
    coarse = MaskedDiffusion(MaskedDiffusionConfig(score_samples=3))
    together = coarse.token_log_probs(model, scored(rows))
    alone = [coarse.token_log_probs(model, scored([row])) for row in rows]
    assert torch.equal(together, torch.cat(alone))  # whatever else is scored
    single = coarse.comparison_scores(model, scored(rows))
    for row, position in product(range(2), range(LENGTH)):
        tokens = torch.tensor(rows[row])
        tokens[position] = MASK
        wanted = model.encoder(tokens[None], Layout())[0, position, :3].log_softmax(-1)
        assert single[row, position] == pytest.approx(float(wanted[rows[row][position]]))


def test_weights_and_times_change_training_only(moons, tmp_path):
    """Validation gives the bound by numbers of masked tokens, whatever was trained."""
    options = ["task.weights=flat", "task.times=bell"]
    parts = open_parts(moons, tmp_path, DIFFUSION)
    other = open_parts(moons, tmp_path, DIFFUSION, *options)
    train, valid = first_batch(other), first_batch(other, "valid")
    assert train.weights is not None and set(train.weights.tolist()) == {1.0}
    whole_rows = first_batch(parts, "valid")
    assert torch.equal(whole_rows.tokens, valid.tokens) and torch.equal(
        whole_rows.weights, valid.weights
    )
    for text, predictions in rows_of(valid):
        weight = (len(text) - 2) / len(predictions)
        assert [w for _, _, w in predictions] == pytest.approx([weight] * len(predictions))
    assert not torch.equal(first_batch(parts).tokens, train.tokens)


# ------------------------------------------------------------------------ scores and states


def single_mask(parts: Parts, row: list[int], place: int, source: int) -> float:
    """Return log p of a token of a row where it is masked, read at `source`."""
    tokens, mask = torch.tensor([row]), parts.task.vocabulary.mask
    tokens[0, place] = mask
    logits = parts.model(tokens)[0, source].detach()
    if parts.config.criterion._name == DIFFUSION:
        logits[mask] = -torch.inf
    return logits.log_softmax(-1)[row[place]].item()


@pytest.mark.parametrize("name", [MNTP, PREFIX, DIFFUSION])
def test_scores_of_a_trained_run(name, moons, tmp_path):
    """Single masks, or passes over each prefix; the reach is of states only."""
    more = battery.exact("trainer.max_update=2")
    battery.train_uncounted(battery.configure(moons, tmp_path, (name, 0), *more))
    good, bad = SourceSentence("0 1 1 0", "1"), SourceSentence("0 1 0 0", "2")
    for read in ("both", "causal") if name == PREFIX else ("both",):
        overrides = ["engine.precision=fp64"]
        overrides += [f"criterion.read={read}"] if name == PREFIX else []
        parts = open_run(str(tmp_path), overrides=overrides)
        model, vocabulary = parts.model.eval(), parts.task.vocabulary
        assert reach_of(parts.task) == read
        scorer = SentenceScorer(parts)
        assert scorer.reach == ("causal" if name == PREFIX else "both")
        (score,), ((changed, _),) = scorer.score([good]), scorer.score_changed([(good, bad)])
        row = [vocabulary.cls(), *score.tokens.tolist(), vocabulary.sep]
        places = range(1, len(row) - 1)
        if name == PREFIX:
            wanted = []
            for place in places:
                logits = model(torch.tensor([row[:place]]), Layout(reach="causal"))[0, -1]
                wanted.append(logits.log_softmax(-1)[row[place]].item())
        else:
            wanted = [single_mask(parts, row, p, p - (name == MNTP)) for p in places]
        at = [p for p in places if row[p] == changed.tokens[0]][-1]
        assert changed.log_probs == pytest.approx([wanted[at - 1]], abs=1e-12)
        if name != DIFFUSION:
            np.testing.assert_allclose(score.log_probs, wanted, atol=1e-12)
        else:
            assert score.pll != pytest.approx(sum(wanted), abs=1e-3)


@pytest.mark.parametrize(
    "name, more, fact",
    [
        (PREFIX, ["task=masked_lm"], "prefix_lm is for task prefix_lm"),
        (MNTP, ["task.causal_share=0.5"], "task.objectives"),
    ],
)
def test_what_does_not_belong_together_is_refused(name, more, fact, moons, tmp_path):
    with pytest.raises(UsageError, match=fact):
        TrainingRun(battery.configure(moons, tmp_path, (name, 0), *more))


# ------------------------------------------------------------------------ cost


@pytest.mark.parametrize(
    "name, more", [(PREFIX, []), (MNTP, []), (DIFFUSION, []), (DIFFUSION, ["task.times=bell"])]
)
def test_flops_by_rule(name, more, moons, tmp_path):
    """Torch's counter, given the number of predictions; the rule, on average."""
    parts = open_parts(moons, tmp_path, name, *battery.MODERN, *WINDOWS, *more)
    row = Sizes.of(parts.config.model, len(parts.task.vocabulary), 13)
    counts = []
    for number in range(40):
        batch = first_batch(parts, number=number)
        if batch.tokens.shape != (8, 13) or batch.layout.padding is not None:
            continue
        counts.append(batch.sizes["targets"])
        if len(counts) > 1:
            continue
        with Counter() as counter:
            loss_of(parts, batch).backward()
        counted = 8 * masked_lm(row, len(batch.targets) / 8 / 13)
        assert counter.total == pytest.approx(counted, rel=0.001)
    expected = 8 * masked_lm(row, float(np.mean(counts)) / 8 / 13)
    assert parts.task.flops_by_rule() == pytest.approx(expected, rel=0.02)
