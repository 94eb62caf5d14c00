"""Sampling sessions, the immutable weights behind them, and the requests that draw from them."""
