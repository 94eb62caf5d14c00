"""Whether one can train on an environment with a model, why, and what to do now.

Owns: the judgement, one sentence for it, the call that follows.
Never: reads a file.

GRPO learns from what is better within a group: an advantage is a score's distance from its group's mean. Where all
scores of every group are equal, nothing can be learnt, however good the answers are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halteres.agent.shortening import shortened
from halteres.agent.trial.outcome import Outcome

MUCH_TRUNCATED = 0.3
MANY_FAILURES = 0.1

LONGEST_WHY = 300  # characters of what an environment's code said

PARTIAL = 0.5
"""Where an environment does not say what counts as success, a best score below it is hardly a right answer's."""

TRAIN = "rl_start_training(dry_run=true)"
AGAIN = "rl_test_inference()"
SETTINGS = 'rl_get_current_config(detail="full")'


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement."""

    trainable: bool | None  # None: it cannot be said
    why: str  # one sentence
    next: str  # the call that makes sense now


def judge(outcome: Outcome) -> Verdict:
    """What the groups of one model say."""
    if not outcome.groups:
        return _nothing(outcome)
    sizes = {len(group.scores) for group in outcome.groups}
    if sizes == {1}:
        return Verdict(None, "A group of one answer has no variance: ask for more.", "rl_test_inference(group_size=16)")
    verdict = _vary(outcome) if outcome.varied else _same(outcome)
    return Verdict(verdict.trainable, "; ".join([verdict.why, *_caveats(outcome)]) + ".", verdict.next)


def judge_prompts(outcome: Outcome) -> Verdict:
    """What answers to free prompts say: whether they are scored at all."""
    if not outcome.responses:
        return _nothing(outcome)
    scored = f"{len(outcome.scores)} of {len(outcome.responses)} answers could be scored"
    return Verdict(None, f"{scored}; whether rewards vary, only the environment's own tasks tell.", AGAIN)


def _nothing(outcome: Outcome) -> Verdict:
    ended, file = outcome.ended, outcome.request.environment_file
    if ended is None:
        return Verdict(None, "Nothing is scored yet.", AGAIN)
    cause = _brief(outcome.scorer_failures[-1]["why"] if outcome.scorer_failures else f"{ended.error}. {ended.why}")
    if ended.fault == "environment":
        return Verdict(False, f"No answer was scored: {cause}", f"mend {file}, then {AGAIN}")
    return Verdict(None, f"The model gave nothing to judge by: {cause}", 'rl_test_inference(backend="local")')


def _vary(outcome: Outcome) -> Verdict:
    varied = sum(group.varies for group in outcome.groups)
    return Verdict(True, f"{varied} of {len(outcome.groups)} groups have {_kinds(outcome)}", TRAIN)


def _kinds(outcome: Outcome) -> str:
    best = max(outcome.scores)
    if not outcome.correct(outcome.scores):
        return f"answers of different scores, but the best is {best:.4g}: no answer is right"
    if best < PARTIAL and not outcome.request.success_above:
        return f"answers of different scores, but the best is {best:.4g}: no answer is right, if a right one scores 1"
    return "both good and bad answers" if _mixed(outcome) else "answers of different scores"


def _same(outcome: Outcome) -> Verdict:
    number, correct = len(outcome.scores), outcome.correct(outcome.scores)
    if correct == number:
        return Verdict(False, f"Too easy: all {number} answers are right", f"{SETTINGS}: make its tasks harder")
    if correct == 0 and len(set(outcome.scores)) == 1:
        return _all_alike(outcome)
    if correct == 0:
        return Verdict(False, f"Too hard: none of {number} answers is right", _ease(outcome))
    return Verdict(False, "Within every group all answers score the same", f"{SETTINGS}: is its scorer coarse?")


def _all_alike(outcome: Outcome) -> Verdict:
    """Nobody is right: a scorer that knows no right answer looks the same as a task that is too hard."""
    file = outcome.request.environment_file
    blame = f"too hard, or the scorer in {Path(file).name} is at fault: read the samples"
    why = f"All {len(outcome.scores)} scores are equal ({outcome.scores[0]:.4g}): {blame}"
    if (outcome.truncated or 0) > MUCH_TRUNCATED:  # an answer that is cut off has nothing to be scored
        return Verdict(False, why, _ease(outcome))
    return Verdict(False, why, f"read {file} and {outcome.output_file}, mend or ease it, then {AGAIN}")


def _ease(outcome: Outcome) -> str:
    asked, own = outcome.request.max_tokens, outcome.request.env.get("max_new_tokens")
    if (outcome.truncated or 0) > MUCH_TRUNCATED:
        if isinstance(own, int):
            return f'rl_edit_config("max_new_tokens", {2 * (asked or own)}) then {AGAIN}'
        if asked:
            return f"rl_test_inference(max_tokens={2 * asked})"
    return f"{SETTINGS}: make its tasks easier, or choose a stronger model"


def _caveats(outcome: Outcome) -> list[str]:
    said: list[str] = []
    if (outcome.truncated or 0) > MUCH_TRUNCATED:
        said.append(f"{outcome.truncated:.0%} of the answers are cut off")
    failed = outcome.scorer_failures
    if len(failed) > MANY_FAILURES * (outcome.completions + len(failed)):
        said.append(f"{len(failed)} times its code failed ({_brief(failed[-1]['why']).rstrip('.')})")
    if outcome.ended and outcome.ended.error:
        said.append(outcome.ended.error)
    return said


def _brief(why: str) -> str:
    """What foreign code said may be long, and ends with where it failed; the log has all of it."""
    return shortened(why, LONGEST_WHY)


def _mixed(outcome: Outcome) -> bool:
    """Whether some group has successes and failures: not only different scores."""
    return any(0 < outcome.correct(group.scores) < len(group.scores) for group in outcome.groups)
