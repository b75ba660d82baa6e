"""Tables of our parameter names and the names of the transformers library's tensors."""

import re
from dataclasses import dataclass

# Our parameter -> the foreign tensors that, concatenated by rows, make it.
Mapping = dict[str, tuple[str, ...]]

LAYER = {
    "attention.in_proj": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "attention.out_proj": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "fc1": ("intermediate.dense",),
    "fc2": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
_PRE_LN_LAYER = LAYER | {"attention_norm": ("attention.ln",), "ffn_norm": ("ln",)}
_DISTIL_LAYER = {
    "attention.in_proj": tuple(f"attention.{part}_lin" for part in "qkv"),
    "attention.out_proj": ("attention.out_lin",),
    "attention_norm": ("sa_layer_norm",),
    "fc1": ("ffn.lin1",),
    "fc2": ("ffn.lin2",),
    "ffn_norm": ("output_layer_norm",),
}
# Heads: our names below "heads.", and full names (theirs). A name that begins with a dot is one
# parameter, others are modules.
HEADS = {
    "bert": {
        "lm": {
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            ".bias": "cls.predictions.bias",
            ".weight": "cls.predictions.decoder.weight",
        },
        "next_sentence": {"pooler": "bert.pooler.dense", "out": "cls.seq_relationship"},
        "sentence": {"pooler": "bert.pooler.dense", "out": "classifier"},
        "token": {"out": "classifier"},
        "span": {"out": "qa_outputs"},
    },
    "roberta": {
        "lm": {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            ".bias": "lm_head.bias",
            ".weight": "lm_head.decoder.weight",
        },
        "pooler": {"dense": "roberta.pooler.dense"},
        "sentence": {"pooler": "classifier.dense", "out": "classifier.out_proj"},
        "token": {"out": "classifier"},
        "span": {"out": "qa_outputs"},
    },
    "electra": {
        "lm": {
            "dense": "generator_predictions.dense",
            "norm": "generator_predictions.LayerNorm",
            ".bias": "generator_lm_head.bias",
            ".weight": "generator_lm_head.weight",
        },
        "rtd": {
            "dense": "discriminator_predictions.dense",
            "out": "discriminator_predictions.dense_prediction",
        },
        "sentence": {"pooler": "classifier.dense", "out": "classifier.out_proj"},
        "token": {"out": "classifier"},
        "span": {"out": "qa_outputs"},
    },
}
DISTIL = "distilbert"  # BERT without segments
HEADS[DISTIL] = {
    "lm": {
        "dense": "vocab_transform",
        "norm": "vocab_layer_norm",
        ".bias": "vocab_projector.bias",
        ".weight": "vocab_projector.weight",
    },
    "sentence": {"pooler": "pre_classifier", "out": "classifier"},
    "token": {"out": "classifier"},
    "span": {"out": "qa_outputs"},
}
MODERN, _MODERN_DECODER = "modernbert", "modernbert-decoder"
_MODERN_LAYER: Mapping = {
    "attention.in_proj": ("attn.Wqkv",),
    "attention.out_proj": ("attn.Wo",),
    "attention_norm": ("attn_norm",),
    "fc1": ("mlp.Wi",),
    "fc2": ("mlp.Wo",),
    "ffn_norm": ("mlp_norm",),
}
_MODERN_DECODER_LAYER = _MODERN_LAYER | {
    "attention.in_proj": tuple(f"attn.{part}_proj" for part in "qkv")
}
for base, module in ((MODERN, "head"), (_MODERN_DECODER, "lm_head")):
    HEADS[base] = {
        "lm": {
            "dense": f"{module}.dense",
            "norm": f"{module}.norm",
            ".bias": "decoder.bias",
            ".weight": "decoder.weight",
        }
    }
MEGATRON = "megatron-bert"  # BERT with layer norms before attention and feed-forward networks
HEADS[MEGATRON] = HEADS["bert"]
FINE_TUNED = ("sentence", "token", "span")
# Copies of other tensors, and constants, that some folders also have.
COPIES = {
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
# Without tied weights, the head's bias is the other of the two.
TWINS = COPIES | {original: copy for copy, original in COPIES.items()}
CONSTANTS = re.compile(r"\w+\.embeddings\.(position_ids|token_type_ids)")
_BASE_PARTS = (
    *("embeddings.", "embeddings_project.", "encoder.", "transformer.", "pooler."),
    *("layers.", "final_norm."),
)


@dataclass(frozen=True)
class Architecture:
    """A class of the transformers library.

    Attributes:
        name: Name of the class.
        base: Its `model_type`.
        heads: The heads that it has.
        reach: What a token sees, "both" sides or "causal" (see core.batch.Layout).
    """

    name: str
    base: str
    heads: tuple[str, ...] = ()
    reach: str = "both"

    @property
    def activation(self) -> str:
        """The activation below the output layer of its sentence classifier."""
        return {"electra": "gelu", DISTIL: "relu"}.get(self.base, "tanh")

    @property
    def prefix(self) -> str:
        """The name of the backbone among the parameters."""
        if self.is_modern:
            return "model"
        if self.base == MEGATRON:
            return "bert"
        return self.base

    @property
    def is_modern(self) -> bool:
        """Whether it has rotary positions, gated networks, and no biases."""
        return self.base in (MODERN, _MODERN_DECODER)

    @property
    def has_segments(self) -> bool:
        """Whether it always has segment embeddings."""
        return not self.is_modern and self.base != DISTIL

    def offset(self, pad: int) -> int:
        """Return the rows of the position table before the first position; `pad` is an id."""
        return pad + 1 if self.base == "roberta" else 0

    @property
    def layer(self) -> Mapping:
        """The table of the parameters of a layer."""
        tables: dict[str, Mapping] = {
            MEGATRON: _PRE_LN_LAYER,
            DISTIL: _DISTIL_LAYER,
            MODERN: _MODERN_LAYER,
            _MODERN_DECODER: _MODERN_DECODER_LAYER,
        }
        return tables.get(self.base, LAYER)

    @property
    def layers(self) -> str:
        """The name of the list of layers."""
        if self.is_modern:
            return f"{self.prefix}.layers"
        if self.base == DISTIL:
            return f"{self.prefix}.transformer.layer"
        return f"{self.prefix}.encoder.layer"


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("BertModel", "bert"),
        Architecture("BertForMaskedLM", "bert", ("lm",)),
        Architecture("BertLMHeadModel", "bert", ("lm",), "causal"),
        Architecture("BertForPreTraining", "bert", ("lm", "next_sentence")),
        Architecture("BertForSequenceClassification", "bert", ("sentence",)),
        Architecture("BertForMultipleChoice", "bert", ("sentence",)),
        Architecture("BertForTokenClassification", "bert", ("token",)),
        Architecture("BertForQuestionAnswering", "bert", ("span",)),
        Architecture("DistilBertModel", DISTIL),
        Architecture("DistilBertForMaskedLM", DISTIL, ("lm",)),
        Architecture("DistilBertForSequenceClassification", DISTIL, ("sentence",)),
        Architecture("DistilBertForTokenClassification", DISTIL, ("token",)),
        Architecture("DistilBertForQuestionAnswering", DISTIL, ("span",)),
        Architecture("MegatronBertModel", MEGATRON),
        Architecture("MegatronBertForMaskedLM", MEGATRON, ("lm",)),
        Architecture("MegatronBertForCausalLM", MEGATRON, ("lm",), "causal"),
        Architecture("MegatronBertForPreTraining", MEGATRON, ("lm", "next_sentence")),
        Architecture("MegatronBertForSequenceClassification", MEGATRON, ("sentence",)),
        Architecture("MegatronBertForMultipleChoice", MEGATRON, ("sentence",)),
        Architecture("MegatronBertForTokenClassification", MEGATRON, ("token",)),
        Architecture("MegatronBertForQuestionAnswering", MEGATRON, ("span",)),
        Architecture("RobertaModel", "roberta"),
        Architecture("RobertaForMaskedLM", "roberta", ("lm",)),
        Architecture("RobertaForCausalLM", "roberta", ("lm",), "causal"),
        Architecture("RobertaForSequenceClassification", "roberta", ("sentence",)),
        Architecture("RobertaForTokenClassification", "roberta", ("token",)),
        Architecture("RobertaForQuestionAnswering", "roberta", ("span",)),
        Architecture("ElectraModel", "electra"),
        Architecture("ElectraForMaskedLM", "electra", ("lm",)),
        Architecture("ElectraForCausalLM", "electra", ("lm",), "causal"),
        Architecture("ElectraForPreTraining", "electra", ("rtd",)),
        Architecture("ElectraForSequenceClassification", "electra", ("sentence",)),
        Architecture("ElectraForTokenClassification", "electra", ("token",)),
        Architecture("ElectraForQuestionAnswering", "electra", ("span",)),
        Architecture("ModernBertModel", MODERN),
        Architecture("ModernBertForMaskedLM", MODERN, ("lm",)),
        Architecture("ModernBertDecoderForCausalLM", _MODERN_DECODER, ("lm",), "causal"),
    )
}


def canonical_name(name: str, prefix: str) -> str:
    """Return the current name of a tensor that is stored under an older or a base model's name."""
    name = re.sub(r"\bLayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"\bLayerNorm\.beta$", "LayerNorm.bias", name)
    if name.startswith(_BASE_PARTS):
        return f"{prefix}.{name}"
    return name


def optional_names(base: str) -> set[str]:
    """Return the tensor names, besides the backbone's, that a folder of this kind may hold."""
    names = set(COPIES)
    for head in HEADS[base].keys() - set(FINE_TUNED):
        for part, name in HEADS[base][head].items():
            if part.startswith("."):
                names.add(name)
            else:
                names |= {f"{name}.weight", f"{name}.bias"}
    return names
