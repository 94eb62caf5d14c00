"""Sampling: parameters, log-probabilities, snapshots; inference for others."""

from __future__ import annotations

from .requirement import Requirement as Must

SAMPLING = (
    Must(
        id="sample:seed",
        says="a seed gives the same tokens whatever else is sampled; samples of one request differ",
        source="our choice",
    ),
    Must(id="sample:greedy", says="temperature 0 takes the likeliest token", source="our choice"),
    Must(
        id="sample:stop",
        says=(
            "stop is a text, texts, tokens or absent; [] disables every stop, the end token's "
            "included"
        ),
        source="tinker 0.38.0 types/sampling_params.py",
    ),
    Must(
        id="sample:top",
        says="top_k and top_p keep the right tokens",
        source="tinker 0.38.0 types/sampling_params.py",
    ),
    Must(
        id="sample:max-tokens",
        says=(
            "without max_tokens a sample may fill the context; a prompt too long is a 400 when it "
            "is submitted"
        ),
        source="tinker-cookbook 0.6.1 capture/proxy/app.py",
    ),
    Must(
        id="sample:agrees",
        says="sampled logprobs equal those recomputed from the prompt and those of the trainer",
        source="our choice; users ask for it",
    ),
    Must(
        id="sample:raw-or-tempered",
        says="the service's option chooses raw or tempered logprobs, and info_message says which",
        source="our choice: public statements conflict",
    ),
    Must(
        id="sample:prompt-logprobs",
        says=(
            "prompt logprobs are one per prompt token, NaN (None) at the first and before the "
            "last n"
        ),
        source="tinker 0.38.0 types/sample_response.py",
    ),
    Must(
        id="sample:topk-prompt",
        says="top-k of the prompt is [length, k] with filler 0 and -99999, the first row filler",
        source="tinker 0.38.0 types/topk_logprobs.py",
    ),
    Must(
        id="sample:topk-sampled",
        says="top-k of the sample has one row per sampled token",
        source="tinker 0.30.4 types/sampled_sequence.py",
    ),
    Must(
        id="sample:targets",
        says="target_prompt_logprobs scores chosen ids, dense or CSR; -1 skips and reads 0.0",
        source="tinker 0.38.0 lib/public_interfaces/sampling_client.py",
    ),
    Must(
        id="sample:alternatives",
        says="prompt_alt_tokens_k draws k alternatives at every prompt position",
        source="tinker 0.38.0 types/prompt_alt_tokens.py",
    ),
    Must(
        id="sample:snapshot",
        says="a snapshot never moves: training, loading and overwriting never leak into it",
        source="tinker 0.38.0 types/sampling_client_kind.py",
    ),
    Must(
        id="sample:inflight",
        says="inflight clients of a model see their own save or newer",
        source="tinker 0.38.0 types/sampling_client_kind.py",
    ),
    Must(
        id="sample:ephemeral-session",
        says="an ephemeral save answers with a sampling_session_id and path null",
        source="tinker 0.38.0 lib/public_interfaces/training_client.py",
    ),
    Must(
        id="sample:join",
        says=(
            "join_sampling_session gives every client of a sampling session a number of its own, "
            "at least 1"
        ),
        source="tinker 0.38.0 types/join_sampling_session_response.py",
    ),
    Must(
        id="sample:many",
        says="a thousand samples in flight lose nothing",
        source="our choice",
    ),
    Must(
        id="sample:no-images",
        says="images, audio and mixture-of-experts fields are refused with a sentence",
        source="tinker 0.38.0 types/model_input_chunk.py",
    ),
    Must(
        id="inference:openai",
        says=(
            "/v1/models, /v1/completions and /v1/chat/completions answer for base models, paths "
            "and runs"
        ),
        source="OpenAI's API reference",
    ),
    Must(
        id="inference:responses",
        says=(
            "/v1/responses takes a conversation as items and answers with thinking, text and calls "
            "as items, whole or as typed events; nothing is kept between requests"
        ),
        source="openai 3.57.0 types/responses; openai-agents 0.24.0, inspect-ai 0.3.285, Codex 0.171.0",
    ),
    Must(
        id="inference:streaming",
        says="streamed answers hold the tokens and logprobs of the whole ones",
        source="OpenAI's API reference",
    ),
    Must(
        id="inference:generate",
        says="/generate answers in sglang's and vLLM's shapes",
        source="sglang and vLLM documentation",
    ),
    Must(
        id="inference:tokens",
        says=(
            "/inference/v1/generate takes tokens and answers with tokens, each with its "
            "log-probability"
        ),
        source="vLLM 0.32; verifiers 0.4.0 with renderers 0.1.12",
    ),
    Must(
        id="inference:overflow",
        says=(
            "a prompt that is too long is a 400 in the words by which clients of its dialect know "
            "an overflow"
        ),
        source="litellm 1.110.2, verifiers 0.4.0, tinker-cookbook 0.6.1, Harbor 0.26.0",
    ),
    Must(
        id="inference:harmless",
        says=(
            "fields that change no answer are passed over; any other that is not read is a 400 "
            "with its name"
        ),
        source=(
            "API references of OpenAI and Anthropic, vLLM 0.11 and sglang 0.5: clients send "
            "them unasked"
        ),
    ),
    Must(
        id="inference:stop-tokens",
        says="stop takes a text, a token id, or a list of either or both",
        source="atroposlib 0.4.0 envs/server_handling, which passes stop on as it came",
    ),
    Must(
        id="inference:cloud-paths",
        says="/oai/api/v1 and /anthropic/api/v1/messages are aliases",
        source="public documentation of the hosted service",
    ),
)
