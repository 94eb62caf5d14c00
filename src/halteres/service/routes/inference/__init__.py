"""Inference over HTTP, in the shapes of OpenAI, Anthropic, sglang and vLLM."""
