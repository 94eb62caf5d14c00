"""A reward model's folder, looked at without loading it: what makes a folder one of a reward model,
and `halteres_reward.json`, which says how its scores are read and how a text becomes the tokens
that it reads.

The scoring template is the same in training and in scoring. Source: TRL 1.16 `RewardTrainer`, whose
token ids are these (a test holds it); it drops rows that are too long.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from halteres.engine.shapes import CONFIG, WEIGHTS, read_adapter_config
from halteres.errors import InvalidConfig, InvalidData, NotFound, boundary
from halteres.files import UnreadableFile, read_json, replace_file
from halteres.models.shape import NotWhole, is_classifier, num_outputs_of, read_shape, weight_files
from halteres.rewards.components import problems_of
from halteres.rewards.preferences import Comparison, Text
from halteres.scores import REWARD_FILE, Output, Scorable
from halteres.tokenizer import Message, Tokenizer, text_of

# where a reward model computes; `auto`: a GPU where there is one
Device = Literal["auto", "cpu", "cuda"]
Side = Literal["chosen", "both"]  # whose mean score an offset is
Truncation = Literal["keep_end", "keep_start", "drop", "error"]
"""What becomes of a text that is too long: its oldest messages and then its first tokens go; its
last tokens before the end token go; its row is not used; it is refused.
"""

# what the heads of sequence classifiers are called, as PEFT names them; ours is the first
HEADS = ("score", "classifier")
# of an adapter; a reward model's is computed alone, so that any is read that was ever trained
MAX_RANK = 1 << 16
# folder in the directory of a run that trains one: the model, and checkpoints in it
RESULT = "reward_model"
# folder in a model's folder that is being replaced: the new files, until the last is in its place
SAVING = "saving"
_NEXT = (
    "Name a folder that `halteres reward train`, TRL's RewardTrainer or save_pretrained has "
    "written."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A text as the model reads it."""

    tokens: tuple[int, ...]
    # tokens of the whole text that are not in `tokens`, or too many in it (`drop`, `error`); where
    # they are not counted, above 0 if there are any
    num_lost: int = 0
    ended_with_eos: bool = True  # or with what the chat template ends an answer with
    converted: bool = False  # it came in another form than the model reads


class ScoringTemplate(BaseModel, frozen=True, extra="forbid"):
    """How a text becomes tokens; stored with the model and used wherever it scores."""

    # strings, chats, or each as it comes
    form: Literal["standard", "conversational", "as_given"] = "as_given"
    # appended to a string that does not end with it; a chat ends as its chat template does
    eos_token: str
    max_length: Annotated[int, Field(ge=2)] | None = 1024  # tokens
    truncation: Truncation = "keep_end"
    template_arguments: dict[str, Any] = {}  # of the chat template, for every text
    # tokens of this id at the end are not read: a model trained with pad = EOS
    unread_token: int | None = None

    @property
    def digest(self) -> str:
        """SHA-256: scores of equal texts can be compared only under equal templates."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def render(
        self, tokenizer: Tokenizer, text: Scorable | Text, *, counts_lost: bool = True
    ) -> Rendered:
        """The tokens of a text; token ids pass as they are. Without `counts_lost` a long text is
        tokenised only as far as it is kept. InvalidData: no chat template, a text of two forms, or
        one that cannot be cut.
        """
        if not isinstance(text, Scorable):
            if _is_tokens(text):
                return self._cut(cast("tuple[int, ...]", tuple(text)), 0, ())
            text = Scorable(completion=cast("str | Sequence[Message]", text))
        strings = isinstance(text.completion, str)
        if text.prompt is not None and isinstance(text.prompt, str) != strings:
            why = "One is a string, the other a list of messages."
            raise InvalidData("The prompt and the completion are of two forms.", why)
        parts = ((text.prompt, "user"), (text.completion, "assistant"))
        if self.form == "standard" or (self.form == "as_given" and strings):
            whole = "".join(
                part if isinstance(part, str) else _contents(part or ()) for part, _ in parts
            )
            ended = whole.removesuffix(self.eos_token) + self.eos_token
            tokens = self._encoded(tokenizer, ended, counts_lost, add_special_tokens=True)
            # a begin token, where there is one
            first = tuple(tokenizer.encode("", add_special_tokens=True)[:1])
            num_first = 0
            if tokens[:1] == first:
                num_first = len(first)
            rendered = self._cut(tokens, num_first, tuple(tokenizer.encode(self.eos_token)))
        else:
            arguments = {
                "tools": list(text.tools) or None,
                **self.template_arguments,
                **text.template_arguments,
            }
            chat: list[Message] = []
            for part, role in parts:
                chat += [{"role": role, "content": part}] if isinstance(part, str) else part or ()
            rendered = self._chat(tokenizer, chat, arguments, counts_lost)
        return replace(
            rendered, converted=self.form != "as_given" and strings != (self.form == "standard")
        )

    def render_comparison(
        self, tokenizer: Tokenizer, comparison: Comparison
    ) -> tuple[Rendered, ...]:
        """Every completion of a row behind its prompt. InvalidData: the template refuses one."""
        try:
            return tuple(self.render(tokenizer, text) for text in texts_of(comparison))
        except InvalidData as error:
            what = f"Row {comparison.row} cannot be rendered."
            raise InvalidData(what, f"{error.what} {error.why}".strip(), error.next) from error

    def _encoded(
        self, tokenizer: Tokenizer, text: str, whole: bool, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """The tokens of a text; of a long one, unless the `whole` is asked for, those that are kept
        and some more.
        """
        if whole or self.max_length is None:
            return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        encode = tokenizer.encode_first
        if self.truncation == "keep_end":
            encode = tokenizer.encode_last
        return tuple(encode(text, self.max_length, add_special_tokens=add_special_tokens))

    def _chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        arguments: Mapping[str, Any],
        counts_lost: bool,
    ) -> Rendered:
        text = tokenizer.render(messages, add_generation_prompt=False, **arguments)
        tokens = self._encoded(tokenizer, text, counts_lost)
        last = text_of(messages[-1].get("content")).strip()
        if last:
            _, found, after = text.rpartition(last)
        else:
            _, found, after = ("", "", "")
        # what the chat template ends an answer with
        ending = tuple(tokenizer.encode(after if found else ""))
        if (
            self.truncation != "keep_end"
            or self.max_length is None
            or len(tokens) <= self.max_length
        ):
            return self._cut(tokens, 0, ending)
        num_system = next((i for i, one in enumerate(messages) if one["role"] != "system"), 0)

        def without(oldest: int) -> tuple[int, ...] | None:
            """The chat from this message on, behind the system's; None: the template refuses it."""
            newer = [*messages[:num_system], *messages[oldest:]]
            try:
                shorter = tokenizer.render(newer, add_generation_prompt=False, **arguments)
            except InvalidData:  # it may insist on a user's message first
                return None
            return self._encoded(tokenizer, shorter, False)

        rest = (
            _longest_within(self.max_length, without, range(num_system + 1, len(messages)))
            or tokens
        )
        return replace(
            self._cut(rest, 0, ending), num_lost=len(tokens) - min(len(rest), self.max_length)
        )

    def _cut(self, tokens: tuple[int, ...], num_first: int, ending: tuple[int, ...]) -> Rendered:
        """Not longer than allowed; the first tokens and the ending stay."""
        if self.max_length is not None:
            longest = self.max_length
        else:
            longest = len(tokens)
        lost = max(0, len(tokens) - longest)
        if lost and self.truncation == "keep_end":
            tokens = tokens[:num_first] + tokens[num_first + lost :]
        elif lost and self.truncation == "keep_start":
            if len(ending) < longest:
                tokens = tokens[: longest - len(ending)] + ending
            else:
                tokens = tokens[:longest]
        ended = not ending or tokens[len(tokens) - len(ending) :] == ending
        while self.unread_token is not None and len(tokens) > 1 and tokens[-1] == self.unread_token:
            tokens = tokens[:-1]
        return Rendered(tokens=tokens, num_lost=lost, ended_with_eos=ended)


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """What raw scores mean, measured on held-out pairs; stored with the model, of whose template it
    is.
    """

    # Raw score units: P(a preferred to b) = s((a - b) / temperature).
    temperature: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    offset: FiniteFloat = 0.0  # raw score that is 0 when standardised
    scale: Annotated[FiniteFloat, Field(gt=0)] = 1.0  # raw score units in one standardised
    offset_from: Side = "chosen"  # whose mean the offset is
    num_pairs: int = 0
    data_digest: str = ""  # SHA-256 of the pairs' data
    # of the scoring template under which they were scored; empty: not known
    template_digest: str = ""
    calibration_error: tuple[float, float] = (0.0, 0.0)  # before (temperature 1) and after
    brier_score: tuple[float, float] = (0.0, 0.0)
    quantiles: dict[str, float] = {}  # of raw scores, both sides: "0.05" and so on
    warnings: tuple[str, ...] = ()

    def apply(self, raw: float, output: Output) -> float:
        """A raw score in other units; order is kept.

        >>> Calibration(temperature=2.0, offset=1.0, scale=4.0).apply(3.0, "standardised")
        0.5
        """
        match output:
            case "raw":
                return raw
            case "standardised":
                return (raw - self.offset) / self.scale
            case "probability":  # the sigmoid, without overflow
                return 0.5 * (1 + math.tanh((raw - self.offset) / (2 * self.temperature)))

    def covers(self, raw: float) -> bool:
        """Whether a raw score lies between the lowest and the highest that this was made from.

        >>> Calibration(quantiles={"0.0": -1.0, "1.0": 2.0}).covers(2.5)
        False
        """
        return self.quantiles.get("0.0", -math.inf) <= raw <= self.quantiles.get("1.0", math.inf)

    def check_template(self, digest: str) -> None:
        """InvalidData if the calibration was made with another scoring template, or another rule
        for the end token.
        """
        if self.template_digest and self.template_digest != digest:
            what, fix = (
                "The calibration was made with another scoring template.",
                "halteres reward calibrate makes one.",
            )
            raise InvalidData(
                what, f"It is of {self.template_digest[:12]}, the model's is {digest[:12]}.", fix
            )


class Probe(BaseModel, frozen=True, extra="forbid"):
    """A text with the tokens and the raw score that it had when the model was saved."""

    text: dict[str, Any] | None  # the fields of a `Scorable`; None where the data were tokens
    tokens: list[int]
    score: float


class RewardFile(BaseModel, frozen=True, extra="forbid"):
    """How texts are shown to the model, how its scores are read, and where it comes from."""

    version: int = 1
    template: ScoringTemplate
    probes: list[Probe] = []
    calibration: Calibration | None = None
    # of each output, in order; empty: there is one, without a name
    objective_weights: dict[str, float] = {}
    tie_threshold: float | None = None  # learned with `tie_policy: rao_kupper`
    settings: dict[str, Any] = {}  # of the training
    data: dict[str, Any] = {}  # where the preferences came from, rows, rows cut and dropped
    metrics: dict[str, float] = {}  # of the last evaluation, else of the last steps
    versions: dict[str, str] = {}  # of the libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What is known of a reward model before it is loaded."""

    path: Path  # absolute
    # of its weights in memory, in fp32; of an adapter, its base's too where that lies on this disk
    num_bytes: int
    base: str | None = None  # of an adapter: the model it was trained on
    # halteres_reward.json; empty for a foreign one
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_reward_file(folder: Path) -> RewardFile | None:
    """What the folder says; None of somebody else's. InvalidData: damaged, half replaced, or of
    another template.
    """
    if (folder / SAVING).is_dir():
        why = f"Whoever saved it was killed, or is at it: {SAVING} holds new files."
        fix = f"Save it anew, or move the files of {SAVING} up and remove it."
        raise InvalidData(f"The reward model in {folder} is half replaced.", why, fix)
    file = folder / REWARD_FILE
    if not os.path.lexists(file):
        return None
    try:
        content = RewardFile.model_validate(read_json(file, dict[str, Any]))
    except UnreadableFile as error:
        raise InvalidData(
            f"{file} cannot be read.", f"{error}.", "Save the model again."
        ) from error
    except ValidationError as error:
        raise InvalidData(
            f"{file} cannot be read.", problems_of(error), "Save the model again."
        ) from error
    if content.calibration is not None:
        content.calibration.check_template(content.template.digest)
    return content


def write_reward_file(folder: Path, content: RewardFile) -> None:
    """Replace the file whole."""
    replace_file(folder / REWARD_FILE, content.model_dump_json(indent=1).encode() + b"\n")


def read_model_folder(folder: str | Path) -> ModelFolder:
    """Look at a folder. NotFound: there is none; InvalidData: it holds no reward model, or one half
    replaced.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise NotFound(f"There is no reward model in {path}.", "There is no such folder.", _NEXT)
    check_regular(path)
    with boundary(InvalidData, f"Looking at the reward model in {path}"):
        return _found_in(path)


def check_regular(folder: Path) -> None:
    """InvalidData where a folder holds what is neither file nor folder: to read it might never
    end.
    """
    for one in folder.iterdir():
        if one.exists() and not one.is_file() and not one.is_dir():
            raise _no_model(folder, f"{one.name} is no regular file.")


def _found_in(path: Path) -> ModelFolder:
    stored = read_reward_file(path)
    facts = {}
    if stored is not None:
        facts = stored.model_dump(mode="json")
    if (path / CONFIG).exists():
        config = read_adapter_config(path, HEADS, MAX_RANK)
        if config.get("task_type") != "SEQ_CLS":
            raise _no_model(
                path, f"Its adapter is of the task {config.get('task_type')}, not SEQ_CLS."
            )
        base = str(config.get("base_model_name_or_path") or "")
        num_bytes = 2 * _size(path / WEIGHTS)
        if base and Path(base).is_dir():
            num_bytes += _num_bytes(Path(base))
        return ModelFolder(path=path, num_bytes=num_bytes, base=base or None, facts=facts)
    config = _json_object(path / "config.json")
    if not is_classifier(config):
        names = config.get("architectures") or "no architecture"
        raise _no_model(path, f"Its config.json names {names}, not one that classifies.")
    num_outputs, objectives = num_outputs_of(config), facts.get("objective_weights") or {}
    if num_outputs != max(1, len(objectives)):
        raise _no_model(
            path,
            f"It has {num_outputs} outputs; a reward model has one, or one for each objective.",
        )
    return ModelFolder(path=path, num_bytes=_num_bytes(path), facts=facts)


def template_for(
    tokenizer: Tokenizer, *, eos_token: str | None = None, **settings: Any
) -> ScoringTemplate:
    """A template with the tokenizer's own end token, or another that it knows. InvalidConfig where
    it knows none.
    """
    token = eos_token or tokenizer.specials.get("eos_token")
    if token is None or len(tokenizer.encode(token)) != 1:
        what = "The tokenizer names no end token."
        if token:
            what = f"The end token {token!r} is not in the vocabulary."
        raise InvalidConfig(
            what, next="Set eos_token to a token that the tokenizer knows.", field="eos_token"
        )
    return ScoringTemplate(eos_token=token, **settings)


def padding_token(tokenizer: Tokenizer, eos_token: str) -> str:
    """The token that pads, never the end token, which would then not be read. InvalidData: there is
    no other one.
    """
    own = tokenizer.specials.get("pad_token")
    if own is not None and own != eos_token and own in tokenizer.special_tokens:
        return own
    others = set(tokenizer.special_tokens) - {eos_token, tokenizer.specials.get("bos_token")}
    if not others:
        why = (
            "Its only special token ends texts, and transformers does not read the padding "
            "token at a text's end."
        )
        fix = "Name another special token as pad_token in tokenizer_config.json."
        raise InvalidData(
            f"The tokenizer in {tokenizer.folder} has no token to pad with.", why, fix
        )
    in_order = (token for token in tokenizer.special_tokens if token in others)
    return min(
        in_order, key=lambda token: ("pad" not in token.lower(), "reserved" not in token.lower())
    )


def texts_of(comparison: Comparison) -> list[Scorable | Text]:
    """The texts of a row, each as it is scored by itself."""
    texts = cast("Sequence[str | Sequence[Message]]", comparison.completions)
    how: dict[str, Any] = {
        "tools": comparison.tools,
        "template_arguments": comparison.template_arguments,
    }
    return [
        text if _is_tokens(text) else Scorable(prompt=comparison.prompt, completion=text, **how)
        for text in texts
    ]


def _is_tokens(text: Any) -> bool:
    return not isinstance(text, str) and len(text) > 0 and isinstance(text[0], int)


def _longest_within(
    most: int, without: Callable[[int], tuple[int, ...] | None], places: range
) -> tuple[int, ...] | None:
    """The chat from the first of these places from which it has at most so many tokens.

    From a later place there are fewer tokens. It is searched from the end, twice as far each time,
    so that what is rendered grows with what is kept, and then by halving. Where none is that short,
    the chat from the last place that the template accepts; None: it accepts none.
    """
    fitting: tuple[int, ...] | None = None
    shortest: tuple[int, ...] | None = None
    first, end, num_messages = places.start, places.stop, 1
    while first < end:
        middle = max(first, places.stop - num_messages)
        if shortest is not None:
            middle = (first + end) // 2
        place, tokens = _first_accepted(without, range(middle, end))
        if tokens is None:
            end = middle
        elif len(tokens) <= most:
            fitting, end = tokens, middle
        else:
            shortest, first = tokens, place + 1
        num_messages *= 2
    return fitting or shortest


def _first_accepted(
    without: Callable[[int], tuple[int, ...] | None], places: range
) -> tuple[int, tuple[int, ...] | None]:
    for place in places:
        tokens = without(place)
        if tokens is not None:
            return place, tokens
    return places.stop, None


def _contents(messages: Sequence[Message]) -> str:
    return "".join(text_of(one.get("content")) for one in messages)


def names_of(folders: Sequence[Path]) -> dict[str, Path]:
    """What the models of these folders are called: by the folder's name, with a number where an
    earlier one has it.
    """
    names: dict[str, Path] = {}
    for folder in folders:
        name, number = folder.resolve().name, 2
        while name in names:
            name, number = f"{folder.resolve().name}-{number}", number + 1
        names[name] = folder
    return names


def path_of(name: str) -> str:
    """The path below which a server answers for this model, though a request names none."""
    return f"/models/{quote(name, safe='')}"


def _num_bytes(path: Path) -> int:
    """Of its parameters in fp32; where they cannot be counted, twice their size on disk, as of half
    precision.
    """
    try:
        return 4 * read_shape(path).parameters
    except NotWhole as error:
        raise _no_model(path, f"{error}.") from error
    except (OSError, ValueError):
        pass  # a decoder whose config.json has other names for its sizes
    try:
        return 2 * sum(file.stat().st_size for file in weight_files(path))
    except (OSError, ValueError) as error:
        raise _no_model(path, f"{error}.") from error


def _size(file: Path) -> int:
    """Bytes on disk. InvalidData where there is no such file."""
    if not file.is_file():
        raise _no_model(file.parent, f"{file.name} is missing.")
    return file.stat().st_size


def _json_object(file: Path) -> Mapping[str, Any]:
    try:
        return read_json(file, dict[str, Any])
    except UnreadableFile as error:
        raise _no_model(file.parent, f"{error}.") from error


def _no_model(path: Path, why: str) -> InvalidData:
    return InvalidData(f"The folder {path} holds no reward model.", why, _NEXT)
