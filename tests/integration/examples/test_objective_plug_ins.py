"""Next-latent prediction and the joint-embedding term, by loops and by differences of losses; the
objective of the tutorial.
"""

import sys
import types
from dataclasses import replace
from pathlib import Path

import battery
import numpy as np
import pytest
import torch
from markdown_blocks import blocks
from torch import Tensor
from torch.nn import functional as F

from metaseq_lm.cli import main
from metaseq_lm.config.transformer import ModernConfig
from metaseq_lm.core.batch import Layout, ScoredBatch, TokenBatch
from metaseq_lm.core.random_streams import key, row_keys
from metaseq_lm.core.registry import ALL
from metaseq_lm.criterions.language_modeling import CausalLM
from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.streams import Shard
from metaseq_lm.forward.passes import weighted_loss
from metaseq_lm.models.transformer.encoder import ModernLM
from metaseq_lm.runs.flops import Counter
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.run import TrainingRun

CAUSAL, NEXT_LATENT, JOINT = "causal_lm", "next_latent", "joint_embedding"
MODELS = pytest.mark.parametrize("model", [[], battery.MODERN], ids=["classic", "modern"])
ROWS = ["task.sample_break_mode=none", "task.tokens_per_sample=9", "task.batch_size=6"]
PACKED = ["task.sample_break_mode=documents", "task.tokens_per_sample=24", "task.batch_size=3"]


def open_parts(data: Path, save: Path, name: str, *more: str) -> Parts:
    """Return a run in float64 without dropout, with large random weights, in training mode."""
    config = battery.configure(data, save, (name, 0), *battery.exact(*more))
    parts = build_parts(prepare_config(config), dry_run=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in parts.model.parameters():
            weight.normal_(0.0, 0.4, generator=generator)
    parts.model.train()
    return parts


def first_batch(parts: Parts) -> TokenBatch:
    """Return a training batch with padding: one of its rows is the last one of the text."""
    stream = parts.task.build_streams("train")["train"]
    if parts.config.task.sample_break_mode == "documents":
        (batch,) = stream.micro_batches(0, Shard())
        return parts.engine.to_device([batch])[0]
    samples = np.append(len(stream.lengths) - 1, np.arange(5))
    rows, width = np.arange(6), int(stream.lengths[samples].max())
    batch = stream.gather(3, samples, rows, width, rows)
    assert batch.padding is not None
    return parts.engine.to_device([batch])[0]


def loss_of(parts: Parts, batch: TokenBatch) -> Tensor:
    return weighted_loss(parts.task.criterion(parts.model, batch), batch.sizes, {})


def gradient(loss: Tensor, parts: Parts) -> Tensor:
    weights = [p for p in parts.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    pairs = zip(grads, weights)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def documents_of(batch: TokenBatch) -> list[tuple[int, list[int]]]:
    """Return the row of each document, and the positions of its tokens."""
    layout, parts = batch.layout, []
    padding = layout.padding_of(batch.tokens)
    numbers = torch.zeros_like(batch.tokens) if layout.documents is None else layout.documents
    for row in range(len(batch.tokens)):
        for number in numbers[row].unique():
            at = ((numbers[row] == number) & ~padding[row]).nonzero().flatten().tolist()
            parts += [(row, at)] if at else []
    return parts


class Written:
    """The loss of next-latent prediction by loops; future states and the head are constants."""

    def __init__(self, parts: Parts, batch: TokenBatch) -> None:
        self.parts, self.batch = parts, batch
        self.future = self.states().detach()
        self.head = {n: w.detach().clone() for n, w in parts.model.heads["lm"].named_parameters()}
        self.embedding = parts.model.encoder.embeddings.tokens.weight.detach().clone()

    def states(self) -> Tensor:
        layout = replace(self.batch.layout, reach="causal")
        return self.parts.model.encoder(self.batch.tokens, layout)

    def log_probs(self, state: Tensor) -> Tensor:
        """Return those of the constant head."""
        head = self.parts.model.heads["lm"]
        logits = torch.func.functional_call(head, self.head, (state, self.embedding))
        return logits.log_softmax(-1)

    def loss(self) -> Tensor:
        model, options = self.parts.model, self.parts.task.criterion.config
        states, tokens = self.states(), self.batch.tokens
        count, total = 0, torch.zeros((), dtype=torch.float64)
        for row, positions in documents_of(self.batch):
            for t, position in enumerate(positions[:-1]):
                count += 1
                logits = model.predict(states[row, position], head="lm")
                total = total + F.cross_entropy(logits, tokens[row, positions[t + 1]])
                state = states[row, position]
                for at in positions[t + 1 : t + 1 + options.horizon]:
                    token = model.encoder.embeddings.tokens.weight[tokens[row, at]]
                    state = model.heads["dynamics"](state, token)
                    error = (state - self.future[row, at]).abs()
                    smooth = torch.where(error < 1, error.square() / 2, error - 0.5).mean()
                    total = total + options.latent_weight * smooth / options.horizon
                    if at == positions[-1]:
                        continue
                    wanted, given = map(self.log_probs, (self.future[row, at], state))
                    kl = (wanted.exp() * (wanted - given)).sum()
                    total = total + options.kl_weight * kl / options.horizon
        assert count == self.batch.sizes["targets"]
        return total / count


WEIGHTS = ["criterion.latent_weight=0.7", "criterion.kl_weight=0.3", "task.dynamics_dim=5"]


@MODELS
@pytest.mark.parametrize("rows", [ROWS, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("horizon", [1, 3, 40])
def test_next_latents_by_a_loop(horizon, rows, model, moons, tmp_path):
    """Loss and gradient; beyond the end of a row or document nothing is predicted."""
    more = [*model, *rows, *WEIGHTS, f"criterion.horizon={horizon}"]
    parts = open_parts(moons, tmp_path, NEXT_LATENT, *more)
    batch = first_batch(parts)
    loss, wanted = loss_of(parts, batch), Written(parts, batch).loss()
    torch.testing.assert_close(loss, wanted, rtol=1e-11, atol=1e-11)
    # Two forms of one sum: rounding errors of states that are predicted 40 times grow.
    one, other = gradient(loss, parts), gradient(wanted, parts)
    assert (one - other).norm() <= 1e-9 * other.norm()


def slope(parts: Parts, loss_fn: object, along: Tensor, size: float = 1e-5) -> float:
    """Return the central difference of a loss in a direction of the trained weights."""
    weights = [p for p in parts.model.parameters() if p.requires_grad]
    sides = []
    with torch.no_grad():
        for step in (size, -2 * size):
            pieces = along.split([p.numel() for p in weights])
            for weight, piece in zip(weights, pieces):
                weight += step * piece.view_as(weight)
            sides.append(loss_fn().item())
        for weight, piece in zip(weights, pieces):
            weight += size * piece.view_as(weight)
    return (sides[0] - sides[1]) / (2 * size)


def test_gradients_of_next_latents_are_differences(moons, tmp_path):
    """Of the loss whose future states and head are constants, and of no other."""
    more = [*battery.MODERN, *ROWS, *WEIGHTS, "criterion.horizon=2"]
    parts = open_parts(moons, tmp_path, NEXT_LATENT, *more)
    batch = first_batch(parts)
    grad, written = gradient(loss_of(parts, batch), parts), Written(parts, batch)
    along = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1), dtype=grad.dtype)
    assert slope(parts, written.loss, along) == pytest.approx((grad @ along).item(), rel=1e-6)
    moving = slope(parts, lambda: loss_of(parts, batch), along)
    assert moving != pytest.approx((grad @ along).item(), rel=1e-2)


@pytest.mark.parametrize("horizon", [1, 2])
def test_flops_of_next_latents(horizon, moons, tmp_path):
    """Those of causal LM, and for each step the dynamics, and a head whose weights are constant."""
    counts = []
    for name, more in ((NEXT_LATENT, [*WEIGHTS, f"criterion.horizon={horizon}"]), (CAUSAL, [])):
        parts = open_parts(moons, tmp_path / name, name, *ROWS, *more)
        batch = first_batch(parts)
        with Counter() as counter:
            gradient(loss_of(parts, batch), parts)
        counts.append(counter.total)
    width, inner, tokens = 8, 5, batch.tokens.numel()
    head = width * width + width * len(parts.task.vocabulary)
    dynamics = 2 * width * inner + inner * inner + inner * width
    # Backward is twice the forward pass; of the head the half of that.
    assert counts[0] - counts[1] == 2 * tokens * horizon * (3 * dynamics + 2 * head)


def test_an_evaluation_has_the_loss_of_the_objective_alone(moons, tmp_path):
    """That of causal or masked LM, which weights of 0 train."""
    off = ["criterion.latent_weight=0", "criterion.kl_weight=0"]
    for name, plain, more in ((NEXT_LATENT, CausalLM(), off), (JOINT, MaskedLM(), [])):
        parts = open_parts(moons, tmp_path / name, name, *ROWS, *more)
        batch = first_batch(parts)
        terms = plain(parts.model, batch)
        wanted = weighted_loss(terms, batch.sizes, {})
        if more:
            same = gradient(loss_of(parts, batch), parts), gradient(wanted, parts)
            assert torch.equal(*same)
        parts.model.eval()
        assert loss_of(parts, batch).item() == wanted.item()


@MODELS
def test_the_joint_embedding_term_written_out(model, moons, tmp_path):
    """Its value, and the derivative by w: share (1 - share) times the difference of the terms."""
    parts = open_parts(moons, tmp_path, JOINT, *model, *ROWS)
    batch, predictor, net = first_batch(parts), parts.model.heads["predictor"], parts.model
    terms = parts.task.criterion(net, batch)
    with torch.no_grad():
        layout = replace(batch.layout, padding=~batch.context)
        predicted = predictor(net.encoder(batch.tokens, layout), batch)
        targets, losses = net.heads["average"].net(batch.originals, batch.layout), []
        for row, at in batch.hidden.nonzero().tolist():
            target = targets[row, at] - targets[row, at].mean()
            cosine = predicted[row, at] @ target / predicted[row, at].norm() / target.norm()
            losses.append(1 - cosine.item())
    assert len(losses) == batch.sizes["hidden"]
    mean = terms[JOINT].sum / batch.sizes["hidden"]
    assert mean.item() == pytest.approx(np.mean(losses), rel=1e-10)
    mlm = (terms["mlm"].sum / batch.sizes["targets"]).item()
    loss = loss_of(parts, batch)
    share = 1 / (1 + np.exp(-predictor.balance.item()))
    assert loss.item() == pytest.approx(share * mean.item() + (1 - share) * mlm)
    (by_w,) = torch.autograd.grad(loss, predictor.balance)
    assert by_w.item() == pytest.approx(share * (1 - share) * (mean.item() - mlm))


@MODELS
def test_gradients_of_joint_embeddings_are_differences(model, moons, tmp_path):
    parts = open_parts(moons, tmp_path, JOINT, *model, *ROWS)
    batch = first_batch(parts)
    grad = gradient(loss_of(parts, batch), parts)
    along = torch.randn(grad.shape, generator=torch.Generator().manual_seed(1), dtype=grad.dtype)
    wanted = slope(parts, lambda: loss_of(parts, batch), along, 1e-6)
    assert (grad @ along).item() == pytest.approx(wanted, rel=1e-6)


def test_predictions_depend_on_the_context_alone(moons, tmp_path):
    parts = open_parts(moons, tmp_path, JOINT, *battery.MODERN, "task.tokens_per_sample=24")
    batch = first_batch(parts)
    padding = batch.layout.padding_of(batch.tokens)

    def term(tokens: Tensor, originals: Tensor) -> float:
        changed = batch.replace(tokens=tokens, originals=originals)
        return parts.task.criterion(parts.model, changed)[JOINT].sum.item()

    before = term(batch.tokens, batch.originals)
    others = batch.tokens.where(batch.context, (batch.tokens + 1) % 5)
    assert term(others, batch.originals) == before
    assert term(batch.tokens.where(~batch.context, 1), batch.originals) != before
    # The targets see the whole row, which predictions do not.
    other = batch.originals.where(batch.hidden | padding, (batch.originals + 1) % 5)
    assert term(batch.tokens, other) != before


def test_blocks_have_the_sizes_of_the_code():
    from user_dir import joint_embedding

    blocks = joint_embedding.blocks
    keys = row_keys(key("blocks"), np.arange(4000))
    context, hidden = blocks(np.full(4000, 102), 110, keys)
    assert not (context & hidden).any() and context[:, 0].all() and not hidden[:, 0].any()
    assert not (context | hidden)[:, 101:].any() and (context | hidden)[:, 1:101].any(0).all()
    # Of 100 tokens two blocks of 10 to 24, which may overlap; the rest of a block of 65 to 84.
    sizes = hidden.sum(1)
    assert sizes.min() >= 10 and sizes.max() <= 48 and 27 < sizes.mean() < 34
    runs = (np.diff(hidden.astype(int), axis=1) == 1).sum(1)
    assert set(runs) == {1, 2}
    seen = context[:, 1:].sum(1)
    assert seen.max() <= 84 and seen.min() >= 65 - 48
    wide = blocks(np.full(4000, 102), 150, keys)
    assert all((a == b[:, :110]).all() for a, b in zip((context, hidden), wide))
    assert not np.array_equal(hidden[0], hidden[1])
    short = blocks(np.array([3]), 3, keys[:1])
    assert short[0].tolist() == [[True, False, False]]
    assert short[1].tolist() == [[False, True, False]]


def test_the_average_rises_from_the_encoder(moons, tmp_path):
    """Of a run that starts from another one: a copy, then d_i = 0.996 + 0.004 i / 9."""
    first = tmp_path / "mlm"
    options = battery.exact("trainer.max_update=3", "trainer.save_interval_updates=1")
    battery.train_uncounted(battery.configure(moons, first, ("masked_lm", 0), *options))
    more = [*options, f"init_from={first}"]
    run = TrainingRun(battery.configure(moons, tmp_path / "joint", (JOINT, 0), *more))
    name, seen = "encoder.stack.layers.0.fc1.weight", []
    weights = battery.weights_of(run)
    average = weights[name.replace("encoder", "heads.average.net")]
    assert not torch.equal(weights[name], average)
    update = run.task.update

    def recorded(*arguments: object) -> dict:
        logs = update(*arguments)
        seen.append(battery.weights_of(run)[name])
        return logs

    run.task.update = recorded
    with battery.uncounted():
        run.train()
    for i, weight in enumerate(seen):
        decay = 0.996 + 0.004 * i / 9 if i else 0.0
        average = decay * average + (1 - decay) * weight
    stored = battery.weights_of(run)[name.replace("encoder", "heads.average.net")]
    torch.testing.assert_close(stored, average, rtol=0, atol=1e-14)
    assert not torch.equal(stored, seen[-1])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the file of the tutorial defines; what it registers is forgotten again."""
    for registry in ALL.values():
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    page = battery.ROOT / "docs" / "tutorials" / "new_attention.md"
    (source,) = (block.text for block in blocks(page) if block.test == "file groups.py")
    monkeypatch.setitem(sys.modules, "groups", types.ModuleType("groups"))
    namespace = vars(sys.modules["groups"])
    exec(compile(source, "groups.py", "exec"), namespace)
    return namespace


class SomeRows:
    """A corpus of two rows of 8 and 5 tokens."""

    def rows(self, samples: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        at, lengths = np.arange(width), np.array([8, 5])[samples]
        tokens = np.random.default_rng(4).integers(3, 11, (2, width))[samples]
        return np.where(at < lengths[:, None], tokens, 0), lengths


def build_model() -> ModernLM:
    config = ModernConfig(*(2, 8, 12, 2), local_window=6, max_positions=12)
    model = ModernLM(config, 11).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5, generator=generator)
    return model


def test_groups_of_one_are_a_causal_lm(groups):
    criterion, model = groups["GroupLM"](groups["GroupsConfig"](size=1)), build_model()
    batch = groups["group_batch"](criterion, SomeRows(), np.array([0, 1]), None, 9)
    assert batch.sizes == {"targets": 7 + 4, "rows": 2}
    losses = [weighted_loss(one(model, batch), batch.sizes, {}) for one in (criterion, CausalLM())]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_groups_depend_on_the_groups_before(size, groups):
    """Log-probabilities add up to the loss, and one moves with the tokens before its group."""
    criterion, model = groups["GroupLM"](groups["GroupsConfig"](size=size)), build_model()
    batch = groups["group_batch"](criterion, SomeRows(), np.array([0, 1]), None, 9)
    assert batch.sizes == {"targets": (8 - size) + (5 - size), "rows": 2}
    padding = batch.layout.padding_of(batch.tokens)
    scored = {"scored": ~padding, "mask_id": 1, "batch_tokens": 99}

    def log_probs(tokens: Tensor) -> Tensor:
        rows = ScoredBatch(tokens=tokens, layout=Layout(padding), **scored)
        return criterion.token_log_probs(model, rows)

    before = log_probs(batch.tokens)
    loss = criterion(model, batch)["next_token"].sum
    torch.testing.assert_close(-before.sum(), loss, rtol=1e-12, atol=1e-12)
    for changed in range(8):
        tokens = batch.tokens.clone()
        tokens[0, changed] = 3 + (tokens[0, changed] - 2) % 8
        moved = (log_probs(tokens)[0, :8] != before[0, :8]).tolist()
        for other in range(8):
            sees = other // size > changed // size
            assert moved[other] == (sees or (other == changed and changed >= size))


def test_the_plug_ins_are_listed(capsys):
    assert main(["list", "criterion", "--user-dir", str(battery.ROOT / "user_dir")]) == 0
    shown = capsys.readouterr().out
    for name in (NEXT_LATENT, JOINT):
        assert f"user_dir.{name}" in shown
        source = battery.ROOT / "user_dir" / f"{name}.py"
        assert len(source.read_text().splitlines()) < 150
