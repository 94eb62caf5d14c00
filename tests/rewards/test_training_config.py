"""Settings have TRL's names; an unknown one offers the nearest; the preset fills in what was not asked for."""

from __future__ import annotations

import pytest

from halteres.errors import InvalidConfig
from halteres.rewards import RewardConfig
from halteres.rewards.training_plan import LoraSettings


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="learning_rate") as refused:
        RewardConfig(learning_rat=1e-5)
    assert refused.value.details["did_you_mean"] == "learning_rate"


def test_a_value_out_of_range_names_its_setting() -> None:
    with pytest.raises(InvalidConfig, match="max_length"):
        RewardConfig(max_length=0)


def test_what_changes_no_number_is_accepted_from_a_trl_config() -> None:
    config = RewardConfig(report_to="none", pad_to_multiple_of="auto", warmup_ratio=0.1, dataset_num_proc=4)
    assert config == RewardConfig(warmup_steps=0.1)


@pytest.mark.parametrize(
    ("parameters", "rate", "batch"),
    [(872_000, 1e-3, 8), (500_000_000, 2e-5, 8), (3_000_000_000, 1e-5, 4), (13_000_000_000, 5e-6, 2)],
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
