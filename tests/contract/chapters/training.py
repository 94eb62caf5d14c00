"""Passes, losses, optimiser steps, LoRA options, custom losses."""

from __future__ import annotations

from .requirement import Requirement as Must

_DOCS = "public documentation, losses"

TRAINING = (
    Must(
        id="pass:sums",
        says=(
            "every loss is a sum over tokens and datums, never a mean, and is reported as loss:sum"
        ),
        source=_DOCS,
    ),
    Must(
        id="pass:accumulates",
        says="gradients add up over passes until optim_step; forward adds none",
        source=_DOCS,
    ),
    Must(
        id="pass:logprobs",
        says=(
            "the real log-probabilities come back at temperature 1, one per target, also where "
            "the weight is 0"
        ),
        source="tinker 0.38.0 proto/response_conv.py",
    ),
    Must(
        id="pass:metric-names",
        says="each metric's name holds one colon and ends in a known reduction",
        source="tinker 0.38.0 lib/chunked_fwdbwd_helpers.py",
    ),
    Must(
        id="pass:any-weights",
        says="weights may be negative and fractional",
        source="tinker 0.38.0 lib/public_interfaces/training_client.py, _compute_custom_loss",
    ),
    Must(
        id="pass:wide-targets",
        says="targets and weights may be [N, K], and logprobs come back in that shape",
        source="tinker 0.38.0 types/tensor_data.py",
    ),
    Must(
        id="pass:csr",
        says="targets and weights may be CSR, whose unlisted cells are 0",
        source="tinker 0.38.0 types/tensor_data.py",
    ),
    Must(
        id="pass:bad-datum",
        says=(
            "missing or misshapen inputs fail that request with the key's name, and leave no trace"
        ),
        source="our choice",
    ),
    Must(id="loss:cross_entropy", says="cross_entropy is -sum(w * lp)", source=_DOCS),
    Must(
        id="loss:importance_sampling",
        says="importance_sampling is -sum(exp(lp - q) * A)",
        source=_DOCS,
    ),
    Must(
        id="loss:ppo",
        says="ppo is -sum(min(r * A, clip(r, lo, hi) * A)), 0.8 and 1.2 by default",
        source=_DOCS,
    ),
    Must(id="loss:cispo", says="cispo is -sum(sg(clip(r, lo, hi)) * lp * A)", source=_DOCS),
    Must(id="loss:dro", says="dro is -sum(lp * A - beta / 2 * (lp - q)^2)", source=_DOCS),
    Must(
        id="loss:gspo",
        says="gspo clips the ratio of the whole sequence, over the masked mean",
        source=_DOCS,
    ),
    Must(
        id="loss:gradients",
        says="every loss and its gradient equal a float64 reference",
        source="our choice",
    ),
    Must(
        id="loss:stable_reinforce",
        says="stable_reinforce trains the tokens that provenance calls sampled by a formula of "
        "ours:"
        " -sum(min(s, 2) * A * lp), s = exp(mean over a sequence of lp - q)",
        source=(
            "tinker 0.35.0 types/loss_fn_type.py, 0.38.0 types/datum.py; the formula is our choice"
        ),
    ),
    Must(
        id="loss:stable_reinforce-ours",
        says="the SDK's user and the log read once per training run that its stable_reinforce is "
        "ours; an operator may"
        " refuse it",
        source="tinker 0.38.0 _base_client.py; our choice",
    ),
    Must(
        id="loss:stable_reinforce-hosted",
        says="stable_reinforce equals the hosted service's",
        source="no source: its formula is not public",
        gap="a formula of ours stands in for it, and results may differ",
    ),
    Must(
        id="custom:client-side",
        says="forward_backward_custom gets logprobs, and weights of any sign as the gradient",
        source="tinker 0.38.0 lib/public_interfaces/training_client.py",
    ),
    Must(
        id="custom:not-on-the-server",
        says=(
            "a graph of operations is refused in one sentence, and the flag that offers them is "
            "false"
        ),
        source=(
            "tinker 0.38.0 lib/public_interfaces/service_client.py, "
            "_create_custom_loss_submit; our choice"
        ),
    ),
    Must(
        id="optim:adamw",
        says=(
            "optim_step is torch's AdamW, decoupled weight decay included; absent fields get the "
            "SDK's defaults"
        ),
        source="tinker 0.38.0 types/optim_step_request.py; recorded traffic of 0.9.0",
    ),
    Must(
        id="optim:clipping",
        says="grad_clip_norm clips by the global norm; 0 is off",
        source="tinker 0.38.0 types/optim_step_request.py",
    ),
    Must(
        id="optim:needs-gradient",
        says=(
            "a step without a gradient is a user error, and a gradient that is not finite moves "
            "nothing"
        ),
        source="our choice",
    ),
    Must(
        id="optim:dimuon",
        says="dimuon trains",
        source="tinker 0.29.1 types/optimizer_config.py",
        gap="its constants are not public: it is refused with the reason",
    ),
    Must(
        id="optim:dimuon-refused", says="dimuon is a user error that says why", source="our choice"
    ),
    Must(
        id="lora:options",
        says=(
            "rank, seed, train_mlp, train_attn and train_unembed are honoured; the same seed is "
            "the same start"
        ),
        source="tinker 0.38.0 types/lora_config.py",
    ),
    Must(
        id="lora:absurd",
        says="ranks that cannot be are refused with a sentence",
        source="our choice",
    ),
    Must(
        id="numbers:hosted",
        says="numbers equal those of the hosted service",
        source="no source: its weights, kernels and undocumented defaults are not public",
        gap=(
            "losses and updates follow the published formulas in fp32; equal bits cannot be "
            "promised"
        ),
    ),
)
