"""Steps: optimiser steps and their options, pipelining, losses that the user writes."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from tinker import types

from .connection import Connection, Datums, plain, scores, step, wait
from .steps import Facts, Step, all_close, close_to, differ


def learning_rate_alone(scene: Connection) -> Facts:
    trainer = scene.trainer()
    losses = [step(trainer) for _ in range(4)]
    assert losses == sorted(losses, reverse=True), f"the loss falls: {losses}"
    return {"losses": losses}


def weight_decay(scene: Connection) -> Facts:
    """A decayed adapter differs after one step; with a learning rate of 0 nothing may move at
    all.
    """
    without, decayed, still = scene.trainer(), scene.trainer(), scene.trainer()
    before = scores(still)
    step(without, learning_rate=0.1)
    step(decayed, learning_rate=0.1, weight_decay=5.0)
    step(still, learning_rate=0.0, weight_decay=5.0)
    differ(scores(without), scores(decayed), "weight decay is applied")
    all_close(scores(still), before, "decay is scaled by the learning rate", 1e-6)
    return {}


def grad_clip_norm(scene: Connection) -> Facts:
    """With a large eps an Adam step is proportional to the gradient, so clipping it to nothing
    stops the model.
    """
    free, clipped = scene.trainer(), scene.trainer()
    before = scores(free)
    step(free, learning_rate=1.0, eps=1.0)
    step(clipped, learning_rate=1.0, eps=1.0, grad_clip_norm=1e-6)
    differ(scores(free), before, "an unclipped step moves the model")
    all_close(scores(clipped), before, "a step clipped to nothing moves nothing", 1e-4)
    return {}


def pipelined(scene: Connection) -> Facts:
    """Everything is submitted before anything is awaited; the order is that of the calls."""
    trainer = scene.trainer()
    passes: list[Any] = []
    steps: list[Any] = []
    for _ in range(3):
        passes.append(trainer.forward_backward(plain(), "cross_entropy"))
        steps.append(trainer.optim_step(types.AdamParams(learning_rate=1e-2)))
    losses = [wait(one).metrics["loss:sum"] for one in passes]
    for one in steps:
        wait(one)
    twin = scene.trainer()
    all_close(losses, [step(twin) for _ in range(3)], "pipelined and awaited one by one", 1e-5)
    return {"losses": losses}


def accumulated(scene: Connection) -> Facts:
    """Gradients add up until optim_step: three passes of one datum each are one pass of three."""
    together, apart = scene.trainer(), scene.trainer()
    step(together, eps=1.0)
    for one in plain()[:2]:
        wait(apart.forward_backward([one], "cross_entropy"))
    step(apart, [plain()[2]], eps=1.0)
    all_close(scores(apart), scores(together), "gradients are summed", 1e-5)
    return {}


def asynchronous(scene: Connection) -> Facts:
    async def course() -> list[float]:
        trainer = await scene.service.create_lora_training_client_async(scene.model, rank=4, seed=7)
        losses: list[float] = []
        for _ in range(2):
            passed = await trainer.forward_backward_async(plain(), "cross_entropy")
            stepped = await trainer.optim_step_async(types.AdamParams(learning_rate=1e-2))
            losses.append((await passed.result_async()).metrics["loss:sum"])
            await stepped.result_async()
        saved = await trainer.save_weights_for_sampler_async(name="of-async")
        assert (await saved.result_async()).path.endswith("/sampler_weights/of-async")
        return losses

    losses = asyncio.run(course())
    twin = scene.trainer()
    all_close(losses, [step(twin) for _ in range(2)], "the async forms do the same", 1e-5)
    return {"losses": losses}


def negative_likelihood(_: Datums, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    """What cross_entropy with weights 1 computes, written by a user."""
    loss = -sum(one.sum() for one in logprobs)
    return loss, {"mine:mean": float(loss)}


def custom_loss(scene: Connection) -> Facts:
    """The SDK differentiates on its side and sends weights of any sign: the step is that of
    cross_entropy.
    """
    mine, theirs = scene.trainer(), scene.trainer()
    output = wait(mine.forward_backward_custom(plain(), negative_likelihood))
    wait(mine.optim_step(types.AdamParams(learning_rate=1e-2)))
    loss = step(theirs)
    close_to(output.metrics["mine:mean"], loss, "the user's own metric")
    all_close(scores(mine), scores(theirs), "the same step as cross_entropy", 1e-5)
    return {"loss": loss}


def squared(_: Datums, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {}


def custom_gradient(scene: Connection) -> Facts:
    """A loss whose weights are not 1: the sum of squares falls when it is minimised."""
    trainer = scene.trainer()
    totals: list[float] = []
    for _ in range(3):
        totals.append(sum(value**2 for value in scores(trainer)))
        wait(trainer.forward_backward_custom(plain(), squared))
        wait(trainer.optim_step(types.AdamParams(learning_rate=1e-2)))
    assert totals == sorted(totals, reverse=True), f"the sum of squares falls: {totals}"
    return {"totals": totals}


def weighted_likelihood(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
    torch = importlib.import_module("torch")
    loss = -(torch.exp(logprobs - logprobs.detach()) * logprobs.detach() * weights).sum()
    return loss, {"custom/nll:sum": loss}


def traced_loss(scene: Connection) -> Facts:
    """A LossHandle, whose loss the client computes: this service says that it has no custom
    losses.
    """
    handle = wait(
        scene.service.create_custom_loss(weighted_likelihood, {"logprobs": 1, "weights": 1})
    )
    trainer = scene.trainer()
    known = scores(trainer)
    output = wait(trainer.forward_backward_custom(plain(), handle))
    close_to(output.metrics["loss:sum"], -sum(known), "loss:sum of the traced loss")
    close_to(output.metrics["custom/nll:sum"], -sum(known), "its metric")
    wait(trainer.optim_step(types.AdamParams(learning_rate=1e-2)))
    differ(scores(trainer), known, "its gradient moves the model")
    assert handle.loss_id is None
    return {"metric": output.metrics["custom/nll:sum"]}


STEPS = (
    Step("optim_step, learning rate alone", learning_rate_alone),
    Step("optim_step, weight decay", weight_decay, since=(0, 9), proves=("optim:adamw",)),
    Step("optim_step, grad_clip_norm", grad_clip_norm, since=(0, 9), proves=("optim:clipping",)),
    Step("forward_backward and optim_step pipelined", pipelined, proves=("order:pipelined",)),
    Step("gradients accumulate", accumulated, proves=("pass:accumulates",)),
    Step("async forms of training", asynchronous),
    Step("forward_backward_custom", custom_loss, proves=("custom:client-side",)),
    Step("forward_backward_custom, any weights", custom_gradient),
    Step("create_custom_loss", traced_loss, since=(0, 36)),
)
