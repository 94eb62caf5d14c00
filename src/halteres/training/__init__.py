"""The RL loop: batches in, datums out, new policy versions published.

folder       what the trainer reads and writes in a run directory
experience   where batches come from
advantages   how much better than its group an answer was
datums       sequences and advantages as training examples
policy       the model being trained, behind the Tinker SDK
agreement    how far sampler and trainer differ on the same tokens
report       metrics, events, checkpoints on disk
stopping     when and how to end early
loop         all of them, on one screen
"""
