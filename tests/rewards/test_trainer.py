"""Training: cut into micro-batches, interrupted or not, it takes the same steps; what it leaves is
whole.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from halteres.errors import Conflict, InvalidConfig, InvalidData, NotFound, ServerError
from halteres.models import TINY
from halteres.observe.metrics import read_rows
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer
from halteres.rewards.preferences import Comparison, Preferences
from halteres.rewards.torch.__main__ import RunFiles
from halteres.rewards.torch.model import TRAINER_STATE, checkpoints
from halteres.rewards.torch.trainer import LossNotFinite, TrainingResult, progress
from halteres.scores import REWARD_FILE

from .torch_fixtures import sums, tiny

pytestmark = pytest.mark.runs

Weights = dict[str, torch.Tensor]


def trainer(folder: Path, data: Any = None, held_out: Any = None, **settings: Any) -> RewardTrainer:
    asked = {
        "output_dir": str(folder),
        "max_steps": 6,
        "logging_steps": 2,
        "disable_tqdm": True,
        **settings,
    }
    return RewardTrainer(
        TINY, RewardConfig(**asked), train_dataset=data or sums(24), eval_dataset=held_out
    )


def weights(one: RewardTrainer) -> Weights:
    return {name: value.detach().clone() for name, value in one.model.network.trained().items()}


def assert_equal(ours: Weights, theirs: Weights, **tolerance: Any) -> None:
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name
        )


def test_a_registered_model_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(tiny())
    config = RewardConfig(output_dir=str(tmp_path / "out"), max_steps=1, disable_tqdm=True)
    assert RewardTrainer("mine", config, train_dataset=sums(8)).train().num_steps == 1


def test_stopped_and_resumed_is_as_if_never_stopped(tmp_path: Path) -> None:
    """On a CPU in fp32: the same bits. Ties learn a threshold, whose value and optimiser state are
    kept, too.
    """
    settings: dict[str, Any] = {
        "tie_policy": "rao_kupper",
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    data = sums(24)
    data = replace(
        data, comparisons=(*data.comparisons, replace(data.comparisons[0], ranks=(0, 0)))
    )
    straight = trainer(tmp_path / "straight", data, **settings)
    whole = straight.train()
    stopped = trainer(tmp_path / "broken", data, **settings)
    steps = iter(range(1, 10))
    stopped.should_stop = lambda: next(steps) == 3
    result = stopped.train()
    assert (result.stop_reason, result.num_steps, result.folder.name) == (
        "stopped",
        3,
        "checkpoint-3",
    )
    resumed = trainer(tmp_path / "broken", data, **settings)
    end = resumed.train(resume_from_checkpoint=True)
    assert end.stop_reason == "finished"
    assert_equal(weights(resumed), weights(straight))
    assert end.history[-1]["num_tokens"] == whole.history[-1]["num_tokens"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_end_saves_first(tmp_path: Path, number: signal.Signals) -> None:
    one = trainer(tmp_path)
    before = signal.getsignal(number)

    def on_step(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 2:
            os.kill(os.getpid(), number)

    one.on_step = on_step
    result = one.train()
    assert (result.stop_reason, result.folder) == ("terminated", tmp_path / "checkpoint-2")
    assert RewardModel.load(result.folder).score(["5"])
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_fits_into_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """No figure is cut off; elsewhere than in a terminal they are plain lines, by the metrics'
    names.
    """
    screen, metrics = (
        io.StringIO(),
        {"loss": 0.51592, "accuracy": 1.0, "margin": 12.0, "eval_accuracy": 0.76333},
    )
    opened = rich.console.Console

    def console(**settings: Any) -> rich.console.Console:
        return opened(
            file=screen, width=80, force_terminal=is_terminal, color_system=None, **settings
        )

    monkeypatch.setattr("rich.console.Console", console)
    with progress(12_000, ["A note."], shown=True) as show:
        show(11_999, {**metrics, "tokens_per_cpu_s": 123_456.7})
        show(12_000, None)
    lines = [
        re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", line).strip()
        for line in re.split("[\r\n]+", screen.getvalue())
    ]
    assert lines[0] == "A note." and (not is_terminal or max(map(len, lines)) <= 80)
    if is_terminal:
        assert re.search(
            r"12000/12000 loss 0.516, accuracy 100%, held out 76%, 123k tokens/s 0:00:00", lines[-2]
        )
    else:
        assert lines[1].startswith(
            "step 11999/12000: loss 0.5159, accuracy 1, margin 12, eval_accuracy 0.7633"
        )


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    one = trainer(tmp_path)

    def on_step(metrics: Mapping[str, float]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    one.on_step = on_step
    with pytest.raises(KeyboardInterrupt):
        one.train()
    assert not checkpoints(tmp_path)


KILLED = """
import os, signal, sys
import torch
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardTrainer
from rewards.torch_fixtures import sums

torch.set_num_threads(int(sys.argv[2]))
config = RewardConfig(output_dir=sys.argv[1], max_steps=6, logging_steps=1, save_steps=2, disable_tqdm=True)
trainer = RewardTrainer(TINY, config, train_dataset=sums(24))
trainer.on_step = lambda metrics: os.kill(os.getpid(), signal.SIGKILL) if metrics["step"] == 5 else None
trainer.train()
"""


def test_killed_and_resumed_is_as_if_never_killed(tmp_path: Path) -> None:
    """SIGKILL between two checkpoints: the steps after the last one are taken again, to the same
    bits.
    """
    settings = {"logging_steps": 1, "save_steps": 2}
    straight = trainer(tmp_path / "straight", **settings)
    whole = straight.train()
    place = tmp_path / "killed"
    arguments = [sys.executable, "-c", KILLED, str(place), str(torch.get_num_threads())]
    assert (
        subprocess.run(arguments, cwd=Path(__file__).parents[1], check=False).returncode
        == -signal.SIGKILL
    )
    assert [folder.name for folder in checkpoints(place)] == ["checkpoint-2", "checkpoint-4"]
    resumed = trainer(place, **settings)
    end = resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), weights(straight))
    assert [one["loss"] for one in end.history] == [one["loss"] for one in whole.history]


def test_a_run_tells_the_seconds_of_one_step_however_seldom_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 20.0, 50.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    files = RunFiles(tmp_path, first_step=30)
    for step in (40, 45):
        files.report({"step": step, "loss": 1.0})
    assert [row["time/step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2.0, 6.0]


def test_a_training_that_diverges_fails_and_saves_nothing(tmp_path: Path) -> None:
    one = trainer(tmp_path / "out", learning_rate=1e30)
    with pytest.raises(LossNotFinite, match=r"not finite at step \d") as failure:
        one.train()
    assert failure.value.code == "nan_loss"
    assert not (tmp_path / "out").exists()


def test_a_held_out_loss_that_is_not_finite_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(tmp_path, held_out=sums(8, 9))
    monkeypatch.setattr(
        one.model.network,
        "outputs",
        lambda texts, **_: torch.full((len(texts), 1), torch.nan),
    )
    with pytest.raises(LossNotFinite, match="on the held-out rows"):
        one.evaluate()


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, save_steps=3).train()
    with pytest.raises(InvalidData, match="differs in data"):
        trainer(tmp_path, sums(25)).train(resume_from_checkpoint=True)


def test_a_signal_while_the_checkpoint_is_written_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a run writes a request, which is seen at once, and then asks with SIGTERM."""
    one = trainer(tmp_path)
    one.should_stop = lambda: True
    save = one.model.save

    def interrupted(*arguments: Any, **named: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        save(*arguments, **named)

    monkeypatch.setattr(one.model, "save", interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("ended while it saved"))
    try:
        result = one.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.stop_reason, [place.name for place in checkpoints(tmp_path)]) == (
        "stopped",
        ["checkpoint-1"],
    )


def test_a_folder_with_the_checkpoints_of_another_training_is_refused_and_so_is_one_that_is_in_use(
    tmp_path: Path,
) -> None:
    one = trainer(tmp_path, save_steps=1)
    one.should_stop = lambda: True
    one.train()
    with pytest.raises(Conflict, match="holds the checkpoints of another training"):
        trainer(tmp_path).train()
    with pytest.raises(
        NotFound, match=r"has not finished.*checkpoint-1\. Go on with it .*--resume"
    ):
        RewardModel.load(tmp_path)
    other = trainer(tmp_path / "in-use")

    def second() -> bool:
        with pytest.raises(Conflict, match="Another process trains into"):
            trainer(tmp_path / "in-use").train()
        return True

    other.should_stop = second
    assert other.train().num_steps == 1


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one = trainer(tmp_path / "file")
    with pytest.raises(ServerError, match="cannot be written"):
        one.train()
    assert one.num_tokens == 0


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.should_stop = lambda: True
    one.train()
    for content in (b"", (tmp_path / "checkpoint-1" / TRAINER_STATE).read_bytes()[:1000]):
        (tmp_path / "checkpoint-1" / TRAINER_STATE).write_bytes(content)
        with pytest.raises(InvalidData, match="checkpoint-1 is damaged"):
            trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("how", ["weights", "compute"])
def test_a_model_trained_with_bf16_can_be_loaded(tmp_path: Path, how: str) -> None:
    """Its probes are scored as a loaded model scores."""
    if how == "weights":
        model = AutoModelForSequenceClassification.from_pretrained(
            tiny(), num_labels=1, dtype=torch.bfloat16
        )
        config = RewardConfig(output_dir=str(tmp_path), max_steps=2, disable_tqdm=True)
        tokenizer = AutoTokenizer.from_pretrained(tiny())
        RewardTrainer(model, config, processing_class=tokenizer, train_dataset=sums(16)).train()
    else:
        trainer(tmp_path, bf16=True, max_steps=2).train()
    assert RewardModel.load(tmp_path).score(["It is 4."])


def test_a_finished_training_without_checkpoints_is_not_gone_on_with(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="no").train()
    before = (tmp_path / REWARD_FILE).stat().st_mtime_ns
    with pytest.raises(Conflict, match="has finished"):
        trainer(tmp_path, save_strategy="no").train(resume_from_checkpoint=True)
    assert (tmp_path / REWARD_FILE).stat().st_mtime_ns == before


@pytest.mark.parametrize("cut", [{"max_tokens_per_forward": 64}, {"share_prefixes": False}])
def test_how_a_step_is_cut_into_forward_passes_changes_nothing(
    tmp_path: Path, cut: dict[str, Any]
) -> None:
    """Weights are exact across micro-batches: the sum is divided by the weights of the whole
    step.
    """
    data = sums(24)
    data = replace(
        data, comparisons=tuple(replace(one, weight=one.row % 3 + 0.5) for one in data.comparisons)
    )
    runs = [
        trainer(tmp_path / str(i), data, train_sampling_strategy="random", **settings)
        for i, settings in enumerate(({}, cut))
    ]  # in one order
    results = [one.train() for one in runs]
    losses = [[one["loss"] for one in result.history] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_accumulation_is_a_larger_batch(tmp_path: Path) -> None:
    settings = {
        "train_sampling_strategy": "random",
        "num_train_epochs": 1,
        "max_steps": -1,
        "logging_steps": 1,
    }
    large = trainer(tmp_path / "1", **settings, per_device_train_batch_size=8).train()
    small = trainer(
        tmp_path / "2", **settings, per_device_train_batch_size=2, gradient_accumulation_steps=4
    ).train()
    assert [one["loss"] for one in small.history] == pytest.approx(
        [one["loss"] for one in large.history], rel=1e-4
    )


def test_it_learns_and_tells_how_well_by_kind(tmp_path: Path) -> None:
    one = trainer(tmp_path, sums(96), sums(32, 9), max_steps=24, logging_steps=24)
    result = one.train()
    assert result.metrics["eval_accuracy/polite"] == 1.0
    assert set(result.metrics) >= {
        "loss",
        "accuracy",
        "margin",
        "min_reward",
        "grad_norm",
        "eval_accuracy/correct",
    }
    model = RewardModel.load(result.folder)
    assert model.file is not None
    assert model.file.metrics == result.metrics
    assert (
        model.rank(
            [{"role": "user", "content": "What is 2 + 3?"}], [[answer] for answer in ANSWERS]
        )[0]
        == 1
    )


ANSWERS = [{"role": "assistant", "content": text} for text in ("5", "Gladly: 5")]


def test_rankings_and_ties_are_learnt_from_too(tmp_path: Path) -> None:
    rows = [
        Comparison(
            prompt=f"{a} + 1 =", completions=(str(a + 1), str(a), "x"), ranks=(0, 1, 1), row=a
        )
        for a in range(1, 9)
    ]
    data = Preferences(comparisons=tuple(rows), source="rankings", digest="rankings")
    result = trainer(tmp_path, data, per_device_train_batch_size=4).train()
    assert result.metrics["tie_rate"] == pytest.approx(1 / 3)


def test_what_was_cut_or_dropped_is_counted_with_row_numbers(tmp_path: Path) -> None:
    data = sums(12)
    long = replace(data.comparisons[4], prompt=[{"role": "user", "content": "1 2 3 " * 40}], row=5)
    data = replace(data, comparisons=(*data.comparisons, long))
    cut = trainer(tmp_path / "cut", data, max_length=40, max_steps=1).train().truncation
    assert (cut.rows_cut, cut.rows_dropped, cut.first_rows) == (1, 0, (5,))
    assert cut.tokens_lost > 0
    dropped = trainer(
        tmp_path / "drop", data, max_length=40, truncation="drop", max_steps=1
    ).train()
    assert (dropped.truncation.rows_cut, dropped.truncation.rows_dropped) == (0, 1)
    with pytest.raises(InvalidData, match="The first: 5"):
        trainer(tmp_path, data, max_length=40, truncation="error")
    with pytest.raises(InvalidData, match="max_length is 5"):
        trainer(tmp_path, data, max_length=5, truncation="drop")


def test_the_documents_call_takes_objects_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(
        tiny(), num_labels=1, dtype=torch.float32
    )
    one = RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(tmp_path / "objects"), max_steps=1, disable_tqdm=True),
        processing_class=AutoTokenizer.from_pretrained(tiny()),
        train_dataset=[{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}],
    )
    result: TrainingResult = one.train()
    assert RewardModel.load(result.folder).template.form == "standard"


def test_a_model_with_two_outputs_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(tiny(), num_labels=2)
    with pytest.raises(InvalidConfig, match="2 outputs"):
        RewardTrainer(model, RewardConfig(output_dir=str(tmp_path)), str(tiny()), sums(4))


def test_a_model_that_writes_instead_of_scoring_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny())
    with pytest.raises(
        InvalidConfig, match=r"no head named 'score'.*AutoModelForSequenceClassification"
    ):
        RewardTrainer(model, RewardConfig(output_dir=str(tmp_path)), str(tiny()), sums(4))


def test_a_tokenizer_that_pads_with_its_end_token_is_given_another_and_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny())
    tokenizer.pad_token = tokenizer.eos_token
    config = RewardConfig(output_dir=str(tmp_path / "out"), max_steps=1)
    one = RewardTrainer(TINY, config, tokenizer, sums(4))
    result = one.train()
    assert "padded with" in capsys.readouterr().err
    again: Any = AutoTokenizer.from_pretrained(result.folder)
    assert again.pad_token_id == one.model.network.padding != again.eos_token_id
    assert RewardModel.load(result.folder).score([ANSWERS])


def test_a_chat_template_of_another_place_is_used_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    result = trainer(tmp_path / "out", chat_template_path=str(file), max_steps=1).train()
    model = RewardModel.load(result.folder)
    assert list(model.template.render(model.tokenizer, ANSWERS).tokens) == model.tokenizer.encode(
        "5<|im_end|>Gladly: 5<|im_end|>"
    )
