"""What an edit brings with it that its maker may not have meant.

Owns: the warnings that an edit is answered with.
Never: refuses one.
"""

from __future__ import annotations

from typing import Any

from halteres.config import environ
from halteres.config.files import Resolved
from halteres.config.gathering import STEPS
from halteres.config.locks import how_to_unlock
from halteres.config.policies import load_policy
from halteres.config.settings import TrainerSettings
from halteres.models import model_folder

MODEL = "inference.model"

NOTABLY_SLOWER = 1.3
"""Times as many tokens in a step."""

NO_EFFECT = ("thinking_mode", "reasoning_effort", "max_reasoning_tokens", "custom_thinking_prompt")
"""Of the environment's settings: accepted for compatibility (environments/config.py)."""


def cautions(before: Resolved, after: Resolved) -> list[str]:
    """Sentences about what changed from one to the other."""
    env, trainer = after.settings.env, after.settings.trainer
    found = [_cost(before.settings.env, env)]
    if _changed(before, after, "temperature") and env["temperature"] != 1:
        found.append(f"temperature {env['temperature']:g}: training learns from samples of the policy itself, at 1")
    if trainer != before.settings.trainer or _changed(before, after, "max_token_length"):
        found.append(_too_long(env.get("max_token_length"), trainer.max_token_trainer_length))
    if _changed(before, after, "max_token_length") or _changed(before, after, "max_new_tokens"):
        found.append(_no_room(env.get("max_token_length"), env.get("max_new_tokens")))
    if after.settings.run.stop_when is not None and trainer.eval_every == 0 and after.settings != before.settings:
        found.append("stop_when is looked at where the run is evaluated, and eval_every 0 leaves only its two ends")
    if after.settings.inference.engine == "scripted" != before.settings.inference.engine:
        found.append("engine scripted: it has no weights and learns nothing")
    if after.settings.inference.model != before.settings.inference.model:
        found.append(_absent(after.settings.inference.model))
    found += [f"{name} has no effect here" for name in NO_EFFECT if _changed(before, after, name) and env[name]]
    return [sentence for sentence in found if sentence]


def lowered(resolved: Resolved) -> list[str]:
    """What the policy's cap has made of a number of steps that nobody gave."""
    steps, policy = resolved.settings.trainer.total_steps, load_policy()
    if resolved.sources.get(STEPS) != "policy" or STEPS in policy.lock:
        return []
    default = resolved.trainer_defaults.get("total_steps", TrainerSettings().total_steps)
    return [f"total_steps is {steps} rather than {default}: the policy '{policy.name}' allows no more (caps.max_steps)"]


def held_model(resolved: Resolved) -> list[str]:
    """That no run can start with the model that the policy holds: it is not here, or does not fit."""
    from halteres.agent.starting.models import known_models
    from halteres.runs.starting.workload import workload_of

    policy, model = load_policy(), resolved.settings.inference.model
    if MODEL not in policy.lock or environ.service_url() is not None:
        return []
    found = next((one for one in known_models(workload_of(resolved.settings)) if one.name == model), None)
    wrong = [] if model_folder(model, environ.home() / "models") else ["is not on this disk"]
    if found is not None and found.fits == "no":
        wrong.append(f"does not fit here ({found.need_gb:.0f} GB are needed, {found.free_gb or 0:.1f} GB free)")
    if not wrong:
        return []
    return [f"the model '{model}' {' and '.join(wrong)}: no run can start. {how_to_unlock(MODEL, policy)}"]


def _absent(model: str) -> str | None:
    """A service of somebody else's may have what is not here."""
    if environ.service_url() is not None or model_folder(model, environ.home() / "models") is not None:
        return None
    return f"the model '{model}' is not on this disk (`halteres models add`): no run can start with it"


def _changed(before: Resolved, after: Resolved, field: str) -> bool:
    return field in after.settings.env and after.settings.env[field] != before.settings.env.get(field)


def _cost(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """How much longer a step takes, by the tokens that are sampled and trained on in it."""
    old, new = _tokens(before), _tokens(after)
    if not old or not new or new / old < NOTABLY_SLOWER:
        return None
    return f"about {new / old:.1f}x slower per step: up to {new:,.0f} tokens in one, before {old:,.0f}"


def _tokens(env: dict[str, Any]) -> float | None:
    batch, length = env.get("batch_size"), env.get("max_new_tokens") or env.get("max_token_length")
    if not isinstance(batch, int) or not isinstance(length, int) or length < 1:
        return None
    return float(batch * length)


def _too_long(longest: Any, trained: int) -> str | None:
    if not isinstance(longest, int) or longest <= trained:
        return None
    return f"max_token_trainer_length {trained} is below max_token_length {longest}: longer sequences are left out"


def _no_room(longest: Any, answer: Any) -> str | None:
    if not isinstance(longest, int) or not isinstance(answer, int) or not 0 < longest <= answer:
        return None
    return f"max_token_length {longest} is for prompt and answer together: max_new_tokens {answer} cannot be reached"
