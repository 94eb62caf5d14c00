"""Environments: tasks, prompts and rewards.

Owns: what an author writes (`base`, `single_turn`, `multi_turn`), the verbs of an environment's
file (`commands`), what goes to the trajectory server (`scored`, `trajectory_link`), the
environments that come with the package, `games/`. Never: touches weights, computes an advantage.
"""
