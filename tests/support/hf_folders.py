"""Small folders of the transformers library with random weights, made without any download."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, trainers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TEXT = [
    "the quick brown fox jumps over the lazy dog, it was the best of times",
    "She'd said: \"I'll go\" - naïve café 漢字 12 or 130 of them",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9",
]
SPECIALS = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    *(c for c in "abcdefghijklmnopqrstuvwxyz0123456789.,:!'\"-漢字東京"),
    *("##" + c for c in "abcdefghijklmnopqrstuvwxyz0123456789"),
    *("the", "quick", "fox", "naive", "##ing", "best", "times", "cafe", "##umps"),
]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert_vocabulary() -> list[str]:
    """Return symbols with special ones among and after others, as in BERT's files."""
    return ["[PAD]", "[unused0]", "[unused1]", *SPECIALS, *WORDS]


def write_bert_tokenizer(folder: Path, **options: Any) -> None:
    """Write vocab.txt and the files that BertTokenizerFast saves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(bert_vocabulary()) + "\n", encoding="utf-8")
    transformers.BertTokenizerFast.from_pretrained(folder, **options).save_pretrained(folder)


def write_roberta_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE with RoBERTa's special symbols, <mask> last, and save it."""
    folder.mkdir(parents=True, exist_ok=True)
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], initial_alphabet=alphabet
    )
    library.train_from_iterator(TEXT, trainer)
    ids = library.get_vocab()
    ids["<mask>"] = len(ids)
    merges = [tuple(m) for m in json.loads(library.to_str())["model"]["merges"]]
    transformers.RobertaTokenizer(vocab=ids, merges=merges).save_pretrained(folder)


def make(folder: Path, name: str, seed: int = 0, **options: Any) -> Any:
    """Save a model of class `name` with random weights and biases, and its tokenizer; return it."""
    torch.manual_seed(seed)
    if name.startswith("Roberta"):
        write_roberta_tokenizer(folder)
        usual = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    else:
        write_bert_tokenizer(folder)
        usual = {"embedding_size": 16} if name.startswith("Electra") else {}
    if name.startswith("DistilBert"):
        usual = {"hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0}
    if name.startswith("ModernBert"):
        ends = {"bos_token_id": 4, "cls_token_id": 4, "eos_token_id": 5, "sep_token_id": 5}
        usual = {**ends, "pad_token_id": 0, "local_attention": 7, "num_hidden_layers": 4}
    elif name.endswith(("ForCausalLM", "LMHeadModel")):
        usual["is_decoder"] = True
    size = len(transformers.AutoTokenizer.from_pretrained(folder))
    kind = getattr(transformers, name)
    config = kind.config_class(vocab_size=size, **{**SMALL, **usual, **options})
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model.eval()
