"""The arithmetic of an update: weights, similarities, the meta head, the combined gradient."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from tartan_bench import EXACT, batches_of, build, logged, one_update, same, weights
from torch import nn

from metaseq_lm.core.batch import Batch, Term
from metaseq_lm.core.config import section
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.tartan import update as updates
from metaseq_lm.methods.tartan.criterion import Meta, MultiTask, task_terms
from metaseq_lm.methods.tartan.options import MetaConfig, MultiTaskConfig
from metaseq_lm.optim import Optimizer

TWO = "task.auxiliary=[train,tapt]"
SGD = section("optimizer", "sgd", lr=0.1, weight_decay=0.0, momentum=0.0, clip_norm=0.0)


@dataclass(kw_only=True)
class GradientBatch(Batch):
    """The gradient that a task's loss is to have."""

    gradient: list[float]


class Line(nn.Module):
    """A body of one vector and heads that do nothing; the loss of a task is linear in the body."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 1, bias=False).double()
        self.heads = nn.ModuleDict({n: nn.Linear(1, 1).double() for n in ("lm", "sentence")})
        self.register_buffer("task_logits", torch.zeros(tasks, dtype=torch.float64))


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch):
    """A function that makes one update of tasks with given gradients of the body."""

    def make(gradients: dict[str, list[float]], heads: float = 0.0, spoilt: str = "", **options):
        model = Line(len(gradients) - ("dev" in gradients))

        def terms(model, batch):
            g = torch.tensor(batch.gradient, dtype=torch.float64)
            body = model.encoder.weight[0] * 1
            if batch.stream == spoilt:
                body.register_hook(lambda grad: grad * math.nan)
            total = (body * g).sum()
            if batch.stream == "endtask":
                total = total + heads * model.heads["sentence"].weight.sum()
            elif batch.stream != "dev":
                total = total + heads * model.heads["lm"].weight.sum()
            return {"it": Term(total, None), "accuracy": Term(total.detach(), None, 0.0)}

        monkeypatch.setattr(updates, "task_terms", terms)
        body = [*model.encoder.parameters(), *model.heads["lm"].parameters()]
        own = list(model.heads["sentence"].parameters())
        engine = Engine(
            {
                name: Optimizer(torch.optim.SGD(ps, lr=1.0), lambda step: 1.0, ps)
                for name, ps in (("body", body), ("head", own))
            },
            precision="fp64",
        )
        batches = {n: [[GradientBatch(stream=n, gradient=g)]] for n, g in gradients.items()}
        members = [n for n in gradients if n != "dev"]
        criterion = (
            Meta(MetaConfig(same_head=True, **options))
            if "dev" in gradients
            else MultiTask(MultiTaskConfig(**options))
        )
        model.task_logits.copy_(criterion.initial_logits(len(members)))
        before = model.encoder.weight[0].detach().clone()
        engine.begin(0)
        logs = updates.update(engine, model, batches, members, criterion, SGD)
        return model, before - model.encoder.weight[0].detach(), logs

    return make


OPPOSED = {"auxiliary.a": [1.0, 2.0, 2.0], "endtask": [-2.0, -4.0, -4.0], "dev": [0.5, 1.0, 1.0]}


def test_weights_start_equal(linear):
    """Weights 1 / T, so that the step is the mean of the gradients (sheet B6, i)."""
    gradients = {
        "auxiliary.a": [3.0, 0.0, 0.0],
        "auxiliary.b": [0.0, 6.0, 0.0],
        "endtask": [9.0] * 3,
    }
    _, step, logs = linear(gradients)
    assert [logs[f"alpha_{n}"] for n in ("a", "b", "endtask")] == pytest.approx([1 / 3] * 3)
    assert step.tolist() == pytest.approx([4.0, 5.0, 3.0])


def test_logits_move_by_twice_the_rate(linear):
    """Cosines +1 and -1: after one update the weights are sigmoid(+-2 eta) (sheet B6, ii)."""
    model, step, logs = linear(OPPOSED, weight_lr=0.3)
    assert float(logs["cosine_a"]) == pytest.approx(1.0)
    assert float(logs["cosine_endtask"]) == pytest.approx(-1.0)
    assert (model.task_logits[0] - model.task_logits[1]).item() == pytest.approx(0.6)
    alphas = model.task_logits.softmax(0)
    assert alphas[0].item() == pytest.approx(1 / (1 + math.exp(-0.6)))
    assert alphas[1].item() == pytest.approx(1 / (1 + math.exp(0.6)))
    # Half of each: the weights moved after the step.
    assert step.tolist() == pytest.approx([-0.5, -1.0, -1.0])


def test_weights_can_move_before_the_step(linear):
    """Algorithm 1: the step is taken with the new weights."""
    _, step, logs = linear(OPPOSED, weight_lr=0.3, algorithm_1=True)
    new = 1 / (1 + math.exp(-0.6))
    assert logs["alpha_a"] == pytest.approx(new)
    assert step[0].item() == pytest.approx(new * 1.0 - (1 - new) * 2.0)


def test_dot_product_instead_of_cosine(linear):
    model, _, logs = linear(OPPOSED, weight_lr=0.1, similarity="dot")
    assert float(logs["dot_a"]) == pytest.approx(4.5)
    assert model.task_logits.tolist() == pytest.approx([0.45, -0.9])


def test_lm_head_shrinks_the_cosine_of_its_task(linear):
    """Over the whole body the LM head adds to the length of its task's gradient alone (B8.4)."""
    _, _, over_encoder = linear(OPPOSED, heads=4.0)
    _, _, over_body = linear(OPPOSED, heads=4.0, similarity_over="body")
    assert float(over_encoder["cosine_a"]) == pytest.approx(1.0)
    assert float(over_body["cosine_a"]) == pytest.approx(3 / 5)
    assert float(over_body["cosine_endtask"]) == pytest.approx(-1.0)


def test_a_vanishing_gradient_moves_nothing(linear):
    gradients = OPPOSED | {"auxiliary.a": [0.0, 0.0, 0.0]}
    model, _, logs = linear(gradients, weight_lr=0.3)
    assert float(logs["cosine_a"]) == 0 and model.task_logits.tolist() == pytest.approx([0, -0.3])


@pytest.mark.parametrize("scaled", [True, False])
def test_heads_are_scaled_or_not(linear, scaled):
    """Gradient 8 of each head; weights 1/4 and 3/4; Algorithm 1 leaves heads as they are (B8.6)."""
    gradients = {n: OPPOSED[n] for n in ("auxiliary.a", "endtask")}
    torch.manual_seed(0)
    start = Line(2)
    torch.manual_seed(0)
    model, step, _ = linear(gradients, heads=8.0, weights=[1, 3], algorithm_1=not scaled)
    moved = {n: (start.heads[n].weight - model.heads[n].weight).item() for n in ("lm", "sentence")}
    assert moved["lm"] == pytest.approx(2.0 if scaled else 8.0)
    assert moved["sentence"] == pytest.approx(6.0 if scaled else 8.0)
    assert step[0].item() == pytest.approx(0.25 * 1 - 0.75 * 2)


def test_an_update_that_is_not_finite_leaves_the_weights(linear):
    gradients = OPPOSED | {"auxiliary.a": [math.inf, 0.0, 0.0]}
    model, step, _ = linear(gradients, weight_lr=0.3)
    assert model.task_logits.tolist() == [0, 0] and not step.any()


@pytest.mark.parametrize("algorithm_1", [False, True])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_development_gradient_that_is_not_finite(linear, similarity, algorithm_1):
    """Its loss is finite, and no step uses it, but the weights would: nothing moves."""
    options = {"similarity": similarity, "algorithm_1": algorithm_1, "weight_lr": 0.3}
    model, step, logs = linear(OPPOSED, spoilt="dev", **options)
    assert math.isfinite(logs["loss_dev"]) and math.isnan(logs[f"{similarity}_a"])
    assert model.task_logits.tolist() == [0, 0] and not step.any()


# ---------------------------------------------------------------------- with real text


def test_an_update_without_similarities_is_skipped(topics, tmp_path):
    """trainer.on_nonfinite decides about a development gradient, as about others."""
    run = build(topics, tmp_path, "tartan_meta", "trainer.on_nonfinite=skip")

    def spoil(head, inputs, scores):
        # The body is fixed in the fitting of this head, not in the pass that gives the gradient.
        if inputs[0].requires_grad and run.trainer.update == 1:
            scores.register_hook(lambda grad: grad * math.nan)

    run.model.heads["meta"].register_forward_hook(spoil)
    run.train()
    (event,) = logged(tmp_path, "event")
    message = event["message"]
    assert message.startswith("update 2: ") and "body, head is" in message
    assert len(logged(tmp_path)) == 4 and all(w.isfinite().all() for w in weights(run).values())


def test_meta_without_a_rate_is_multitask(topics, tmp_path):
    """With eta 0 every weight of the model is the same to the last bit (sheet B6, iv)."""
    runs = []
    for name, more in (("tartan_mt", []), ("tartan_meta", ["criterion.weight_lr=0"])):
        run = build(topics, tmp_path / name, name, TWO, "trainer.max_update=6", *more)
        run.train()
        runs.append(weights(run))
    assert not any(name.startswith("heads.meta") for name in runs[0])
    assert runs[0].keys() == {n for n in runs[1] if not n.startswith("heads.meta.")}
    assert same(*runs)


def test_fitting_the_meta_head_changes_nothing_else(topics, tmp_path):
    """It moves, and no other weight does (sheet B6, v)."""
    run = build(topics, tmp_path, "tartan_meta")
    run.model.train()
    before = weights(run)
    engine = run.engine
    engine.begin(0)
    (rows,) = batches_of(run)["head"]
    how = run.task.criterion.config
    logs = updates._fit_meta_head(engine, run.model, rows, how, run.config.optimizer)
    after = weights(run)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("heads.meta.")}
    assert logs["meta_head_steps"] == 10
    assert all(p.grad is None for p in run.model.parameters())


def test_fitting_keeps_no_graph_of_the_body(topics, tmp_path):
    """States do not require gradients in the fitting, and in the passes around it they do."""
    run = build(topics, tmp_path, "tartan_meta")
    seen: list[tuple[str, bool]] = []

    def note(name: str):
        return lambda module, inputs: seen.append((name, inputs[0].requires_grad))

    for name in ("meta", "sentence"):
        run.model.heads[name].register_forward_pre_hook(note(name))
    one_update(run)
    assert seen == [("sentence", True), *[("meta", False)] * 10, ("meta", True)]
    assert all(p.requires_grad for p in run.model.parameters())


def test_states_without_dropout_are_computed_once(topics, tmp_path, monkeypatch):
    """The fitting passes the body once, not ten times, and no bit of the weights changes."""
    runs, passes = [], []
    for name, again in (("once", False), ("again", True)):
        with monkeypatch.context() as patch:
            if again:
                patch.setattr(updates, "has_dropout", lambda net: True)
            none = ["model.dropout=0", "model.attention_dropout=0"]
            run = build(topics, tmp_path / name, "tartan_meta", *none)
            seen: list[bool] = []
            run.model.encoder.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
            one_update(run)
        runs.append(weights(run))
        passes.append(len(seen))
    assert passes[1] - passes[0] == run.task.criterion.config.meta_head_steps - 1
    assert same(*runs)


def test_states_with_dropout_are_computed_in_every_step(topics, tmp_path):
    run = build(topics, tmp_path, "tartan_meta", "model.dropout=0.1")
    engine = run.engine
    seen: list[int] = []
    run.model.encoder.register_forward_hook(lambda *_: seen.append(0))
    engine.begin(0)
    (rows,) = batches_of(run)["head"]
    updates._fit_meta_head(engine, run.model, rows, run.task.criterion.config, run.config.optimizer)
    assert len(seen) == 10


def test_the_meta_head_learns(topics, tmp_path):
    """More steps lead to a lower loss on the rows it is fitted to; the tolerance ends it early."""
    last = {}
    for name, more in {
        "ten": [],
        "many": ["criterion.meta_head_steps=200", "criterion.meta_head_tolerance=0"],
        "patient": ["criterion.meta_head_steps=200", "criterion.meta_head_tolerance=1e-2"],
    }.items():
        run = build(topics, tmp_path / name, "tartan_meta", *EXACT, *more)
        last[name] = one_update(run)
    assert last["many"]["meta_head_steps"] == 200
    assert last["many"]["meta_head_loss"] < last["ten"]["meta_head_loss"] - 0.02
    assert last["patient"]["meta_head_steps"] < 10


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_meta_head_is_fitted_by_adam_with_its_own_decay(decay, topics, tmp_path):
    """Without decay the paper's Adam, with it the code's AdamW, step by step (B8.9)."""
    more = [f"criterion.meta_head_weight_decay={decay}", "criterion.algorithm_1=true"]
    still = ["model.dropout=0", "model.attention_dropout=0", "criterion.meta_head_tolerance=0"]
    run = build(topics, tmp_path, "tartan_meta", *EXACT, *more, *still)
    engine, how = run.engine, run.task.criterion.config
    engine.begin(0)
    (rows,) = batches_of(run)["head"]
    head = copy.deepcopy(run.model.heads["meta"])
    parameters = [head.get_parameter(name) for name, _ in head.named_parameters()]
    kind, decays = (torch.optim.AdamW, {"weight_decay": decay}) if decay else (torch.optim.Adam, {})
    own = run.config.optimizer
    adam = kind(parameters, how.meta_head_lr, tuple(own.betas), own.eps, **decays)
    (batch,) = rows
    with torch.no_grad():
        states = updates.states_of(run.model, batch)
    for _ in range(how.meta_head_steps):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(head(states), batch.targets).backward()
        adam.step()
    updates._fit_meta_head(engine, run.model, rows, how, own)
    for name, wanted in head.named_parameters():
        found = run.model.heads["meta"].get_parameter(name)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_the_meta_head_is_reset_or_carried(topics, tmp_path):
    """Reset: the start of the fitting is a draw of its own; carried: it is the last end (B8.3)."""
    reset = build(topics, tmp_path / "a", "tartan_meta", "criterion.meta_head_steps=0")
    carried = build(
        topics,
        tmp_path / "b",
        "tartan_meta",
        *("criterion.meta_head_steps=0", "criterion.algorithm_1=true"),
    )
    name = "heads.meta.out.weight"
    seen = [weights(reset)[name]]
    kept = weights(carried)[name]
    for number in range(2):
        one_update(reset, number)
        one_update(carried, number)
        seen.append(weights(reset)[name])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert seen[2].abs().max() <= 1 / 4  # 1 / sqrt(16), torch's own start
    assert torch.equal(weights(carried)[name], kept)


def test_a_carried_meta_head_is_fitted_further(topics, tmp_path):
    """The fit goes on from that of the update before; reset, from a draw (B8.3)."""
    for reset in (False, True):
        how = ["criterion.meta_head_steps=3", f"criterion.algorithm_1={not reset}"]
        run = build(topics, tmp_path / str(reset), "tartan_meta", *how)
        name, seen = "heads.meta.out.weight", []
        run.model.heads["meta"].register_forward_pre_hook(
            lambda *_: seen.append(weights(run)[name])
        )
        ends = [weights(run)[name]]
        starts = []
        for number in range(2):
            seen.clear()
            one_update(run, number)
            starts.append(seen[0])
            assert torch.equal(seen[-1], weights(run)[name])
            ends.append(seen[-1])
        assert not torch.equal(ends[1], starts[0]) and not torch.equal(ends[2], starts[1])
        assert torch.equal(starts[1], ends[1]) != reset
        assert torch.equal(starts[0], ends[0]) != reset


@pytest.mark.parametrize("own", [True, False], ids=["own heads", "one head"])
@pytest.mark.parametrize("criterion", ["tartan_mt", "tartan_meta"])
def test_gradient_is_that_of_the_weighted_loss(criterion, own, topics, tmp_path):
    """An SGD step is autograd's on sum alpha_k L_k; one head learns from both tasks."""
    sgd = ["optimizer=sgd", "optimizer.lr=1", "optimizer.clip_norm=0"]
    sgd += ["task.head_lr=1", "task.head_weight_decay=0"]
    sgd += ["criterion.weights=[1,2,5]", f"task.fidelity={'paper' if own else 'authors'}"]
    run = build(topics, tmp_path, criterion, TWO, *EXACT, *sgd)
    before = weights(run)
    lm_heads = {name.split(".")[1] for name in before if name.startswith("heads.lm")}
    assert lm_heads == ({"lm", "lm1"} if own else {"lm"})
    batches = batches_of(run)
    total = 0.0
    for share, name in zip((1 / 8, 2 / 8, 5 / 8), run.task.members):
        (rows,) = batches[name][0]
        (term,) = (t for t in task_terms(run.model, rows).values() if t.weight)
        total = total + share * term.sum / rows.sizes[term.per]
    named = {n: p for n, p in run.model.named_parameters() if not n.startswith("heads.meta.")}
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    one_update(run)
    after = weights(run)
    for (name, _), grad in zip(named.items(), grads):
        step = before[name] - after[name]
        wanted = torch.zeros_like(step) if grad is None else grad
        assert (step - wanted).abs().max() < 1e-12, name


def test_body_and_head_are_clipped_apart(topics, tmp_path):
    """Each step of SGD at rate 1 is as long as the norm that its gradient is clipped to."""
    sgd = ["optimizer=sgd", "optimizer.lr=1", "optimizer.clip_norm=0.01"]
    run = build(
        topics, tmp_path, "tartan_mt", *EXACT, *sgd, "task.head_lr=1", "task.head_weight_decay=0"
    )
    before = weights(run)
    one_update(run)
    lengths = {"body": 0.0, "head": 0.0}
    for name, after in weights(run).items():
        kind = "head" if name.startswith("heads.sentence") else "body"
        lengths[kind] += ((after - before[name]) ** 2).sum().item()
    assert [math.sqrt(x) for x in lengths.values()] == pytest.approx([0.01, 0.01], rel=1e-3)


def test_the_same_head_favours_the_end_task(topics, tmp_path):
    """Its weight rises, and further than with a head of its own (section 5.4; sheet B6, iii)."""
    last = {}
    more = ["trainer.max_update=40", "criterion.weight_lr=0.1", "optimizer.lr=0.001"]
    more += ["trainer.valid_split=''", "task.batch_size=24", *EXACT]
    for same_head in (True, False):
        save = tmp_path / str(same_head)
        build(topics, save, "tartan_meta", *more, f"criterion.same_head={same_head}").train()
        last[same_head] = [row["alpha_endtask"] for row in logged(save)]
    assert last[True][0] == last[False][0] == 0.5
    assert last[True][-1] > 0.65 and last[True][-1] > last[False][-1] + 0.05
