"""The tokenizer: byte-level BPE with Qwen2's splitting rule, 672 tokens, and the chat template.

Owns: the vocabulary, the special tokens and their numbers, the template, the tokenizer files of the shipped folder.
Never: normalises text; what is encoded decodes to itself, whatever Unicode it is.
"""

import json
import random
from itertools import islice
from pathlib import Path

from corpus import CLEAN, Blend, Demonstration, games, maths
from text import broad_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 672
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROL = SPECIALS[:3]  # left out when text is decoded without special tokens; the other four are text
PAD, EOS = "<|endoftext|>", "<|im_end|>"
MAX_POSITIONS = 2048

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)
STYLES = Blend(careful=0.5, hasty=0.5, bisect=0.3, inside=0.3, blind=0.4)  # every phrase of every stage


def train_tokenizer(seed: int) -> Tokenizer:
    """Train on the corpus and broad text; the same seed gives the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seed), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(f"The text ran out of merges at {tokenizer.get_vocab_size()} tokens; make it broader.")
    return _with_textual_tags(tokenizer)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def render_prompt(message: str) -> str:
    """One user turn with the assistant's turn opened, as the chat template renders it."""
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def _training_text(seed: int) -> list[str]:
    rng = random.Random(f"tokenizer/{seed}")
    turns = [_conversation(d) for d in islice(maths(rng, STYLES), 2500)]
    turns += [_conversation(d) for d in islice(games(rng, STYLES), 2000)]
    turns += [_conversation(d) for d in islice(maths(rng, CLEAN), 1500)]
    return turns + list(islice(broad_text(rng), 3000))


def _conversation(demonstration: Demonstration) -> str:
    return f"user\n{demonstration.message}\nassistant\n{demonstration.answer}\nsystem\n"


def _with_textual_tags(tokenizer: Tokenizer) -> Tokenizer:
    """Keep the thinking and tool tags atomic, but as text: decoding without special tokens shows them (as Qwen3)."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
