"""What one pass of the engine may hold at once; read where runs are planned, without torch.

The engine's own bounds (`engine.torch.limits`) begin with these, and the memory that a run needs is
reckoned from them.
"""

# computed tokens, padding among them, of one micro-batch of a training pass or a prefill
PASS_TOKENS = 2048
# logits that exist at once (64 MiB in fp32; twice as many were 7 % slower)
HEAD_ELEMENTS = 1 << 24
# sequences decoded together, of all snapshots
DECODE_ROWS = 512
# blocks of keys and values, of all snapshots
CACHE_BYTES = 1 << 30

GPU_PASS_TOKENS, GPU_HEAD_ELEMENTS = 16_384, 1 << 28
"""Of a GPU, which is idle in small micro-batches. Not measured yet."""

# activations of a micro-batch on a GPU that are too many to keep. Not measured yet.
RECOMPUTED_BYTES = 20_000_000_000
