"""Compares an objective's results on rows of its data, with its model and with an export of it.

In a second pass the model of the transformers library replaces the encoder. Its states are the
model's concatenated outputs, and each head takes its own columns of them. The criterion does not
know it; one that takes the encoder apart, or computes something else with it, gets other numbers or
an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metaseq_lm.core.batch import ALL_VISIBLE, Layout
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.interop.check import LIMIT, foreign_outputs, import_transformers
from metaseq_lm.interop.heads import LABEL_RANGE
from metaseq_lm.interop.parts import ModulePart
from metaseq_lm.models.transformer.classifiers import SETS, SetHeads, module_name
from metaseq_lm.models.transformer.encoder import SentenceHead
from metaseq_lm.tasks import Passes
from metaseq_lm.tasks.protocols import passes_of, task_read_as
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import open_run

ROWS = 8
_ENGINE = [
    *("engine.device=cpu", "engine.precision=fp32", f"engine.micro_batch_size={ROWS}"),
    *("engine.parallel=replicate", "engine.recompute=none", "engine.compile=false"),
]
_WHOLE_HEADS = ("lm", "rtd")  # in other heads only the output layer is replaced
_SPAN = ("start", "end")


def check_objective(
    part: ModulePart,
    folder: Path,
    path: str,
    data: str | None,
    user_dir: str | None,
    labelled: str,
    overrides: Sequence[str] = (),
) -> str:
    """Return a line with the largest difference of scores and losses on some validation rows.

    Args:
        part: The exported model.
        folder: Its folder.
        path: The checkpoint.
        data: Data folder to use instead of the run's.
        user_dir: Plug-in that the run needs.
        labelled: The set of the exported head, if there are several.
        overrides: key=value changes of the run's configuration.

    Raises:
        MetaseqError: They differ, or the objective cannot use a model of this class.
    """
    name = part.foreign.architecture.name
    try:
        parts = open_run(path, data, user_dir, [*overrides, *_ENGINE])
        parts = replace(parts, task=task_read_as(parts.task))
        passes = _first_rows(parts, labelled)
    except MetaseqError as error:
        return f"{folder}: its objective was not compared, because its rows cannot be read: {error}"
    kind = getattr(import_transformers(), name)
    model: nn.Module = kind.from_pretrained(folder).float().eval()
    comparison = _ModelComparison(parts, part, model, labelled)
    criterion = parts.task.run_config.criterion._name
    try:
        differences = comparison.differences(passes)
    except Exception as error:  # a criterion that expects its own model may raise anything
        raise MetaseqError(
            f"{folder}: criterion {criterion} cannot be computed with a {name}: it uses the model "
            f"in a way that the class does not have ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:200]})"
        ) from error
    if not differences:
        raise MetaseqError(f"{folder}: criterion {criterion} uses no head that a {name} has")
    worst = max(differences, key=differences.__getitem__)
    if not differences[worst] <= LIMIT:
        raise MetaseqError(
            f"{folder}: criterion {criterion} computes something else with a {name}: {worst} "
            f"differ by up to {differences[worst]:.2e} on rows of {parts.config.data} ({LIMIT:.0e} "
            "allowed)"
        )
    return (
        f"{folder}: {criterion}'s own scores and losses differ by at most {differences[worst]:.2e}"
    )


def _first_rows(parts: Parts, labelled: str) -> Passes:
    """Return the first rows of each stream of the validation split, or of a labelled set's."""
    task, split = parts.task, parts.config.trainer.valid_split or "valid"
    streams = passes_of(task, split)
    chosen = {key: s for key, s in streams.items() if key.rpartition("/")[2] == labelled}
    return {
        key: [parts.engine.to_device(next(stream.one_epoch(parts.shard))[:1])]
        for key, stream in (chosen or streams).items()
    }


class _ModelComparison:
    """Two evaluations of a run on the same rows, the second with a model of the library."""

    def __init__(self, parts: Parts, part: ModulePart, model: nn.Module, labelled: str) -> None:
        self.parts = parts
        self.encoder = _LibraryEncoder(part, model, _encoder_of(parts.model).embeddings)
        self.module_paths = {
            head: _module_path_of(parts.model, head, labelled)
            for head in part.foreign.architecture.heads
        }

    def differences(self, passes: Passes) -> dict[str, float]:
        """Return the largest difference of the outputs of each head and of each loss."""
        outputs: list[Tensor] = []
        with _hooked(
            self.parts.model, self.module_paths, lambda head, output: outputs.append(output)
        ):
            ours = self.losses(passes)
        differences: dict[str, float] = {}
        expected = iter(outputs)

        def compare(head: str, output: Tensor) -> None:
            before = next(expected)
            difference = (output - before).abs() / before.abs().max().clamp(min=1)
            padding = self.encoder.padding
            if padding is not None and padding.shape == difference.shape[: padding.dim()]:
                difference = difference[~padding]
            largest = 0.0
            if difference.numel():
                largest = float(difference.max().nan_to_num(torch.inf))
            key = f"the outputs of head '{head}'"
            differences[key] = max(differences.get(key, 0.0), largest)

        self.exchange()
        with _hooked(self.parts.model, self.module_paths, compare):
            theirs = self.losses(passes)
        if not differences:
            return {}
        for name, loss in ours.items():
            difference = abs(loss - theirs[name]) / max(1.0, abs(loss))
            differences[f"the values of '{name}'"] = difference
        return differences

    def losses(self, passes: Passes) -> dict[str, float]:
        parts = self.parts
        with parts.evaluation_mode():
            metrics = parts.task.evaluate(parts.engine, parts.model, passes).metrics
        return {
            n: float(v)
            for n, v in metrics.items()
            if n in {"loss", *parts.engine.record.loss_terms}
        }

    def exchange(self) -> None:
        """Replace the encoder by the library's model, and heads by columns of its states."""
        model, encoder = self.parts.model, _encoder_of(self.parts.model)
        for module in model.modules():  # a module that shares the encoder's layers keeps them
            if module is not encoder and getattr(module, "stack", module) is None:
                module.stack = encoder.stack
        for head, path in self.module_paths.items():
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, name, _HeadColumns(self.encoder, head))
            for holder in (owner, model.get_submodule("heads")):
                if isinstance(holder, (SentenceHead, SetHeads)):
                    holder.pooler = None
        model.encoder = self.encoder


def _encoder_of(model: nn.Module) -> Any:
    """Return the encoder of a network; all exportable networks have that name."""
    return model.encoder


def _module_path_of(model: nn.Module, head: str, labelled: str) -> str:
    """Return the path of the module with the same output as a head of the library's class."""
    heads = model.heads
    if isinstance(heads, SetHeads):
        return SETS + module_name(labelled or heads.names[0])
    if head in _WHOLE_HEADS:
        return f"heads.{head}"
    return f"heads.{head}.out"


@contextmanager
def _hooked(model: nn.Module, module_paths: dict[str, str], record: Any) -> Iterator[None]:
    """Call `record(head, output)` after each call of the modules at `module_paths` inside."""

    def hook(head: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        record(head, output.detach())

    handles = [
        model.get_submodule(path).register_forward_hook(partial(hook, head))
        for head, path in module_paths.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _LibraryEncoder(nn.Module):
    """A model of the library in place of an encoder; its states are its concatenated outputs."""

    def __init__(self, part: ModulePart, model: nn.Module, embeddings: nn.Module) -> None:
        super().__init__()
        # Tied heads and noise models use the embeddings of the encoder.
        self.part, self.model, self.embeddings = part, model, embeddings
        self.columns: dict[str, slice] = {}
        self.padding: Tensor | None = None

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, layout: Layout = ALL_VISIBLE, segments: Tensor | None = None
    ) -> Tensor:
        """Return all outputs (..., S, K) for ids (..., S); one per row is repeated over S."""
        length, self.padding = tokens.shape[-1], layout.padding
        rows = tokens.reshape(-1, length)
        padding = layout.padding_of(tokens).reshape(-1, length)
        # Users of the class hide only padding: a layout that hides other tokens differs here.
        flat = Layout(padding & (rows == self.part.foreign.pad))
        if segments is not None:
            segments = segments.reshape(-1, length)
        if self.part.foreign.model.segments < 2:
            segments = None
        outputs = foreign_outputs(self.model, rows, flat, segments)
        label_range = self.part.original.get(LABEL_RANGE)
        if label_range is not None:
            outputs["sentence"] = (outputs["sentence"] - label_range[0]) / label_range[1]
        states, at = [], 0
        for head in self.part.foreign.architecture.heads:
            names = _SPAN if head == "span" else (head,)
            parts = [outputs[name] for name in names]
            if head in ("sentence", "next_sentence"):
                parts = [p.unsqueeze(1).expand(-1, length, -1) for p in parts]
            elif head in ("rtd", "span"):
                parts = [p.unsqueeze(-1) for p in parts]
            states += parts
            width = sum(p.shape[-1] for p in parts)
            self.columns[head] = slice(at, at + width)
            at += width
        return torch.cat(states, -1).reshape(*tokens.shape, -1)


class _HeadColumns(nn.Module):
    """The outputs of one head among the states of a LibraryEncoder."""

    def __init__(self, encoder: _LibraryEncoder, head: str) -> None:
        super().__init__()
        self.columns, self.head = encoder.columns, head

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return the columns (..., K) of states, or (...) for a head with one logit a token."""
        chosen = x[..., self.columns[self.head]]
        if self.head == "rtd":
            return chosen.squeeze(-1)
        return chosen
