"""The RL loop: batches in, datums out, new policy versions published.

folder            what the trainer reads and writes in a run directory
batch_source      where batches come from
objective         from a batch to examples: the order of what the next three do
turns             a batch as turns of episodes, with their rewards and returns
advantages        how much better than its baseline a turn was
gae               the same of tokens, by a critic's values
critic            the critic, in a process of its own
datums            sequences and advantages as training examples
policy            the model being trained, behind the Tinker SDK; learning rate and minibatches of
                  each step
logprob_mismatch  how far sampler and trainer differ on the same tokens
report            metrics, events, checkpoints on disk
stopping          when and how to end early
loop              all of them, on one screen
"""
