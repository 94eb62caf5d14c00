"""The operator's policy: what it locks holds, whoever asks for something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from halteres.config.files import Addresses, to_seed_format
from halteres.config.files import resolved as effective
from halteres.config.operator_policy import (
    DEFAULT,
    HERMES_COMPAT,
    Caps,
    Policy,
    PolicyCap,
    load_policy,
)
from halteres.config.problem import LockedField
from halteres.config.resolution import resolve_settings
from halteres.config.settings import by_key
from halteres.errors import InvalidConfig

ENVIRONMENT = str(Path(__file__).parents[1] / "runs" / "standin_env.py")
ADDRESSES = Addresses(
    run_id="aaaa1111", run_dir="/r", service_url="http://s", api_url="http://a", tokenizer="/t"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def write(home: Path, text: str) -> None:
    (home / "policy.yaml").write_text(text)


def test_without_a_file_nothing_but_wiring_is_locked(home: Path) -> None:
    assert load_policy() == DEFAULT
    assert DEFAULT.lock == {}


def test_a_lock_holds_and_is_told_as_the_policys() -> None:
    policy = Policy(name="house", lock={"trainer": {"lora_rank": 8}, "env.difficulty": 5})
    asked = resolve_settings(ENVIRONMENT, None, (), policy=policy)
    assert (asked.settings.trainer.lora_rank, asked.settings.env["difficulty"]) == (8, 5)
    sources = effective(asked.settings, asked.sources)
    assert sources["trainer.lora_rank"] == {"value": 8, "source": "policy"}
    assert sources["env.difficulty"]["source"] == "policy"


@pytest.mark.parametrize(
    ("edit", "field", "value"),
    [("lora_rank=4", "lora_rank", 8), ("env.difficulty=4", "env.difficulty", 5)],
)
def test_a_locked_field_cannot_be_set_to_another_value(edit: str, field: str, value: int) -> None:
    policy = Policy(name="house", lock={"lora_rank": 8, "difficulty": 5})
    with pytest.raises(LockedField) as caught:
        resolve_settings(ENVIRONMENT, None, [edit], policy=policy)
    assert caught.value.what.startswith(f"Field '{field}' is locked and cannot be changed")
    assert "the policy 'house'" in caught.value.what
    assert (caught.value.details["field"], caught.value.details["locked_value"]) == (field, value)


def test_the_value_that_holds_may_be_set(tmp_path: Path) -> None:
    policy = Policy(lock={"lora_rank": 8, "learning_rate": 4e-5, "difficulty": 5})
    file = tmp_path / "run.yaml"
    file.write_text(
        "tinker: {lora_rank: 8, learning_rate: 4.0e-5}\nenv: {difficulty: 5}\nopenai: []\n"
    )
    asked = resolve_settings(
        ENVIRONMENT, file, ["difficulty=5"], changes={"lora_rank": "8"}, policy=policy
    )
    assert asked.settings.trainer.lora_rank == 8


def test_a_file_does_not_get_round_a_lock(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {lora_rank: 4}\n")
    with pytest.raises(LockedField, match=r"Field 'trainer\.lora_rank' is locked"):
        resolve_settings(ENVIRONMENT, file, (), policy=Policy(lock={"lora_rank": 8}))


def test_a_resumed_runs_settings_bow_to_the_policy() -> None:
    base = resolve_settings(ENVIRONMENT, None, ["learning_rate=0.5"], policy=DEFAULT).settings
    asked = resolve_settings(None, None, (), base=base, policy=Policy(lock={"learning_rate": 0.1}))
    assert asked.settings.trainer.learning_rate == 0.1


def test_a_lock_of_a_field_that_the_environment_does_not_have_is_passed_over() -> None:
    policy = Policy(lock={"env.nowhere": 1, "env.difficulty": 2})
    assert resolve_settings(ENVIRONMENT, None, (), policy=policy).settings.env["difficulty"] == 2


def test_the_policy_in_force_is_the_one_of_the_home(home: Path) -> None:
    write(home, "lock: {trainer.lora_rank: 4}\n")
    assert resolve_settings(ENVIRONMENT, None, ()).settings.trainer.lora_rank == 4
    with pytest.raises(LockedField, match="the policy 'policy' holds it at 4"):
        resolve_settings(ENVIRONMENT, None, ["lora_rank=8"])


def test_hermes_compat_is_extended_by_a_houses_own_locks(home: Path) -> None:
    write(
        home,
        "extends: hermes-compat\nlock: {tokenizer_name: halteres/tiny, env: {total_steps: 3}}\n",
    )
    policy = load_policy()
    assert policy.lock == {
        **HERMES_COMPAT.lock,
        "inference.model": "halteres/tiny",
        "trainer.total_steps": 3,
    }
    assert (policy.min_status_interval_s, policy.require_keys) == (1800, HERMES_COMPAT.require_keys)
    settings = resolve_settings(ENVIRONMENT, None, ()).settings
    assert (settings.trainer.total_steps, settings.trainer.learning_rate) == (3, 4e-5)
    assert (settings.inference.model, settings.env["max_token_length"]) == ("halteres/tiny", 8192)


def test_a_lock_of_the_policy_that_is_extended_may_be_left_out_and_the_rest_of_it_holds(
    home: Path,
) -> None:
    write(home, "extends: hermes-compat\nunlock: [model]\n")
    policy = load_policy()
    assert {**policy.lock, "inference.model": "Qwen/Qwen3-8B"} == HERMES_COMPAT.lock
    assert (policy.name, policy.min_status_interval_s) == ("hermes-compat", 1800)
    settings = resolve_settings(ENVIRONMENT, None, ["inference.model=/mine"]).settings
    assert (settings.inference.model, settings.trainer.learning_rate) == ("/mine", 4e-5)
    with pytest.raises(LockedField):
        resolve_settings(ENVIRONMENT, None, ["lora_rank=8"])


def test_hermes_compat_writes_its_values_and_a_runs_own_addresses() -> None:
    asked = resolve_settings(ENVIRONMENT, None, (), policy=HERMES_COMPAT)
    written = to_seed_format(asked.settings, ADDRESSES)
    assert (written["env"]["use_wandb"], written["env"]["rollout_server_url"]) == (True, "http://a")
    assert written["tinker"]["max_token_trainer_length"] == 9000
    assert asked.settings.sinks == ("wandb",)


def test_keys_are_asked_for_where_the_seeds_did(home: Path) -> None:
    asked = HERMES_COMPAT.require_keys
    assert (asked.gate, asked.start) == (("TINKER_API_KEY", "WANDB_API_KEY"), ("TINKER_API_KEY",))
    assert asked.test == ("OPENROUTER_API_KEY",)
    write(home, "require_keys: [MY_KEY]\n")
    assert load_policy().require_keys.model_dump() == {"gate": (), "start": ("MY_KEY",), "test": ()}


def test_more_steps_than_the_cap_are_refused_and_fewer_by_default() -> None:
    policy = Policy(caps=Caps(max_steps=10))
    lowered = resolve_settings(ENVIRONMENT, None, (), policy=policy)
    assert (lowered.settings.trainer.total_steps, lowered.sources["trainer.total_steps"]) == (
        10,
        "policy",
    )
    with pytest.raises(PolicyCap) as caught:
        resolve_settings(ENVIRONMENT, None, (), changes={"total_steps": "11"}, policy=policy)
    assert caught.value.code == "policy_cap"
    assert "Caps.max_steps is 10 in " in caught.value.sentence
    assert "policy.yaml" in caught.value.sentence
    assert caught.value.details["limit"] == 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lock: {trainer.lora_rnk: 8}", "did you mean 'trainer.lora_rank'"),
        (
            "lock: {trainer.lora_rank: banana}",
            "lock.trainer.lora_rank = 'banana': must be a valid integer",
        ),
        ("lock: {inference.url: x}", "the supervisor writes the service's address"),
        ("locks: {}", "there is no such field; did you mean 'lock'?"),
        ("extends: house", "there is no such policy"),
        ("unlock: [inference.model]", "the policy 'default' locks no such setting"),
        ("[1]", "it holds no fields"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_used_says_why(home: Path, text: str, says: str) -> None:
    write(home, text)
    with pytest.raises(InvalidConfig) as caught:
        load_policy()
    assert says in caught.value.sentence


def bomb(levels: int) -> str:
    """A line of text for each level, which stands for ten of the one before."""
    lines = [
        f"  - &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, levels)
    ]
    return "".join(["lock:\n  - &a0 [1]\n", *lines])


@pytest.mark.parametrize(
    "text",
    [
        *("lock: " + "[" * 5000 + "]" * 5000, "lock: " + "{a: " * 200 + "1" + "}" * 200),
        *(bomb(9), "lock: &a [*a]", "lock: &a {a: *a}", 'lock: {env.prompt: "\\ud800"}'),
        *(
            "lock: {a: !!float ''}",
            "lock: {a: !!int ''}",
            "lock: {a: !!timestamp x}",
            "lock: {? [1] : 2}",
        ),
        *(
            "lock: {a: " + "9" * 5000 + "}",
            "lock: !!python/object/apply:os.getpid []",
            "a: b: c",
            "a: 1\n---\nb: 2",
        ),
        *("\x00", "lock: 1", "caps: [1]", "require_keys: {gate: {a: 1}}", "extends: [1]", "[" * 20),
    ],
    ids=range(20),
)
def test_a_policy_that_is_damaged_or_hostile_is_refused_at_once(home: Path, text: str) -> None:
    write(home, text)
    with pytest.raises(InvalidConfig) as caught:
        load_policy()
    assert str(home / "policy.yaml") in caught.value.what


def test_a_policy_file_that_is_a_pipe_or_a_folder_or_has_no_end_is_refused_at_once(
    home: Path,
) -> None:
    """To open a pipe would wait for a writer: every command and every tool would hang."""
    file = home / "policy.yaml"
    for make in (
        os.mkfifo,
        os.mkdir,
        lambda file: os.symlink("/dev/zero", file),
        lambda file: os.symlink(file, file),
    ):
        make(file)
        with pytest.raises(InvalidConfig):
            load_policy()
        file.rmdir() if file.is_dir() else file.unlink()


def test_a_policy_may_repeat_its_values_by_aliases_and_begin_with_a_byte_order_mark(
    home: Path,
) -> None:
    write(
        home, "\ufefflock: {trainer.lora_rank: &n 8, env.difficulty: *n}\ncaps: {max_steps: *n}\n"
    )
    policy = load_policy()
    assert (policy.lock, policy.caps.max_steps) == (
        {"trainer.lora_rank": 8, "env.difficulty": 8},
        8,
    )


def test_the_name_of_a_policy_is_a_policy_file(home: Path) -> None:
    write(home, "hermes-compat")
    assert load_policy() == HERMES_COMPAT
    assert yaml.safe_load((home / "policy.yaml").read_text()) == "hermes-compat"


def test_a_text_that_is_no_value_of_a_locked_setting_is_refused_as_locked() -> None:
    policy = Policy(lock={"env.rewards": []})
    with pytest.raises(LockedField) as error:
        resolve_settings("arithmetic", None, ["env.rewards=[1, 2"], policy=policy)
    assert error.value.details["field"] == "env.rewards"


def test_a_lock_is_no_change_of_the_settings_that_are_counted_from() -> None:
    policy = Policy(lock={"env.max_new_tokens": 16, "trainer.lora_rank": 8})
    resolved = resolve_settings(ENVIRONMENT, None, (), policy=policy)
    assert resolved.defaults["trainer.lora_rank"] == 8
    values = by_key(resolved.settings)
    changed = [key for key, value in values.items() if resolved.defaults.get(key) != value]
    assert changed == ["run.environment"]
