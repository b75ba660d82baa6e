"""The pictures of docs/objectives show the attention and the targets of real models.

What they show is compared with derivatives of a model with random weights: a key is seen by a query
if the query's state, and its part of the loss, depend on the embedding of the key; and the token
that a state predicts is the one whose logit the loss raises.

Shapes: B rows, Q queries, K keys.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from objective_catalogue import (
    CATALOGUE,
    DECODER,
    ENCODER,
    GENERATOR,
    TOWERS,
    Objective,
    Panel,
    Picture,
)
from objective_pictures import PAGES, drawn_pictures, with_text
from objective_views import Reading, Run, make_data, open_runs, read, target_names, view
from torch import Tensor, nn

from metaseq_lm.forward.passes import _is_optimized
from metaseq_lm.models.transformer.attention import Visibility
from metaseq_lm.models.transformer.decoder import Decoder
from metaseq_lm.models.transformer.encoder import BinaryHead, Embeddings, LMHead, Stack

PICTURES = [(objective, picture) for objective in CATALOGUE for picture in objective.pictures]
EACH = pytest.mark.parametrize(
    "objective, picture", PICTURES, ids=[picture.name for _, picture in PICTURES]
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_data(tmp_path_factory.mktemp("pictures"))


# ------------------------------------------------------------------------ derivatives


@dataclass
class Graph:
    """The tensors of a pass: embeddings, states and heads' inputs and outputs, by module."""

    embedded: list[Tensor] = field(default_factory=list)  # of each call
    keys: dict[str, list[int]] = field(default_factory=dict)  # which of these a net reads
    states: dict[str, Tensor] = field(default_factory=dict)
    heads: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)


@contextmanager
def watched(model: nn.Module) -> Iterator[Graph]:
    """Record the graph of passes inside the block; embeddings are its leaves."""
    graph, handles = Graph(), []

    def embed(module: nn.Module, args: object, output: Tensor) -> Tensor:
        graph.embedded.append(output.detach().requires_grad_())
        return graph.embedded[-1]

    for path, module in model.named_modules():
        if isinstance(module, Embeddings):
            handles.append(module.register_forward_hook(embed))
        elif isinstance(module, Stack | Decoder):

            def run_net(module: nn.Module, args: object, output: Tensor, path: str = path) -> None:
                memory = graph.keys[ENCODER] if isinstance(module, Decoder) else []
                graph.keys[path] = [*memory, len(graph.embedded) - 1]
                graph.states[path] = output

            handles.append(module.register_forward_hook(run_net))
        elif isinstance(module, LMHead | BinaryHead):

            def run_head(module: nn.Module, args: tuple, output: Tensor, path: str = path) -> None:
                graph.heads.append((path, args[0], output))

            handles.append(module.register_forward_hook(run_head))
    try:
        yield graph
    finally:
        for handle in handles:
            handle.remove()


def support(graph: Graph, outputs: Tensor, weights: Tensor, row: int) -> list[Tensor]:
    """Return on which tokens of a row of each call's embeddings `outputs` depend, boolean (K,)."""
    grads = torch.autograd.grad(
        outputs, graph.embedded, weights, retain_graph=True, allow_unused=True
    )
    parts = []
    for leaf, grad in zip(graph.embedded, grads):
        depends = torch.zeros(leaf.shape[:2], dtype=torch.bool)
        depends = depends if grad is None else (grad != 0).any(-1)
        assert not torch.cat([depends[:row], depends[row + 1 :]]).any(), "another row is seen"
        parts.append(depends[row])
    return parts


def keys_of(graph: Graph, net: str, parts: list[Tensor]) -> Tensor:
    """Return on which keys of a net something depends (K,); it depends on nothing else."""
    calls = graph.keys[f"{net}.left" if net == TOWERS else net]
    assert not any(part.any() for call, part in enumerate(parts) if call not in calls)
    return torch.cat([parts[call] for call in calls])


def seen_by_states(graph: Graph, net: str, row: int) -> Tensor:
    """Return on which keys the state of each query of a row depends, (Q, K)."""
    states = graph.states[net]
    rows = []
    for query in range(states.shape[1]):
        weights = torch.zeros_like(states)
        weights[row, query] = torch.randn(states.shape[-1], dtype=states.dtype)
        rows.append(keys_of(graph, net, support(graph, states, weights, row)))
    return torch.stack(rows)


def seen_by_loss(graph: Graph, net: str, row: int, loss: Tensor) -> tuple[dict, dict]:
    """Return, by query of a row that predicts something, the keys (K,) and the id of the target."""
    seen, targets = {}, {}
    for path, states, outputs in graph.heads:
        if net_of_head(graph, path) != net:
            continue
        by_state, by_output = torch.autograd.grad(loss, [states, outputs], retain_graph=True)
        width = states.shape[-1]
        for at in by_state.reshape(-1, width).any(-1).nonzero().flatten().tolist():
            place = place_of(graph, net, states, at)
            if place[0] != row:
                continue
            weights = torch.zeros_like(states)
            weights.view(-1, width)[at] = by_state.reshape(-1, width)[at]
            assert place[1] not in seen, "a query has two predictions"
            seen[place[1]] = keys_of(graph, net, support(graph, states, weights, row))
            logits = by_output.reshape(by_state.shape[:-1].numel(), -1)[at]
            # The loss falls as the logit of the target rises; a detector's label is that rise.
            raised = (logits < 0).nonzero().flatten()
            targets[place[1]] = int(logits < 0) if len(logits) == 1 else int(raised.item())
    return seen, targets


def net_of_head(graph: Graph, path: str) -> str:
    """Return the net whose states a head reads."""
    if path.startswith("generator."):
        return GENERATOR if GENERATOR in graph.states else TOWERS
    return DECODER if DECODER in graph.states else ENCODER


def place_of(graph: Graph, net: str, states: Tensor, at: int) -> tuple[int, int]:
    """Return row and query of one of the states that a head reads: that of an equal state.

    All states are read in their order: the first ones of two documents are equal in a causal row.
    States of two towers are read together.
    """
    if net == TOWERS or torch.equal(states, graph.states[net]):
        return divmod(at, states.shape[1])
    same = (graph.states[net] == states.reshape(-1, states.shape[-1])[at]).all(-1)
    ((row, query),) = same.nonzero().tolist()
    return row, query


def compare(objective: Objective, picture: Picture, data: dict[str, Path]) -> None:
    """Raise AssertionError unless a picture shows what derivatives say."""
    runs = open_runs(objective, picture, data[picture.corpus], "engine.precision=fp64")
    for part, run in enumerate(runs):
        with watched(run.model) as graph:
            readings, terms = read(run)
        loss = sum(term.sum * term.weight for term in terms.values() if _is_optimized(term))
        torch.manual_seed(0)
        for panel in picture.panels:
            if panel.part == part:
                compare_panel(run, panel, readings, graph, loss)


def compare_panel(
    run: Run, panel: Panel, readings: dict[str, Reading], graph: Graph, loss: Tensor
) -> None:
    """Raise AssertionError unless a panel shows what derivatives of the loss say."""
    item, reading = view(run, panel, readings), readings[panel.net]
    real = [part[panel.row] != run.task.vocabulary.pad for part in (reading.tokens, reading.keys)]
    seen, targets = seen_by_loss(graph, panel.net, panel.row, loss)
    assert item.targets == words(run, panel.net, targets), panel.title
    for query, keys in seen.items():
        assert torch.equal(item.seen[query], keys[real[1]]), (panel.title, query)
        assert not keys[~real[1]].any()
    if panel.net != TOWERS:
        by_states = seen_by_states(graph, panel.net, panel.row)[real[0]]
        assert torch.equal(item.seen, by_states[:, real[1]]), panel.title
        assert not by_states[:, ~real[1]].any()


def words(run: Run, net: str, targets: dict[int, int]) -> dict[int, str]:
    names = target_names(run, net)
    return {query: names[target] for query, target in targets.items()}


@EACH
def test_pictures_show_what_the_loss_depends_on(objective, picture, data):
    compare(objective, picture, data)


@pytest.mark.parametrize(
    "name, query, key",
    [
        ("causal_lm_documents", 2, 4),
        ("prefix_lm", 7, 8),
        ("masked_lm", 1, 9),
        ("span_corruption_decoder", 1, 3),
        ("electric", 1, 0),
    ],
)
def test_wrong_pictures_are_refused(name, query, key, data, monkeypatch):
    """If one cell is recorded wrongly."""
    hide = Visibility.hide

    def hide_wrongly(self: Visibility, scores: Tensor) -> Tensor:
        hidden = hide(self, scores)
        hidden[..., query, key] = 0.0 if hidden[0, 0, query, key] < 0 else float("-inf")
        return hidden

    monkeypatch.setattr(Visibility, "hide", hide_wrongly)
    ((objective, picture),) = [pair for pair in PICTURES if pair[1].name == name]
    with pytest.raises(AssertionError):
        compare(objective, picture, data)


# ------------------------------------------------------------------------ files


def test_pictures_are_those_that_the_code_draws(tmp_path):
    """If not, run docs/objective_pictures.py and look at them."""
    drawn = list(drawn_pictures(tmp_path))
    files = {path.stem for path in (PAGES / "pictures").iterdir()}
    assert files == {picture.name for _, picture, _, _ in drawn}
    for objective, picture, svg, described in drawn:
        file = PAGES / "pictures" / f"{picture.name}.svg"
        assert file.read_text(encoding="utf-8") == svg, picture.name
        page = (PAGES / f"{objective.name}.md").read_text(encoding="utf-8")
        assert f"![{described}](pictures/{picture.name}.svg)" in page, picture.name
        assert with_text(page, picture.name, described) == page


def test_texts_of_pictures_are_replaced():
    page = "a ![old](pictures/one.svg) b ![old](pictures/two.svg)"
    changed = with_text(page, "two", r"\1 new")
    assert changed == r"a ![old](pictures/one.svg) b ![\1 new](pictures/two.svg)"


@EACH
def test_pictures_are_readable_on_a_narrow_screen(objective, picture):
    """Of 390 pixels 358 are the page's; letters have 9 at least, and none lies outside."""
    svg = (PAGES / "pictures" / f"{picture.name}.svg").read_text(encoding="utf-8")
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups())
    sizes = [float(size) for size in re.findall(r"font-size: (\d+)px", svg)]
    assert min(sizes) * 358 / width >= 9
    assert "prefers-color-scheme: dark" in svg
    for x, y in re.findall(r' x="(\S+)" y="(\S+)"', svg):
        assert 0 <= float(x) <= width and 0 <= float(y) <= height
