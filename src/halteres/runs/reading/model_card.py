"""The model card of exported weights: README.md, as the Hugging Face hub and a reader expect it.

Source of the format: https://huggingface.co/docs/hub/model-cards (YAML between `---`, then text).
Of files on this machine it has names and digests, and no folders.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

import halteres
from halteres.config.file_training import FileTraining
from halteres.documents import DocumentError, parse_yaml
from halteres.errors import HalteresError
from halteres.files import NOT_JSON
from halteres.models import TINY
from halteres.observe.metrics import merge_by_step, read_rows
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.evaluations import Difference, Evaluation, differences, evaluations
from halteres.runs.reading.named_weights import Adapter, vllm_command
from halteres.runs.reading.result_metrics import HELD_OUT
from halteres.runs.state import Kind

Form = Literal["peft", "merged", "gguf"]

FILE = "README.md"

_LIBRARIES: dict[Form, str] = {"peft": "peft", "merged": "transformers", "gguf": "gguf"}
_METHODS: dict[Kind, str] = {
    "rl": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "dpo": "direct preference optimisation",
}
_TAGS: dict[Kind, str] = {"rl": "reinforcement-learning", "sft": "sft", "dpo": "dpo"}
_WHAT: dict[Form, str] = {
    "peft": "A LoRA adapter of",
    "merged": "The whole model: a LoRA adapter merged into",
    "gguf": "The whole model for llama.cpp: a LoRA adapter merged into",
}
_METHOD = (
    "trainer.loss",
    "trainer.advantage",
    "trainer.learning_rate",
    "trainer.lora_rank",
    "trainer.kl_coef",
    "trainer.max_staleness",
    "env.batch_size",
    "env.group_size",
    "env.max_new_tokens",
    "env.temperature",
    "run.seed",
)
"""Settings that say how it was trained, changed or not."""

_TINY_FOLDER = (
    f"`{TINY}` comes with the package halteres: its folder, which stands for the name below, is "
    "what\n"
    f"`python -c \"from halteres.models import builtin_path; print(builtin_path('{TINY}'))\"` "
    "prints."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was exported."""

    adapter: Adapter
    base: str | None  # the base model's name or folder; None: not known
    base_folder: Path | None  # None: it is not on this disk
    folder: Path  # that was written
    form: Form

    @property
    def base_name(self) -> str | None:
        """The base model's name; of a folder on this machine its last part."""
        if self.base is not None and self.base.startswith(("/", "~", ".")):
            return Path(self.base).name
        return self.base


def model_card(export: Export) -> str:
    """The text of README.md: base model, method, settings, data, held-out figures, loading,
    license. What is not known of an adapter that no run here has trained is left out.
    """
    run = export.adapter.run
    sections = [_front_matter(export), *_introduction(export)]
    if run is not None:
        sections += [*_figures(run, export.adapter.step), *_training(run), *_data(run)]
    sections += [*_loading(export), *_license(export)]
    return Redactor.of_this_process().text("\n\n".join(sections)) + "\n"


def _front_matter(export: Export) -> str:
    facts: dict[str, Any] = {
        "library_name": _LIBRARIES[export.form],
        "pipeline_tag": "text-generation",
    }
    if export.base_name is not None:
        facts["base_model"] = export.base_name
    license_name = _license_of(export)
    if license_name:
        facts["license"] = license_name
    facts["tags"] = ["lora"]
    if export.adapter.run is not None:
        facts["tags"] = ["lora", _TAGS[export.adapter.run.state().kind], "halteres"]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def _introduction(export: Export) -> Iterator[str]:
    yield f"# {export.folder.absolute().name}"
    base = "a base model that its files do not name"
    if export.base_name is not None:
        base = f"`{export.base_name}`"
    what = f"{_WHAT[export.form]} {base}"
    run = export.adapter.run
    if run is None:
        yield f"{what}. Nothing is known here of its training."
        return
    state = run.state()
    day = time.strftime("%Y-%m-%d", time.gmtime(state.ended_at or state.created_at))
    step = state.step
    if export.adapter.step is not None:
        step = export.adapter.step
    data = f"the environment `{state.environment}`"
    if state.is_on_file:
        data = f"the file `{Path(FileTraining.read(run.path).data).name}`"
    yield (
        f"{what}, trained by {_METHODS[state.kind]} on {data}: "
        f"{step} of {state.total_steps} steps, run `{run.run_id}`, {day}, "
        f"Halteres {halteres.__version__}."
    )


def _figures(run: RunDirectory, step: int | None) -> Iterator[str]:
    """Before and after on held-out tasks; the last evaluation that the weights had."""
    found = evaluations(run, merge_by_step(run.metrics()))
    if step is not None:
        found = [one for one in found if one.step <= step]
    yield "## Held-out tasks"
    if not found:
        yield "They were not evaluated on tasks that training never saw."
        return
    first, last = found[0], found[-1]
    if first.step == last.step:
        yield from _one_evaluation(last)
        return
    gains = differences(first, last)
    rows: list[Sequence[str]] = []
    for name, label, form in HELD_OUT:
        if name in first.figures and name in last.figures:
            before, after = format(first.figures[name], form), format(last.figures[name], form)
            rows.append((label, before, after, _interval(gains.get(name), form)))
    columns = ("", f"before (step {first.step})", f"after (step {last.step})", "gain, 95 %")
    yield _table(columns, rows)
    yield (
        "The interval is of these tasks and of sampling; what another seed of training would have "
        "given is not in it."
    )


def _one_evaluation(only: Evaluation) -> Iterator[str]:
    rows: list[Sequence[str]] = []
    for name, label, form in HELD_OUT:
        if name in only.figures:
            rows.append((label, format(only.figures[name], form)))
    yield _table(("", f"step {only.step}"), rows)
    yield "There was one evaluation: these figures say nothing of a gain."


def _interval(gain: Difference | None, form: str) -> str:
    """A gain with its interval, shares in points."""
    if gain is None:
        return ""
    numbers = [gain.delta, *(gain.interval or ())]
    if form.endswith("%"):
        words = [f"{100 * number:+.1f}" for number in numbers]
        words[0] += " points"
    else:
        words = [f"{number:+.3f}" for number in numbers]
    if gain.interval is None:
        return words[0]
    return f"{words[0]} ({words[1]} to {words[2]})"


def _training(run: RunDirectory) -> Iterator[str]:
    """The settings that say how, and those that were changed."""
    yield "## Training"
    settings = _resolved(run)
    chosen = run.own_settings()
    names = [name for name in dict.fromkeys((*_METHOD, *sorted(chosen))) if name in settings]
    rows = [(f"`{name}`", f"`{_shown(settings[name])}`") for name in names]
    yield _table(("setting", "value"), rows)


def _resolved(run: RunDirectory) -> dict[str, Any]:
    """section.field -> value, of all settings; nothing where the file cannot be read."""
    try:
        content = (run.path / "config.resolved.json").read_bytes()
        rows = msgspec.json.decode(content, type=dict[str, dict[str, Any]])
    except (OSError, *NOT_JSON):
        return {}
    return {name: row.get("value") for name, row in rows.items()}


def _shown(value: Any) -> str:
    """A value on one line of a table; of a path its last part."""
    if isinstance(value, str) and value.startswith(("/", "~")):
        value = Path(value).name
    text = value
    if not isinstance(value, str):
        text = msgspec.json.encode(value).decode()
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")


def _data(run: RunDirectory) -> Iterator[str]:
    """What it was trained on, by digests: of the environment's file, of the files that its settings
    name, of the held-out prompts.
    """
    state = run.state()
    files = [("environment", Path(state.environment_file))]
    for name, value in _environment_settings(run).items():
        if isinstance(value, str) and value.startswith(("/", "~")):
            files.append((f"`env.{name}`", Path(value).expanduser()))
    rows: list[Sequence[str]] = []
    for label, file in files:
        if file.is_file():
            when = "as it was"
            if file.stat().st_mtime > state.created_at:
                when = "changed since the run began"
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            rows.append((label, f"`{file.name}`, {when}", f"`{digest}`"))
    prompts = _held_out_prompts(run)
    if prompts:
        digest = hashlib.sha256("\n".join(sorted(prompts)).encode()).hexdigest()
        rows.append(("held-out prompts", f"{len(prompts)} different ones, sorted", f"`{digest}`"))
    if rows:
        yield "## Data"
        yield _table(("of what", "", "SHA-256"), rows)


def _environment_settings(run: RunDirectory) -> dict[str, Any]:
    try:
        return run.settings().env
    except HalteresError:
        return {}


def _held_out_prompts(run: RunDirectory) -> set[str]:
    """Of the run's first evaluation."""
    for file in sorted((run.path / "evals").glob("step_*/samples.jsonl")):
        prompts = {str(row["prompt"]) for row in read_rows(file) if "prompt" in row}
        if prompts:
            return prompts
    return set()


def _loading(export: Export) -> Iterator[str]:
    yield "## Loading"
    name = export.folder.absolute().name
    if export.form == "gguf":
        yield "```sh\nllama-cli -m model.gguf\n```"
        return
    base = export.base_name or "BASE_MODEL"
    if base == TINY and export.form == "peft":
        yield _TINY_FOLDER
    elif "/" not in base:
        # no name of the hub, which nobody else's loaders find
        base = f"/path/to/{base}"
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if export.form == "peft":
        lines = [
            "from peft import PeftModel",
            *lines,
            f'base = "{base}"',
            "tokenizer = AutoTokenizer.from_pretrained(base)",
            "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "
            f'"{name}")',
        ]
        command = vllm_command(base, export.folder, name, shown=f"/path/to/{name}")
    else:
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        ]
        command = f"vllm serve /path/to/{name}"
    yield "```python\n" + "\n".join(lines) + "\n```"
    yield f"```sh\n{command}\n```"


def _license(export: Export) -> Iterator[str]:
    yield "## License"
    name = _license_of(export)
    if name:
        yield f"The base model is under `{name}`. What was trained adds no terms to it."
    else:
        yield "The base model's license is not known here: see its own page before you pass it on."


def _license_of(export: Export) -> str:
    """The base model's, by the card in its folder; empty where that has none."""
    if export.base == TINY:
        return "apache-2.0"
    if export.base_folder is None:
        return ""
    try:
        text = (export.base_folder / FILE).read_text(encoding="utf-8")
        facts = parse_yaml(text.split("---\n")[1])
    except (OSError, UnicodeDecodeError, IndexError, DocumentError):
        return ""
    if isinstance(facts, dict) and isinstance(facts.get("license"), str):
        return facts["license"]
    return ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
