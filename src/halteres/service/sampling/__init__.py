"""Sampling sessions, the immutable weights behind them, and the requests that draw from them.

Owns: which engine holds which snapshot, which policy a run samples from, seeds of requests without
one. Never: changes weights; removes some that are being sampled from.
"""
