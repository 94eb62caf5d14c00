"""The loop: the order of things in one step, and what a run directory says afterwards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halteres.config.settings import Settings, TrainerSettings
from halteres.errors import InvalidData
from halteres.groups.rollout_rows import group_id
from halteres.models import TINY, builtin_path
from halteres.observe.metrics import read_rows
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.rollouts import groups_of, rollouts_of, steps_of, trained_groups
from halteres.tokenizer import load_tokenizer
from halteres.training.batch_source import Trajectories
from halteres.training.datums import Example
from halteres.training.failures import LossNotFinite, NoExperience
from halteres.training.folder import RunFolder
from halteres.training.loop import close, keep, open_to_environments, train
from halteres.training.policy import Pass, SentCall
from halteres.training.report import Report, Rollouts
from halteres.types import CONTEXT_LOGPROB, Batch, Group

from .fakes import REGISTRATION, FakePolicy, FakeServer, batch, stopping

CONFIG = TrainerSettings(total_steps=4, checkpoint_every=2, eval_every=0)
MIXED = ([0.0, 1.0], [1.0, 1.0])  # the second group teaches nothing


async def run(
    folder: Path,
    policy: FakePolicy,
    config: TrainerSettings = CONFIG,
    done: int = 0,
    scores: Any = MIXED,
    changes: dict[str, Any] | None = None,
) -> int:
    """Train on the same batch again and again; `changes` are of its first group."""

    def made(version: int) -> Batch:
        first, *others = batch(*scores, version=version).groups
        return Batch(groups=(replace(first, **changes or {}), *others))

    server = FakeServer(made)
    registration = replace(REGISTRATION, batch_size=sum(map(len, scores)))
    source = Trajectories(server, registration, stopping(folder))
    return await train(policy, source, Report(RunFolder(folder)), Settings(trainer=config), done)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_rows(folder / "events.jsonl") if event["type"] == kind]


async def test_pass_and_step_are_both_promised_before_either_is_awaited(tmp_path: Path) -> None:
    policy = FakePolicy()
    policy.loss = lambda: float(policy.calls.count("optim_step"))  # read when the pass is redeemed
    await run(tmp_path, policy, TrainerSettings(total_steps=1, checkpoint_every=0))
    assert policy.calls == ["forward_backward", "optim_step", "publish 1"]
    assert read_rows(tmp_path / "metrics.jsonl")[0]["train/loss"] == 1.0


async def test_every_step_publishes_the_next_version_and_checkpoints_come_when_due(
    tmp_path: Path,
) -> None:
    policy = FakePolicy()
    assert await run(tmp_path, policy) == 4
    assert [call for call in policy.calls if "publish" in call or "save" in call] == [
        "publish 1",
        "publish 2",
        "save step-000002",
        "publish 3",
        "publish 4",  # the last step has "final"
    ]
    (checkpoint,) = read_rows(tmp_path / "checkpoints.jsonl")
    assert (checkpoint["name"], checkpoint["step"], checkpoint["version"]) == ("step-000002", 2, 2)
    assert checkpoint["final"] is False


async def test_steps_that_no_checkpoint_holds_are_kept_when_experience_ends(tmp_path: Path) -> None:
    policy, report = FakePolicy(), Report(RunFolder(tmp_path))
    batches = iter([batch(*MIXED)] * 3)
    server = FakeServer(lambda version: next(batches, None))
    source = Trajectories(server, REGISTRATION, stopping(tmp_path), patience_s=0.1)
    with pytest.raises(NoExperience):
        await train(policy, source, report, Settings(trainer=CONFIG))
    for _ in range(2):  # the second time there is nothing left to keep
        await keep(policy, report)
    assert [row["name"] for row in read_rows(tmp_path / "checkpoints.jsonl")] == [
        "step-000002",
        "step-000003",
    ]


async def test_an_evaluation_that_falls_between_checkpoints_gets_one(tmp_path: Path) -> None:
    policy = FakePolicy()
    await run(tmp_path, policy, TrainerSettings(total_steps=4, checkpoint_every=0, eval_every=3))
    assert [call for call in policy.calls if "save" in call] == ["save step-000003"]


async def test_the_row_of_a_step_has_the_seeds_names_and_ours(tmp_path: Path) -> None:
    await run(tmp_path, FakePolicy())
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    row = rows[1]
    assert row["src"] == "trainer"
    assert row["train/learning_rate"] == CONFIG.learning_rate
    assert (row["reward/mean"], row["reward/success"], row["groups/without_signal"]) == (
        0.75,
        0.75,
        0.5,
    )
    assert row["logprobs/mean"] == row["logprobs/mean_training"] == -0.375
    assert (row["kl_sample_train_v1"], row["kl_sample_train_v2"], row["logprobs/absdiff_p999"]) == (
        0.0,
        0.0,
        0.0,
    )
    assert (row["tokens/action"], row["tokens/trained"], row["tokens/compared"]) == (8, 4, 4)
    assert (row["policy/version"], row["policy/staleness_max"]) == (2, 0)
    assert (row["train/loss_per_token"], row["policy/update_norm"]) == (row["train/loss"] / 4, 0.01)
    assert row["advantages/mean"] == pytest.approx(0.0)
    assert row["time/step"] == pytest.approx(
        sum(row[f"time/{lap}"] for lap in ("batch", "train", "publish"))
    )
    assert len(events(tmp_path, "first_batch")) == 1


async def test_the_advantages_of_each_group_s_turns_are_written_by_its_id(tmp_path: Path) -> None:
    await run(tmp_path, FakePolicy(), TrainerSettings(total_steps=1))
    rows = read_rows(tmp_path / "rollouts" / "advantages_1.jsonl")
    groups = batch(*MIXED).groups
    assert [row["id"] for row in rows] == [group_id(one.tokens, one.scores) for one in groups]
    assert [row["advantages"] for row in rows] == [[[-0.7071], [0.7071]], [[0.0], [0.0]]]


async def test_advantages_that_cannot_be_written_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    assert await run(tmp_path, FakePolicy(), TrainerSettings(total_steps=1)) == 1


async def test_scores_are_compared_with_lengths_within_each_group(tmp_path: Path) -> None:
    """Three sampled tokens, two and one, in a group whose score rises with them and in one whose
    score falls; the third group's scores are equal.
    """
    (group,) = batch([0.0, 0.0, 0.0]).groups
    logprobs = ((1.0, -0.5, -0.5, -0.25), (1.0, 1.0, -0.5, -0.25), (1.0, 1.0, 1.0, -0.25))
    scores = {"rises": (5.0, 1.0, 0.0), "falls": (0.0, 1.0, 5.0), "equal": (1.0, 1.0, 1.0)}
    masks = ((-100, 2, 3, 4), (-100, -100, 4, 4), (-100, -100, -100, 4))
    groups = {
        name: replace(group, masks=masks, logprobs=logprobs, scores=made)
        for name, made in scores.items()
    }

    async def correlation(*names: str) -> float | None:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        made = Batch(groups=tuple(groups[name] for name in names))
        registration = replace(REGISTRATION, batch_size=3 * len(names))
        source = Trajectories(FakeServer(lambda _: made), registration, stopping(folder))
        one_step = Settings(trainer=TrainerSettings(total_steps=1))
        await train(FakePolicy(), source, Report(RunFolder(folder)), one_step)
        return read_rows(folder / "metrics.jsonl")[0]["groups/length_correlation"]

    assert await correlation("rises", "equal") == pytest.approx(1.0)
    assert await correlation("rises", "falls") == pytest.approx(0.0)
    assert await correlation("equal") is None


async def test_the_row_of_a_step_tells_how_old_its_batch_was_and_what_was_too_old(
    tmp_path: Path,
) -> None:
    told = iter([3, 3, 5])  # groups set aside since the run began

    def stale(version: int) -> Batch:
        old, young = (
            batch([0.0, 1.0], version=max(0, version - 2)),
            batch([1.0, 0.0], version=version),
        )
        return Batch(groups=(*old.groups, *young.groups), num_stale=next(told))

    source = Trajectories(FakeServer(stale), REGISTRATION, stopping(tmp_path))
    config = TrainerSettings(
        total_steps=3, checkpoint_every=0, max_staleness=2, correction="truncate"
    )
    await train(FakePolicy(), source, Report(RunFolder(tmp_path)), Settings(trainer=config))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["policy/staleness_max"] for row in rows] == [0, 1, 2]
    assert [row["policy/staleness_mean"] for row in rows] == [0, 0.5, 1]
    assert [row["groups/stale"] for row in rows] == [3, 0, 2]


async def test_a_batch_without_signal_is_skipped_and_said_and_moves_nothing(tmp_path: Path) -> None:
    """Not even Adam's momentum: the optimiser is not stepped at all."""
    policy = FakePolicy()
    assert await run(tmp_path, policy, scores=([1.0, 1.0], [0.0, 0.0])) == 4
    assert policy.trained == []
    assert policy.version == 0
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["train/skipped"] for row in rows] == [1.0] * 4
    assert rows[0]["train/loss"] is None
    assert rows[0]["groups/without_signal"] == 1.0


async def test_alerts_are_left_to_the_supervisor(tmp_path: Path) -> None:
    """It sees the same rows, and is their one writer."""
    await run(
        tmp_path,
        FakePolicy(),
        TrainerSettings(total_steps=8, checkpoint_every=0),
        scores=([0.0, 0.0],),
    )
    assert not [
        event
        for event in read_rows(tmp_path / "events.jsonl")
        if event["type"] in ("alert", "notice")
    ]


async def test_a_loss_that_is_not_finite_ends_training_with_a_sentence_and_a_notice(
    tmp_path: Path,
) -> None:
    def spoilt() -> float:
        raise LossNotFinite("The loss is nan.", next="Resume.")

    policy = FakePolicy()
    policy.loss = spoilt
    with pytest.raises(LossNotFinite, match=r"The loss is nan\. Resume\."):
        await run(tmp_path, policy)
    assert read_rows(tmp_path / "metrics.jsonl") == []
    (notice,) = events(tmp_path, "notice")
    assert (notice["rule"], notice["step"]) == ("nan_loss", 1)
    assert set(notice) == {"t", "type", "rule", "step", "evidence"}
    assert not [call for call in policy.calls if "save" in call], (
        "a spoilt adapter is not checkpointed"
    )


async def test_a_gradient_that_is_not_finite_is_told_like_a_loss(tmp_path: Path) -> None:
    class Exploding(FakePolicy):
        def _step(self, _: None) -> int:
            raise LossNotFinite("The step was refused: the gradient is not finite.")

    with pytest.raises(LossNotFinite):
        await run(tmp_path, Exploding())
    (notice,) = events(tmp_path, "notice")
    assert (notice["rule"], notice["step"]) == ("nan_loss", 1)


@pytest.mark.parametrize(
    ("env", "rules"), [({}, []), ({"temperature": 1}, []), ({"temperature": 0.7}, ["temperature"])]
)
def test_a_temperature_other_than_one_is_noticed_at_the_start(
    tmp_path: Path, env: dict[str, float], rules: list[str]
) -> None:
    Report(RunFolder(tmp_path)).begins(env, 3)
    notices = events(tmp_path, "notice")
    assert [notice["rule"] for notice in notices] == rules
    assert all(
        notice["step"] == 3 and "env.temperature is 0.7" in notice["evidence"] for notice in notices
    )


def test_a_temperature_that_the_ratio_corrects_is_no_matter_for_an_alert(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Report(RunFolder(tmp_path)).begins({"temperature": 0.7}, 0, tempered=True)
    assert events(tmp_path, "notice") == [] and "the ratio to them corrects" in caplog.text


async def test_log_probabilities_at_another_temperature_are_not_compared_with_the_trainers(
    tmp_path: Path,
) -> None:
    policy = FakePolicy()
    policy.tempered = True
    await run(tmp_path, policy)
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert (row["tokens/compared"], row["kl_sample_train_v2"], row["tokens/trained"]) == (
        0,
        None,
        4,
    )


async def test_clipped_tokens_are_told_as_a_share_of_all_that_passes_went_through(
    tmp_path: Path,
) -> None:
    class Clipping(FakePolicy):
        def forward_backward(self, examples: Sequence[Example]) -> SentCall[Pass]:
            return SentCall(
                super().forward_backward(examples), "", lambda passed: replace(passed, clipped=1.0)
            )

    for folder in ("clips", "none"):
        (tmp_path / folder).mkdir()
    await run(
        tmp_path / "clips",
        Clipping(),
        TrainerSettings(total_steps=1, loss="ppo", epochs=2, minibatches=2),
    )
    # 4 passes of 2 tokens each
    assert read_rows(tmp_path / "clips" / "metrics.jsonl")[0]["tokens/clipped"] == 4 / 8
    await run(tmp_path / "none", FakePolicy(), TrainerSettings(total_steps=1))
    assert read_rows(tmp_path / "none" / "metrics.jsonl")[0]["tokens/clipped"] is None


@pytest.mark.parametrize(
    ("changes", "rule", "told"),
    [
        (
            {"advantages": ((0.0, 0.0, 1.0, 2.0),) * 2},
            "own_advantages",
            "1 of 2 groups .* carry advantages of their own",
        ),
        (
            {"is_truncated": True},
            "truncated_sampling",
            "1 of 2 groups .* sampled with top_p, top_k or min_p",
        ),
    ],
)
async def test_what_groups_carry_and_training_passes_over_is_noticed_once(
    tmp_path: Path, changes: dict[str, Any], rule: str, told: str
) -> None:
    await run(tmp_path, FakePolicy(), changes=changes)
    (notice,) = events(tmp_path, "notice")
    assert (notice["rule"], notice["step"]) == (rule, 1) and re.search(told, notice["evidence"])


async def test_a_score_that_is_not_finite_never_reaches_the_policy(tmp_path: Path) -> None:
    policy = FakePolicy()
    with pytest.raises(InvalidData):
        await run(tmp_path, policy, scores=([0.0, math.nan],))
    assert policy.calls == []


async def test_entropy_is_told_of_all_that_was_sampled_also_where_nothing_is_trained_on(
    tmp_path: Path,
) -> None:
    await run(tmp_path, FakePolicy(), scores=([1.0, 1.0], [0.0, 0.0]))
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert (row["policy/entropy"], row["logprobs/mean"]) == (0.375, None)
    assert (row["reward/min"], row["reward/max"]) == (0.0, 1.0)
    assert row["tokens/action"] == 8


async def test_what_counts_as_success_is_the_runs_threshold(tmp_path: Path) -> None:
    server = FakeServer(lambda version: batch([0.25, 0.5], [0.75, 1.0], version=version))
    source = Trajectories(server, REGISTRATION, stopping(tmp_path))
    report = Report(RunFolder(tmp_path), success_threshold=0.5)
    await train(FakePolicy(), source, report, Settings(trainer=TrainerSettings(total_steps=1)))
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert (row["reward/success"], row["reward/mean"]) == (0.5, 0.625)


async def test_groups_of_an_environment_that_writes_no_rollouts_are_written_from_the_batch(
    tmp_path: Path,
) -> None:
    folder = builtin_path(TINY)
    assert folder is not None
    tokenizer, rollouts = load_tokenizer(str(folder)), tmp_path / "rollouts"
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": "What is 2 + 5?"}]))
    answers = [tokenizer.encode(text) for text in ("2 + 5 = 7.", "I think")]
    answers[0].append(tokenizer.eos_token_id)
    sequences = [(*prompt, *answer) for answer in answers]
    context = (CONTEXT_LOGPROB,) * len(prompt)
    group = Group(
        tokens=tuple(sequences),
        masks=(),
        scores=(1.0, 0.0),
        logprobs=tuple((*context, *[-0.5] * len(answer)) for answer in answers),
        versions=(),
    )
    rollouts.mkdir()
    source = Trajectories(
        FakeServer(lambda _: Batch(groups=(group,))),
        replace(REGISTRATION, batch_size=2),
        stopping(tmp_path),
    )
    report = Report(RunFolder(tmp_path), rollouts=Rollouts(rollouts, tokenizer))
    await train(FakePolicy(), source, report, Settings(trainer=TrainerSettings(total_steps=1)))
    (found,) = [
        rollouts_of(RunDirectory(tmp_path), step) for step in steps_of(RunDirectory(tmp_path))
    ]
    told = found.rollouts(found.marks)
    assert [(one.completion, one.score, one.finish) for one in told] == [
        ("2 + 5 = 7.", 1.0, "stop"),
        ("I think", 0.0, "length"),
    ]
    assert {one.prompt for one in told} == {tokenizer.decode(prompt, skip_special_tokens=False)}
    assert [one.tokens for one in told] == list(map(len, answers))
    (row,), _ = groups_of(RunDirectory(tmp_path), 1)
    assert [one.ids for one in row.completions] == answers
    assert [one.logprobs for one in row.completions] == [[-0.5] * len(one) for one in answers]
    trained = trained_groups(RunDirectory(tmp_path), 1, {row.id})
    assert trained[row.id].advantages == [[0.7071], [-0.7071]]


async def test_a_resumed_run_goes_on_with_the_next_step_and_keeps_its_rows(tmp_path: Path) -> None:
    await run(tmp_path, FakePolicy(), TrainerSettings(total_steps=2))
    policy = FakePolicy(version=2)
    assert await run(tmp_path, policy, done=2) == 4
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["policy/version"]) for row in rows] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
    ]


async def test_a_run_that_was_done_already_trains_no_further(tmp_path: Path) -> None:
    policy = FakePolicy(version=4)
    assert await run(tmp_path, policy, done=4) == 4
    assert policy.calls == []


async def test_environments_may_start_once_version_zero_is_published_and_kept(
    tmp_path: Path,
) -> None:
    policy = FakePolicy()
    await open_to_environments(policy, Report(RunFolder(tmp_path)), fresh=True)
    assert policy.calls == ["publish 0", "save step-000000"]
    assert (tmp_path / "control" / "trainer.ready").exists()
    (event,) = events(tmp_path, "checkpoint")
    assert (event["name"], event["step"], event["state_path"], event["final"]) == (
        "step-000000",
        0,
        None,
        False,
    )


async def test_the_end_is_a_final_checkpoint_that_says_why(tmp_path: Path) -> None:
    await close(FakePolicy(version=3), Report(RunFolder(tmp_path)), 3, "SIGINT was received")
    (event,) = events(tmp_path, "checkpoint")
    assert (event["name"], event["step"], event["final"], event["why"]) == (
        "final",
        3,
        True,
        "SIGINT was received",
    )
    assert json.loads((tmp_path / "checkpoints.jsonl").read_text())["final"] is True
