"""Settings have TRL's names, and the preset fills in what was not given; a dry run refuses what the
training would be refused for, and loads no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halteres.errors import HalteresError, InvalidConfig, InvalidData
from halteres.models import builtin_path
from halteres.rewards import RewardConfig
from halteres.rewards.forecast import Forecast, forecast
from halteres.rewards.model_folder import (
    RewardFile,
    ScoringTemplate,
    template_for,
    write_reward_file,
)
from halteres.rewards.preferences import read_preferences
from halteres.rewards.training_plan import LoraSettings, read_plan, render_rows
from halteres.tokenizer import Tokenizer

PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
STEPS = {"prompt": "2 + 2?", "completions": ["It is", "4."], "labels": [True, False]}


def tiny() -> Path:
    base = builtin_path("halteres/tiny")
    assert base is not None
    return base


def planned(
    folder: Path, rows: list[Any], held_out: list[Any] | None = None, **settings: Any
) -> Forecast:
    files = {"data": rows, **({} if held_out is None else {"eval_data": held_out})}
    for name, found in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    places = {name: str(folder / f"{name}.jsonl") for name in files}
    return forecast(read_plan(None, {"model": "halteres/tiny", **places, **settings}), tiny())


@pytest.mark.parametrize(
    ("rows", "held_out", "settings", "sentence"),
    [
        (
            [{**PAIR, "weight": 0}],
            None,
            {},
            r"No row of data.jsonl teaches anything. 1 have the weight 0",
        ),
        ([{**PAIR, "tie": True}], None, {"tie_policy": "drop"}, "1 are ties"),
        ([PAIR], [{**PAIR, "weight": 0}], {}, "No row of eval_data.jsonl teaches anything"),
        (
            [{**PAIR, "objective": "safe"}],
            [{**PAIR, "objective": "saef"}],
            {},
            "Row 1 of eval_data.jsonl .*'safe'",
        ),
        (
            [{**PAIR, "objective": "safe"}],
            None,
            {"objective_weights": {"safe": 0.0}},
            "Every weight .* is 0",
        ),
        ([PAIR], None, {"eval_strategy": "epoch"}, "nothing to evaluate on"),
        ([PAIR], None, {"tie_policy": "rao_kupper"}, "data.jsonl holds no tie"),
        ([STEPS], None, {"center_rewards_coefficient": 0.1}, "for ranked completions"),
    ],
)
def test_what_the_training_could_not_use_is_refused(
    tmp_path: Path,
    rows: list[Any],
    held_out: list[Any] | None,
    settings: dict[str, Any],
    sentence: str,
) -> None:
    with pytest.raises(HalteresError, match=sentence):
        planned(tmp_path, rows, held_out, **settings)


def test_rows_that_teach_nothing_are_told_and_not_counted(tmp_path: Path) -> None:
    found = planned(tmp_path, [PAIR, {**PAIR, "prompt": "?", "weight": 0}])
    assert (
        found.num_rows == 1
        and "rows that teach nothing, ties alone or of weight 0: 1" in " ".join(found.warnings)
    )


ENDS = "and so on, and so on, " * 8
CUT_TO_THE_SAME = {"prompt": "2 + 2?", "chosen": f"It is 4, {ENDS}", "rejected": f"It is 5, {ENDS}"}


def test_pairs_that_are_cut_to_the_same_tokens_are_refused_by_their_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidData) as raised:
        planned(tmp_path, [PAIR, CUT_TO_THE_SAME], max_length=32)
    (problem,) = raised.value.details["problems"]
    assert problem["rows"] == [2] and "row 2" in raised.value.why
    with pytest.raises(InvalidData):
        planned(tmp_path, [PAIR], [PAIR, CUT_TO_THE_SAME], max_length=32)
    assert planned(tmp_path, [PAIR, CUT_TO_THE_SAME], max_length=512).warnings == ()


@pytest.mark.parametrize(
    ("policy", "tie_policy", "num_rows"),
    [("tie", "soft", 2), ("drop", "soft", 1), ("tie", "drop", 1)],
)
def test_pairs_that_are_cut_to_the_same_tokens_become_ties_or_are_dropped_on_request(
    tmp_path: Path, policy: str, tie_policy: str, num_rows: int
) -> None:
    rows = [PAIR, CUT_TO_THE_SAME]
    found = planned(tmp_path, rows, max_length=32, on_identical=policy, tie_policy=tie_policy)
    (warning,) = found.warnings
    assert found.num_rows == num_rows and "rows: 2)" in warning
    with pytest.raises(InvalidData, match="is left to train on"):
        planned(tmp_path, [CUT_TO_THE_SAME], max_length=32, on_identical="drop")


def test_what_is_cut_to_the_same_tokens_keeps_its_other_ranks_and_its_labels(
    tmp_path: Path,
) -> None:
    tokenizer, soft = Tokenizer(tiny()), "soft"
    template = template_for(tokenizer, max_length=32)
    texts = [CUT_TO_THE_SAME["chosen"], "It is 6.", CUT_TO_THE_SAME["rejected"]]
    group = {"prompt": "2 + 2?", "completions": texts, "ranks": [0, 1, 2]}
    ((ranked, _),) = render_rows(
        read_preferences([group], on_identical="tie"), template, tokenizer, soft
    ).rows
    assert ranked.ranks == (0, 1, 0)
    start = template_for(tokenizer, max_length=32, truncation="keep_start")
    steps = {
        "prompt": "2 + 2?",
        "completions": [ENDS, "It is 4.", "It is 5."],
        "labels": [True, True, False],
    }
    with pytest.raises(InvalidData):
        render_rows(read_preferences([steps]), start, tokenizer, soft)
    ((kept, _),) = render_rows(
        read_preferences([steps], on_identical="tie"), start, tokenizer, soft
    ).rows
    assert kept.labels == (True, True, False)


def test_a_reward_model_of_one_score_takes_no_rows_of_objectives(tmp_path: Path) -> None:
    base = builtin_path("halteres/tiny")
    assert base is not None
    (tmp_path / "data.jsonl").write_text(json.dumps({**PAIR, "objective": "safe"}))
    for file in base.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    write_reward_file(
        tmp_path, RewardFile(template=ScoringTemplate(form="standard", eos_token="<|im_end|>"))
    )
    plan = read_plan(None, {"model": str(tmp_path), "data": str(tmp_path / "data.jsonl")})
    with pytest.raises(HalteresError, match="the objective 'safe', which the model has not"):
        forecast(plan, tmp_path)


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="learning_rate") as refused:
        RewardConfig(learning_rat=1e-5)
    assert refused.value.details["did_you_mean"] == "learning_rate"


def test_a_value_out_of_range_names_its_setting() -> None:
    with pytest.raises(InvalidConfig, match="max_length"):
        RewardConfig(max_length=0)


def test_what_changes_no_number_is_accepted_from_a_trl_config() -> None:
    config = RewardConfig(
        report_to="none", pad_to_multiple_of="auto", warmup_ratio=0.1, dataset_num_proc=4
    )
    assert config == RewardConfig(warmup_steps=0.1)


@pytest.mark.parametrize(
    ("parameters", "rate", "batch"),
    [
        (872_000, 1e-3, 8),
        (500_000_000, 2e-5, 8),
        (3_000_000_000, 1e-5, 4),
        (13_000_000_000, 5e-6, 2),
    ],
)
def test_the_preset_goes_by_size(parameters: int, rate: float, batch: int) -> None:
    config = RewardConfig().settled(parameters)
    assert (config.learning_rate, config.per_device_train_batch_size) == (rate, batch)


def test_what_was_asked_for_goes_before_the_preset() -> None:
    config = RewardConfig(learning_rate=3e-4).settled(500_000_000)
    assert (config.learning_rate, config.per_device_train_batch_size) == (3e-4, 8)
    assert RewardConfig(lora=LoraSettings()).settled(500_000_000).learning_rate == 1e-4


def test_without_a_preset_what_is_open_is_an_error() -> None:
    with pytest.raises(InvalidConfig, match="learning_rate"):
        RewardConfig(preset="off").settled(1_000)


def test_an_unquoted_no_of_yaml_is_no() -> None:
    config = RewardConfig.model_validate({"eval_strategy": False, "save_strategy": False})
    assert (config.eval_strategy, config.save_strategy) == ("no", "no")
