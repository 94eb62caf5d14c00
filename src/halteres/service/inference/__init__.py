"""Inference for whoever speaks no Tinker: which weights, which tokens, which text."""
