"""The modern encoder: equal to the transformers library's, by distance, packed, of second order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from second_order import double_backward
from torch import nn

from metaseq_lm.core.batch import Layout
from metaseq_lm.forward.context import ForwardContext, use_context
from metaseq_lm.models.transformer.configs import ModernConfig
from metaseq_lm.models.transformer.encoder import TransformerLM

VOCABULARY, LENGTH, HALF = 50, 40, 4
SIZES = ModernConfig(
    encoder_layers=4,
    encoder_embed_dim=32,
    encoder_ffn_embed_dim=48,
    encoder_attention_heads=4,
    local_window=2 * HALF,
    global_theta=160_000.0,
)
LENGTHS = torch.tensor([40, 29, 7])
TOKENS = torch.randint(5, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]

NAMES = (
    ("encoder.embeddings.tokens", "model.embeddings.tok_embeddings"),
    ("encoder.embeddings.norm", "model.embeddings.norm"),
    ("encoder.stack.norm", "model.final_norm"),
    ("encoder.stack.layers", "model.layers"),
    ("attention.in_proj", "attn.Wqkv"),
    ("attention.out_proj", "attn.Wo"),
    ("attention_norm", "attn_norm"),
    ("fc1", "mlp.Wi"),
    ("fc2", "mlp.Wo"),
    ("ffn_norm", "mlp_norm"),
    ("heads.lm.bias", "decoder.bias"),
)


def spread(model: nn.Module) -> nn.Module:
    """Return the model with weights so large that each part of it shows in the logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model.eval()


def build(**changes: Any) -> TransformerLM:
    """Return a small model with large weights."""
    model = spread(TransformerLM(replace(SIZES, **changes), VOCABULARY))
    assert isinstance(model, TransformerLM)
    return model


def foreign(model: TransformerLM, config: ModernConfig, causal: bool) -> nn.Module:
    """Return the library's model with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": config.encoder_embed_dim,
        "intermediate_size": config.encoder_ffn_embed_dim,
        "num_hidden_layers": config.encoder_layers,
        "num_attention_heads": config.encoder_attention_heads,
        "hidden_activation": config.gate,
        "local_attention": config.local_window,
        "layer_types": [
            "sliding_attention" if config.scope(n).window else "full_attention"
            for n in range(config.encoder_layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.global_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.local_theta},
        },
        **dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 1),
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    kind = "ModernBertDecoder" if causal else "ModernBert"
    head = "ForCausalLM" if causal else "ForMaskedLM"
    made = getattr(transformers, f"{kind}Config")(**options)
    net: nn.Module = getattr(transformers, f"{kind}{head}")(made).eval()
    weights = model.state_dict()
    theirs = {}
    for name, weight in weights.items():
        for ours, other in NAMES:
            name = name.replace(ours, other)
        name = name.replace("heads.lm", "lm_head" if causal else "head")
        if "Wqkv" in name and causal:
            parts = zip("qkv", weight.chunk(3))
            theirs |= {name.replace("Wqkv", f"{part}_proj"): rows for part, rows in parts}
        else:
            theirs[name] = weight
    theirs["decoder.weight"] = theirs["model.embeddings.tok_embeddings.weight"]
    net.load_state_dict(theirs)
    return net


@pytest.mark.parametrize("gate", ["gelu", "silu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context", [ForwardContext, double_backward])
@torch.no_grad()
def test_logits_are_those_of_the_library(gate: str, causal: bool, context: Any) -> None:
    """The longest row has five local windows."""
    model = build(gate=gate)
    theirs = foreign(model, replace(SIZES, gate=gate), causal)
    layout = Layout(PADDING, reach="causal" if causal else "both")
    with use_context(context()):
        logits = model(TOKENS, layout)
    expected = theirs(input_ids=TOKENS, attention_mask=(~PADDING).long()).logits
    assert expected.std() > 1
    torch.testing.assert_close(logits[~PADDING], expected[~PADDING], atol=1e-5, rtol=1e-5)
