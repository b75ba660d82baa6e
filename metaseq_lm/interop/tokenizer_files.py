"""Writes the transformers library's tokenizer files for one of our tokenizers."""

from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.byte_bpe import PackedTokenizer
from metaseq_lm.data.tokenizers.plain import PlainTokenizer
from metaseq_lm.data.tokenizers.sentencepiece_models import SentencePiece
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.interop.folders import write_json

# White space as in str.split(); the library's own definition has slightly fewer characters.
_WHITE_SPACE = (
    "[\\x{09}-\\x{0d}\\x{1c}-\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}"
    "\\x{202f}\\x{205f}\\x{3000}]+"
)


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    model: EncoderConfig,
    row_length: int = 0,
    is_causal: bool = False,
) -> None:
    """Write files that AutoTokenizer opens, and also our own, so that nothing is lost.

    A fine-tuned model, with rows of `row_length` tokens, gets pairs of texts as in training, with
    one separator between them. A causal model's tokenizer names the tokens that begin and end a
    text, for programs that add the first themselves, and adds nothing after a text, so that it can
    be continued. Text that looks like a special symbol becomes one there, as is usual. MetaseqError
    for a kind of tokenizer that the library does not support.
    """
    library = _library_tokenizer(tokenizer)
    vocabulary = tokenizer.vocabulary
    library.add_special_tokens([vocabulary.symbols[i] for i in vocabulary.specials])
    library.post_processor = _template(vocabulary, row_length > 0, is_causal)
    tokenizer.save(folder)
    write_atomic(folder / "tokenizer.json", (library.to_str(pretty=True) + "\n").encode("utf-8"))
    content = _tokenizer_settings(vocabulary, model, row_length, is_causal)
    write_json(folder / "tokenizer_config.json", content)


def _tokenizer_settings(
    vocabulary: Vocabulary, model: EncoderConfig, row_length: int, is_causal: bool
) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    ids = {"pad": vocabulary.pad, "mask": vocabulary.mask, "sep": vocabulary.sep}
    if vocabulary.task_tokens:
        ids["cls"] = vocabulary.cls()
    if vocabulary.unk is not None:
        ids["unk"] = vocabulary.unk
    if vocabulary.layout == "roberta" or (is_causal and vocabulary.task_tokens):
        ids |= {"bos": vocabulary.cls(), "eos": vocabulary.sep}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    if model.segments < 2:
        inputs.remove("token_type_ids")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": row_length or model.max_positions,
        "model_input_names": inputs,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": vocabulary.symbols[i] for name, i in ids.items()},
    }


def _template(
    vocabulary: Vocabulary, is_fine_tuned: bool = False, is_causal: bool = False
) -> processors.PostProcessor:
    """Return the processor that puts special symbols around one or two texts, by layout."""
    sep = vocabulary.symbols[vocabulary.sep]
    specials = [(sep, vocabulary.sep)]
    first = "$A"
    if vocabulary.task_tokens:
        cls = vocabulary.symbols[vocabulary.cls()]
        specials.append((cls, vocabulary.cls()))
        first = f"{cls} $A"
    # Programs that generate or score a continuation, such as lm-eval, take the tokens of a text to
    # be the first tokens of the longer text.
    if is_causal:
        return processors.TemplateProcessing(first, f"{first} {sep} $B:1", specials)
    between = f"{sep} $B:1 {sep}:1"
    if vocabulary.layout == "roberta" and not is_fine_tuned:
        between = f"{sep} {sep} $B {sep}"
    return processors.TemplateProcessing(f"{first} {sep}", f"{first} {between}", specials)


def _library_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Convert a tokenizer to the `tokenizers` library; MetaseqError if it has none like it."""
    if isinstance(tokenizer, PackedTokenizer):
        return tokenizers.Tokenizer.from_str(tokenizer.model_bytes().decode("utf-8"))
    if isinstance(tokenizer, SentencePiece):
        return _sentencepiece(tokenizer)
    if isinstance(tokenizer, PlainTokenizer) and not tokenizer.options.get("pattern"):
        vocabulary = tokenizer.vocabulary
        assert vocabulary.unk is not None
        ids = {symbol: i for i, symbol in enumerate(vocabulary.symbols)}
        library = tokenizers.Tokenizer(
            models.WordLevel(ids, unk_token=vocabulary.symbols[vocabulary.unk])
        )
        cut, behaviour = _WHITE_SPACE, "removed"
        if tokenizer.name == "char":
            cut, behaviour = "[\\s\\S]", "isolated"
            library.decoder = decoders.Fuse()
        library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(cut), behaviour)
        return library
    raise MetaseqError(
        f"the transformers library has no tokenizer of the kind {tokenizer.name} with these options"
    )


def _sentencepiece(tokenizer: SentencePiece) -> tokenizers.Tokenizer:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(tokenizer.model_bytes())
    parse = sentencepiece_model_pb2.ModelProto.FromString  # type: ignore[attr-defined]
    proto = parse(tokenizer.model_bytes())
    symbols = tokenizer.vocabulary.symbols
    scores = [processor.get_score(i) for i in range(len(symbols))]
    unk = processor.unk_id()
    model: models.Model
    if tokenizer.model_type == "unigram":
        model = models.Unigram(list(zip(symbols, scores)), unk_id=unk)
    else:
        normal = [i for i in range(len(symbols)) if i > tokenizer.vocabulary.specials[-1]]
        merges = _merges({symbols[i]: scores[i] for i in normal})
        ids = {symbol: i for i, symbol in enumerate(symbols)}
        # Like sentencepiece, which makes one token of successive unknown characters.
        model = models.BPE(ids, merges, unk_token=symbols[unk], fuse_unk=True)
    library = tokenizers.Tokenizer(model)
    # sentencepiece removes superfluous spaces, of which its table of characters says nothing.
    library.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
            normalizers.Strip(),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    return library


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs that form a piece, best score first, in the order of sentencepiece."""
    pairs = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in scores and right in scores:
                pairs.append((-score, at, left, right))
    return [(left, right) for _, _, left, right in sorted(pairs)]
