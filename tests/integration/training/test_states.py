"""Frozen states: those of the run's encoder, of each layer, with the reach of its objective."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from battery import configure

from metaseq_lm.core.batch import Layout, TokenBatch, as_tensor
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.training.parts import Parts, build_parts, prepare_config
from metaseq_lm.training.states import EncoderStates

LENGTHS = np.array([9, 4, 7, 4, 12, 5])
CASES = [
    ("masked_lm", 0),
    ("masked_lm", 1),  # of the student of a pair
    ("masked_lm", 4),  # TARTAN
    ("causal_lm", 0),
    ("prefix_lm", 0),
    ("masked_next_token", 1),  # of a mixture
    ("electra_rtd", 0),
    ("electric_nce", 0),
    ("meta_pseudo_label_hard", 0),
    ("meta_pseudo_label_soft", 0),
    ("bert_pretraining", 0),
    ("bam_distill", 1),
    ("sentence_prediction", 0),
    ("span_corruption", 0),
    ("span_corruption", 2),  # of the encoder
]


class SomeRows:
    """Rows of random tokens; a token in three has a target, 0 or 1."""

    lengths = LENGTHS

    def __init__(self, parts: Parts) -> None:
        vocabulary = parts.task.vocabulary
        rng = np.random.default_rng(1)
        self.tokens = rng.integers(len(vocabulary) - 5, len(vocabulary), (6, 12))
        self.tokens[:, 0] = vocabulary.cls()
        self.targets = rng.integers(-4, 2, (6, 12)).clip(min=-1)
        for row, length in enumerate(LENGTHS):
            self.tokens[row, length - 1 :] = vocabulary.sep
            self.tokens[row, length:] = vocabulary.pad
            self.targets[row, length - 1 :] = -1
        self.targets[:, 0] = -1

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> TokenBatch:
        lengths = LENGTHS[samples]
        width = int(lengths.max())
        return TokenBatch(
            tokens=as_tensor(self.tokens[samples, :width].copy()),
            layout=layout_of(lengths, width),
            targets=as_tensor(self.targets[samples, :width].copy()),
            segments=torch.zeros(len(samples), width, dtype=torch.long),
        )


def open_case(moons: Path, folder: Path, case: tuple[str, int]) -> Parts:
    config = configure(moons, folder, case, "engine.precision=fp64")
    return build_parts(prepare_config(config), dry_run=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_states_are_those_of_the_encoder(moons, tmp_path, case):
    parts = open_case(moons, tmp_path, case)
    rows, states = SomeRows(parts), EncoderStates(parts)
    parts.model.train()  # dropout must be switched off
    at_words = states.at_targets(rows, np.arange(6))
    means = states.means(rows, np.arange(6))
    encoder = getattr(parts.model, "student", parts.model).encoder
    causal = case[0] == "causal_lm"
    words = []
    for row, length in enumerate(LENGTHS):
        tokens = torch.from_numpy(rows.tokens[row : row + 1, :length].copy())
        tokens[:, 0] = parts.task.vocabulary.cls(parts.task.text_token)
        layout = Layout(reach="causal" if causal else "both")
        with torch.no_grad():
            final = encoder.eval()(tokens, layout, torch.zeros_like(tokens))[0]
        assert means[-1][row] == pytest.approx(final[1 : length - 1].mean(0).numpy(), abs=1e-6)
        words.append(final[rows.targets[row, :length] >= 0])
    assert at_words[-1] == pytest.approx(torch.cat(words).numpy(), abs=1e-6)
    assert len(at_words) == len(encoder.stack.layers) + 1
    # In any order and batches.
    order = np.array([4, 0, 2])
    small = EncoderStates(parts, batch_tokens=9)
    assert small.means(rows, order)[1] == pytest.approx(means[1][order], abs=1e-6)
    again = small.at_targets(rows, np.arange(6)[::-1])[0]
    assert np.sort(again, axis=0) == pytest.approx(np.sort(at_words[0], axis=0), abs=1e-6)


def test_a_criterion_may_say_the_layout(moons, tmp_path):
    parts = open_case(moons, tmp_path, ("masked_lm", 0))
    rows, first = SomeRows(parts), np.array([0])

    def by_groups(tokens: torch.Tensor, layout: Layout) -> Layout:
        ranks = (torch.arange(tokens.shape[1]) // 3).expand(tokens.shape)
        return replace(layout, reach="ranked", ranks=ranks)

    before = EncoderStates(parts).means(rows, first)[-1]
    parts.task.criterion.layout = by_groups
    after = EncoderStates(parts).means(rows, first)[-1]
    length = LENGTHS[0]
    tokens = torch.from_numpy(rows.tokens[:1, :length].copy())
    tokens[:, 0] = parts.task.vocabulary.cls(parts.task.text_token)
    with torch.no_grad():
        wanted = parts.model.eval().encoder(tokens, by_groups(tokens, Layout()))[0]
    assert after[0] == pytest.approx(wanted[1 : length - 1].mean(0).numpy(), abs=1e-6)
    assert np.abs(after - before).max() > 1e-6


def test_a_causal_model_sees_the_left_only(moons, tmp_path):
    for case, sees_right in ((("causal_lm", 0), False), (("masked_lm", 0), True)):
        parts = open_case(moons, tmp_path, case)
        rows, states = SomeRows(parts), EncoderStates(parts)
        rows.targets[:] = -1
        rows.targets[:, 1] = 0
        before = states.at_targets(rows, np.arange(6))[-1]
        rows.tokens[:, 2] -= 1
        after = states.at_targets(rows, np.arange(6))[-1]
        assert (np.abs(after - before).max() > 1e-9) == sees_right


@pytest.mark.parametrize("case", [("language_modeling", 0), ("two_tower_cloze", 0), ("tagging", 0)])
def test_models_without_layers_are_refused(moons, tmp_path, case):
    with pytest.raises(UsageError, match="no Transformer encoder"):
        EncoderStates(open_case(moons, tmp_path, case))
