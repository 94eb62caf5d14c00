"""Inference for whoever speaks no Tinker: one module for each dialect, above those that all share.

Owns: which weights, which tokens, which text; the shapes of OpenAI, Anthropic, sglang and vLLM.
Never: samples by itself (`service.sampling` does, for all tenants in turn).
"""
