"""What one pass of the engine may hold at once; read where runs are planned, without torch.

The engine's own bounds (`engine.torch.limits`) begin with these, and the memory that a run needs is
reckoned from them.
"""

from halteres.models.shape import ModelShape

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


def activation_bytes(shape: ModelShape) -> int:
    """What the backward of a micro-batch on a GPU would need: inputs and outputs of every
    projection, in fp32. Of more than RECOMPUTED_BYTES the layers are computed once more instead.
    """
    per_token = 4 * shape.width + shape.qkv + shape.heads * shape.head_width + 3 * shape.feed
    return 4 * GPU_PASS_TOKENS * shape.layers * per_token
