"""The trainer's policy on a real service and the torch engine: what each loss does to the weights,
in float64.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from engine.torch_fixtures import Reference
from service.live_service import InProcess, closing
from torch import Tensor

from halteres.config.settings import TrainerSettings
from halteres.engine.protocol import Engine
from halteres.engine.torch import TorchEngine
from halteres.losses import LOSSES
from halteres.models import TINY, builtin_path
from halteres.service.service import Options
from halteres.training.datums import Example
from halteres.training.folder import RunFolder, Wiring
from halteres.training.loop import learn
from halteres.training.policy import Pass, Policy, minibatches
from halteres.training.report import Report

from .fakes import example

FOLDER = builtin_path(TINY)
RANK = 2
RUN = "0123abcd"
RATE = 0.05
SGD = {"adam_eps": 1.0, "beta1": 0.0, "beta2": 0.0}
"""With such an epsilon a step is as large as its gradient, not only in its direction."""


class Computing(InProcess):
    """A host whose engine computes, in this process."""

    def __init__(self, *, exact: bool = True) -> None:
        super().__init__(exact=exact)
        assert FOLDER is not None
        self.torch = TorchEngine(FOLDER, TINY, 1)

    @property
    def engine(self) -> Engine:
        return self.torch

    async def stop(self) -> None:
        await super().stop()
        await self.torch.close()


@dataclass(frozen=True)
class Served:
    """A service on the torch engine, and the policies that are trained at it."""

    url: str
    engine: TorchEngine
    ask: Callable[..., Any]
    policies: list[Policy]

    async def policy(self, **settings: Any) -> Policy:
        config = TrainerSettings(**{"lora_rank": RANK, **SGD, **settings})
        wiring = Wiring(run_id=RUN, service_url=self.url, api_url="", base_model=TINY)
        self.policies.append(await Policy.create(wiring, config, seed=7))
        return self.policies[-1]

    def weights(self) -> dict[str, Tensor]:
        """Of the newest adapter, by name."""
        adapter = self.engine._adapters[[*self.engine._adapters][-1]]
        return {
            name: tensor.clone()
            for name, tensor in adapter.layout.named(adapter.flat.clone()).items()
        }


@asynccontextmanager
async def computing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[Served]:
    import service.live_service as scenes

    monkeypatch.setattr(scenes, "InProcess", Computing)
    async with scenes.serving(folder, Options(**options)) as scene:
        host: Any = scene.host
        made = Served(scene.url, host.torch, scene.ask, [])
        async with AsyncExitStack() as clients:
            yield made
            for policy in made.policies:
                await clients.enter_async_context(closing(policy._service))


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    async with computing(tmp_path / "service", monkeypatch) as made:
        yield made


def drawn(count: int, *, seed: int = 0) -> list[Example]:
    """Prompts, answers, a further prompt in the middle, answers: advantages of both signs, one of
    them 0.
    """
    random = np.random.default_rng(seed)
    made: list[Example] = []
    for number in range(count):
        tokens = random.integers(3, 600, 12).tolist()
        logprobs = [1.0, 1.0, *[-3.0] * 4, 1.0, *[-3.0] * 5]
        made.append(example(tokens, logprobs, random.normal() if number else 0.0, (0, 0)))
    return made


def sampled(
    examples: Sequence[Example], logprobs: Sequence[np.ndarray], *, gap: float, seed: int = 1
) -> list[Example]:
    """The same, sampled by a policy whose log-probabilities are `gap` away, on average."""
    random = np.random.default_rng(seed)
    return [
        replace(
            one,
            logprobs_N=np.where(one.actions_N, row + random.normal(0, gap, len(row)), 0).astype(
                np.float32
            ),
        )
        for one, row in zip(examples, logprobs, strict=True)
    ]


def loss_of(name: str, lp: Tensor, one: Example, config: Mapping[str, float]) -> Tensor:
    """The losses of `docs/training-service.md`, summed over a sequence's sampled tokens, in
    float64.
    """
    taken = torch.from_numpy(one.actions_N)
    lp, q, a = (
        lp[taken],
        torch.tensor(one.logprobs_N)[taken].double(),
        torch.tensor(one.advantages_N)[taken].double(),
    )
    settings = {**LOSSES[name].config, **config}
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 0.0)
    ratio = (lp - q).exp()
    match name:
        case "cross_entropy":
            return -(lp * a).sum()
        case "importance_sampling":
            return -(ratio * a).sum()
        case "ppo":
            return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()
        case "cispo":
            return -(ratio.detach().clamp(low, high) * lp * a).sum()
        case "dro":
            return -(lp * a - 0.5 * settings["beta"] * (lp - q) ** 2).sum()
        case "gspo":
            one_ratio = (lp - q).mean().detach().exp() * (lp - lp.detach()).exp()
            return -torch.minimum(one_ratio * a, one_ratio.clamp(low, high) * a).sum()
        case _:
            weight = (lp - q).mean().exp().clamp(max=2).detach()
            return -(weight * a * lp).sum() + 0.5 * settings["kl_coeff"] * ((lp - q) ** 2).sum()


def clipped_of(name: str, lp: np.ndarray, one: Example, config: Mapping[str, float]) -> int:
    """Tokens with an advantage whose ratio is clipped."""
    taken = one.actions_N
    log_ratio, a = lp[taken] - one.logprobs_N[taken], one.advantages_N[taken]
    settings = {**LOSSES[name].config, **config}
    if name in ("gspo", "stable_reinforce"):
        log_ratio = np.full(len(a), log_ratio.mean())
    if name == "stable_reinforce":
        return int(((np.exp(log_ratio) > 2) & (a != 0)).sum())
    over = np.exp(log_ratio) > settings["clip_high_threshold"]
    under = np.exp(log_ratio) < settings["clip_low_threshold"]
    outside = over | under if name == "cispo" else np.where(a >= 0, over, under)
    return int((outside & (a != 0)).sum())


class Exact:
    """The adapter in float64, with a plain step: what the service's weights are held against."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        assert FOLDER is not None
        self.reference = Reference(FOLDER, weights, 32 / RANK)

    def logprobs(self, one: Example) -> Tensor:
        logits = self.reference.logits(one.tokens_N.tolist())
        return logits.log_softmax(-1).gather(1, torch.from_numpy(one.targets_N)[:, None])[:, 0]

    def step(
        self,
        name: str,
        examples: Sequence[Example],
        config: Mapping[str, float],
        rate: float = RATE,
    ) -> float:
        """The loss before the step; Adam without memory moves by rate * g / (|g| + epsilon)."""
        total = torch.stack(
            [loss_of(name, self.logprobs(one), one, config) for one in examples]
        ).sum()
        tensors = list(self.reference.adapter.values())
        for tensor, slope in zip(tensors, torch.autograd.grad(total, tensors), strict=True):
            with torch.no_grad():
                tensor -= rate * slope / (slope.abs() + SGD["adam_eps"])
        return total.item()

    def differs(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
        """Largest difference of a step, relative to the largest change of a weight."""
        moved = {
            name: tensor.detach() - before[name].double()
            for name, tensor in self.reference.adapter.items()
        }
        largest = max(change.abs().max().item() for change in moved.values())
        assert largest > 1e-4
        return max(
            (after[name].double() - before[name].double() - change).abs().max().item() / largest
            for name, change in moved.items()
        )


CASES = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}),
    ("cispo", {"clip_high_threshold": 1.1}),
    ("gspo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}),
    ("dro", {"beta": 0.5}),
    ("stable_reinforce", {"kl_coeff": 0.3}),
    ("cross_entropy", {}),
]


@pytest.mark.parametrize(("loss", "config"), CASES)
async def test_a_step_of_every_loss_moves_the_weights_as_its_formula_says(
    served: Served, loss: str, config: dict[str, float]
) -> None:
    policy = await served.policy(loss=loss, loss_config=config)
    before, exact = served.weights(), Exact(served.weights())
    plain = drawn(4)
    examples = sampled(plain, await policy.forward(plain), gap=0.3)
    passed, _ = await asyncio.gather(policy.forward_backward(examples), policy.optim_step(RATE))
    logprobs = [exact.logprobs(one).detach().numpy() for one in examples]
    total = exact.step(loss, examples, config)
    assert passed.loss == pytest.approx(total, rel=1e-4, abs=1e-4)
    assert max(np.abs(a - b).max() for a, b in zip(passed.logprobs, logprobs, strict=True)) < 3e-5
    assert exact.differs(before, served.weights()) < 2e-3
    assert policy.version == 1
    if loss in ("ppo", "cispo", "gspo", "stable_reinforce"):
        clipped = sum(
            clipped_of(loss, lp, one, config) for lp, one in zip(logprobs, examples, strict=True)
        )
        assert passed.clipped == clipped and (clipped > 0 or loss == "stable_reinforce")
    else:
        assert passed.clipped is None


@pytest.mark.runs
async def test_minibatches_are_further_steps_from_the_weights_that_the_last_one_left(
    served: Served, tmp_path: Path
) -> None:
    """Two times through a batch, three steps each: ratios move away from 1, and the later steps
    clip.
    """
    policy = await served.policy(loss="ppo", epochs=2, minibatches=3)
    before, exact = served.weights(), Exact(served.weights())
    plain = drawn(6)[1:]
    examples = sampled(plain, await policy.forward(plain), gap=0.0)
    config, rate = TrainerSettings(loss="ppo", epochs=2, minibatches=3), 0.004
    passes: list[Pass] = []
    for part in minibatches(examples, config, 7, 1):
        _, passed = await learn(policy, part, rate, Report(RunFolder(tmp_path)), 1)
        assert passed.loss == pytest.approx(exact.step("ppo", part, {}, rate), rel=1e-3, abs=1e-3)
        passes.append(passed)
    assert policy.version == len(passes) == 6
    assert passes[0].clipped == 0 and sum(passed.clipped or 0 for passed in passes) > 0
    assert exact.differs(before, served.weights()) < 1e-2


@pytest.mark.runs
async def test_the_reference_is_the_base_model_before_and_after_training_and_publishes_nothing(
    served: Served,
) -> None:
    policy = await served.policy(loss="importance_sampling")
    examples = drawn(3)
    await policy.publish()
    greedy = {"input_ids": [1, 5, 6, 7], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}

    async def answered() -> Any:
        status, answer = await served.ask(f"/runs/{RUN}/generate", **greedy)
        assert status == 200, answer
        return answer["output_ids"], answer["meta_info"]["policy_version"]

    sampled_before = await answered()
    first = await policy.reference(examples)
    assert await answered() == sampled_before
    await asyncio.gather(
        policy.forward_backward(sampled(examples, first, gap=0.1)), policy.optim_step(RATE)
    )
    again = await policy.reference(examples)
    assert await answered() == sampled_before
    await policy.publish()
    assert (await answered())[1] == [1, 1]

    base = await policy._service.create_sampling_client(base_model=TINY)
    for one, row, later in zip(examples, first, again, strict=True):
        tokens = [*one.tokens_N.tolist(), int(one.targets_N[-1])]
        told = await base.compute_logprobs(tinker.ModelInput.from_ints(tokens))
        assert row.tolist() == pytest.approx(told[1:], abs=1e-6)
        assert later.tolist() == row.tolist()
    moved = await policy.forward(examples)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(moved, again, strict=True))


@pytest.mark.runs
async def test_log_probabilities_at_the_temperature_make_the_expected_step_of_a_token_that_of_temperature_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summed over the likeliest tokens, each as often as it would be drawn.

    Where the log-probabilities are those at 1, as another service gives them, the tokens that 0.5
    prefers count more.
    """
    temperature, prompt = 0.5, [380, 327, 337, 561]
    async with computing(tmp_path / "service", monkeypatch, sample_logprobs="tempered") as served:
        sampler = await served.policy()
        await sampler.publish()
        asked = {"max_new_tokens": 1, "temperature": temperature, "n": 64, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": asked, "return_logprob": True}
        status, answers = await served.ask(f"/runs/{RUN}/generate", **body)
        assert status == 200, answers
        told = {
            token: lp
            for one in answers
            for lp, token, _ in one["meta_info"]["output_token_logprobs"]
        }
        logits = Exact(served.weights()).reference.logits(prompt)[-1].detach()
        plain, tempered = (
            logits.log_softmax(-1).numpy(),
            (logits / temperature).log_softmax(-1).numpy(),
        )
        assert len(told) > 1
        assert [*told.values()] == pytest.approx([tempered[token] for token in told], abs=1e-4)

        async def stepped(drawn_by: np.ndarray, recorded: np.ndarray) -> Tensor:
            """The adapter after a step on each token, weighed by how often it is drawn; scores are
            arbitrary.
            """
            policy = await served.policy()
            scores = np.linspace(-1, 1, len(logits)) * np.exp(drawn_by) * 100
            examples = [
                example([*prompt, token], [1.0, 1.0, 1.0, 1.0, recorded[token]], scores[token])
                for token in logits.topk(40).indices.tolist()
            ]
            await asyncio.gather(policy.forward_backward(examples), policy.optim_step(RATE))
            return torch.cat([tensor.ravel() for tensor in served.weights().values()])

        at_one, corrected, biased = [
            await stepped(*pair)
            for pair in ((plain, plain), (tempered, tempered), (tempered, plain))
        ]
    assert (at_one - corrected).abs().max() < 1e-4
    assert (at_one - biased).abs().max() > 1e-2
