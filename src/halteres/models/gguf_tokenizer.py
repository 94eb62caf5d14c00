"""The tokenizer and the chat template in a GGUF file, written out as tokenizer.json and tokenizer_config.json.

Owns: how a vocabulary of either kind (byte-level BPE, SentencePiece's BPE) becomes one of the library `tokenizers`.
Never: guesses how text is split where the file's name for it is not known: the model would read other tokens than those
that it learnt.

Words that a Llama 3 vocabulary holds whole are taken before merges, and text of Qwen2 is normalised (NFC),
as in those models' own tokenizer.json; transformers 5.23 does neither for a GGUF file.

Source: the keys `tokenizer.*` as llama.cpp's converter writes them; the splitting rules of the models' tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_DIGITS = {
    "llama-bpe": r"\p{N}{1,3}",
    "llama3": r"\p{N}{1,3}",
    "llama-v3": r"\p{N}{1,3}",
    "qwen2": r"\p{N}",
    "deepseek-r1-qwen": r"\p{N}",
}
"""Splitting rules (`tokenizer.ggml.pre`) that differ in nothing but how many digits stay together."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2, _SMOLLM = "gpt-2", "smollm"
_SPACE = "▁"  # SentencePiece's


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """A vocabulary and what belongs to it."""

    kind: str  # 'gpt2': byte-level BPE; 'llama': SentencePiece's BPE
    splits: str  # the name of the splitting rule
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]  # empty in a file of SentencePiece's
    scores: Sequence[float]
    specials: Mapping[str, int]  # bos, eos, pad, unk
    ends: Sequence[int]  # tokens that end an answer
    adds_bos: bool
    adds_space: bool
    chat_template: str | None

    @classmethod
    def of(cls, file: Path, values: Mapping[str, Any]) -> GgufTokenizer:
        """What a file's values say.

        Raises:
            UserError: the tokenizer is of a kind that is not understood.
            KeyError: there is none.
        """
        own = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
        kind, splits = own["model"], own.get("pre", "default")
        known = (*_DIGITS, _GPT_2, _SMOLLM)
        if kind not in ("gpt2", "llama") or (kind == "gpt2" and splits not in known):
            what = f"of the kind '{kind}'" if kind not in ("gpt2", "llama") else f"split as '{splits}'"
            raise UserError(
                f"The tokenizer in {file} cannot be converted.",
                f"Its text is {what}; understood are SentencePiece's and byte-level BPE split as {', '.join(known)}.",
                "Take a newer GGUF file of the model, or its folder in Hugging Face format.",
            )
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        specials = {ours: own[f"{ggml}_token_id"] for ours, ggml in names.items() if f"{ggml}_token_id" in own}
        ends = [own[key] for key in ("eos_token_id", "eot_token_id") if key in own]
        tokens = own["tokens"]
        return cls(
            kind=kind,
            splits=splits,
            tokens=tokens,
            types=own.get("token_type", [1] * len(tokens)),
            merges=own.get("merges", ()),
            scores=own.get("scores", ()),
            specials=specials,
            ends=list(dict.fromkeys(ends)),
            adds_bos=own.get("add_bos_token", kind == "llama" or splits.startswith("llama")) and "bos" in specials,
            adds_space=own.get("add_space_prefix", True),
            chat_template=values.get("tokenizer.chat_template"),
        )

    @property
    def numbers(self) -> dict[str, int]:
        """The special tokens as config.json names them."""
        return {f"{name}_token_id": number for name, number in self.specials.items() if name != "unk"}

    def write(self, folder: Path, *, context: int) -> None:
        """Write tokenizer.json and tokenizer_config.json; `context` is the model's, in tokens."""
        self._built().save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": self.tokens[number] for name, number in self.specials.items()},
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def _built(self) -> Tokenizer:
        from tokenizers import AddedToken, processors

        built = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        added = list(zip(self.tokens, self.types, strict=True))
        built.add_special_tokens([AddedToken(text, normalized=False) for text, kind in added if kind == _CONTROL])
        built.add_tokens([AddedToken(text, normalized=False) for text, kind in added if kind == _USER_DEFINED])
        if self.adds_bos:
            bos = self.tokens[self.specials["bos"]]
            built.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, self.specials["bos"])]
            )
        return built

    def _byte_level(self) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in self.merges)]
        is_llama_3 = self.splits.startswith("llama")
        built = Tokenizer(models.BPE(vocab=self._vocabulary(), merges=merges, ignore_merges=is_llama_3))
        if self.splits == "qwen2":
            built.normalizer = normalizers.NFC()
        has_rule = self.splits in _DIGITS
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not has_rule)]
        if has_rule:
            words = Regex(_WORDS.replace("DIGITS", _DIGITS[self.splits]))
            steps.insert(0, pre_tokenizers.Split(words, behavior="isolated"))
        elif self.splits == _SMOLLM:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        built.pre_tokenizer = pre_tokenizers.Sequence(steps)
        built.decoder = decoders.ByteLevel()
        return built

    def _sentencepiece(self) -> Tokenizer:
        from tokenizers import Tokenizer, decoders, models, normalizers

        vocabulary = self._vocabulary()
        unknown = self.tokens[self.specials["unk"]] if "unk" in self.specials else None
        built = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=list(self._recovered_merges(vocabulary)),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        first = [normalizers.Prepend(_SPACE)] if self.adds_space else []
        built.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
        last = [decoders.Strip(" ", left=1)] if self.adds_space else []
        built.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
        return built

    def _recovered_merges(self, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """SentencePiece merges whichever pair makes the token of the highest score: best scores first."""
        for token, number in sorted(vocabulary.items(), key=lambda one: -self.scores[one[1]]):
            if self.types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    yield left, right

    def _vocabulary(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}
