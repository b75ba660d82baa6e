"""Sentencepiece BPE and unigram models, with special symbols at the ids all tokenizers share."""

import io
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import sentencepiece

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import register_tokenizer
from metaseq_lm.data.tokenizers.base import Offsets, Tokenizer, after_space, characters_of_bytes
from metaseq_lm.data.tokenizers.vocabulary import PAD, UNK, Vocabulary

# A fixed number: the sums of unigram training depend on how the text is shared among threads.
_TRAIN_THREADS = 4
_LONGEST_LINE = 1 << 20
_SPACE = "\u2581"  # stands for a space in a piece


class SentencePiece(Tokenizer):
    """Common part: text is normalised (NFKC, white space runs to one space) by the model itself."""

    model_file = "spm.model"
    model_type: str

    def begins_word(self, symbol: str) -> bool:
        return symbol.startswith(_SPACE)

    def text_of(self, symbol: str) -> str | None:
        return symbol.replace(_SPACE, " ")

    def is_spelled(self, line: str) -> bool:
        is_normal = unicodedata.is_normalized("NFKC", line) and _SPACE not in line
        return is_normal and super().is_spelled(line)

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        count = self._processor.get_piece_size()
        self.vocabulary = Vocabulary([self._processor.id_to_piece(i) for i in range(count)])
        if self._processor.unk_id() != self.vocabulary.unk:
            raise ValueError(f"its unknown symbol is not {UNK} right after the task tokens")

    @classmethod
    def learn(
        cls,
        lines: Iterable[str],
        specials: list[str],
        vocab_size: int,
        min_frequency: int,
        character_coverage: float = 0.9995,
    ) -> Self:
        """Learn pieces from `lines`, held in memory; the library does not support `min_frequency`.

        `character_coverage` is the share of the text's characters that must have a piece.
        A text with too few pieces gives a smaller vocabulary. UsageError for options that do not
        apply, MetaseqError with the library's words if it cannot train.
        """
        if min_frequency != 1:
            raise UsageError(f"{cls.name} has no minimum frequency; leave --min-frequency away")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type=cls.model_type,
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                character_coverage=character_coverage,
                pad_id=0,
                pad_piece=PAD,
                unk_id=len(specials) - 1,
                unk_piece=UNK,
                # Tasks put special symbols around texts themselves.
                bos_id=-1,
                eos_id=-1,
                control_symbols=specials[1:-1],
                max_sentence_length=_LONGEST_LINE,
                num_threads=_TRAIN_THREADS,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise MetaseqError(
                f"{cls.name} cannot be trained with --vocab-size {vocab_size} on this text; "
                f"the library says: {error}. More text or another size helps."
            ) from error
        return cls(model.getvalue())

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(lines), out_type=int, num_threads=1)
        return ids

    def encode_with_offsets(self, text: str) -> Offsets:
        """Return ids and character offsets.

        All pieces of a character that normalisation spells out cover it; characters that
        normalisation drops are in no token, or in the one before them.
        """
        processor = self._processor
        ids = self.encode_batch([text])[0]
        pieces = processor.encode(text, out_type=str, num_threads=1)
        normal, source = processor.Normalize(text, with_offsets=True)
        characters = characters_of_bytes(normal)
        # A piece of the byte fallback is one byte, under a longer name.
        sizes = [1 if processor.is_byte(i) else len(p.encode()) for i, p in zip(ids, pieces)]
        # Where the source of each character ends: at the next larger offset.
        after = np.searchsorted(source, source, side="right")
        limits = np.append(source, len(text))[after]
        starts, ends, at = [], [], 0
        for size in sizes:
            first, last = int(characters[at]), int(characters[at + size - 1])
            at += size
            spaces = len(normal[first : last + 1]) - len(normal[first : last + 1].lstrip(_SPACE))
            blank = spaces > last - first
            if blank:
                starts.append(int(source[first]))
                ends.append(int(source[last + 1]))
                continue
            ends.append(int(limits[last]))
            starts.append(after_space(text, int(source[first + spaces]), ends[-1]))
        # The space inside a character that is spelled out comes after pieces that cover it.
        return ids, starts, np.maximum.accumulate(np.array(ends, np.int64)).tolist()

    def join(self, symbols: Iterable[str]) -> str:
        """Return the text of the pieces; [UNK] shows as the library's sign."""
        return str(self._processor.decode(list(symbols)))

    def model_bytes(self) -> bytes:
        return self._model

    @classmethod
    def restore(cls, model: bytes, vocabulary: Vocabulary | None, options: dict[str, Any]) -> Self:
        return cls(model)


@register_tokenizer("sentencepiece_bpe")
class SentencePieceBpe(SentencePiece):
    """Sentencepiece BPE."""

    name = "sentencepiece_bpe"
    model_type = "bpe"


@register_tokenizer("sentencepiece_unigram")
class SentencePieceUnigram(SentencePiece):
    """Sentencepiece unigram language model."""

    name = "sentencepiece_unigram"
    model_type = "unigram"
