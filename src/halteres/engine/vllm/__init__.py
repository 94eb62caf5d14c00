"""Sampling by vLLM: one `vllm serve`, in a process of ours or at an address.

Owns: its command line, its life, its wire, and what may reach it.
Never: imports vllm, changes weights under a name, or loads what was not checked.
Guarantees: a name means one folder for as long as it is loaded; that folder is ours, and goes with
the name.
"""
