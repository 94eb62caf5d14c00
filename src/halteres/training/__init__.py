"""The RL loop: batches in, datums out, new policy versions published."""
