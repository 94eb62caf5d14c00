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
"""The most of a GPU in bfloat16, which is idle in small micro-batches. Not measured yet."""


def kept_bytes(*, layers: int, width: int, qkv: int, heads: int, feed: int) -> int:
    """What a token of a pass in bfloat16 keeps on a GPU until the backward, in bytes.

    Of each layer: the residual stream twice in fp32; in bfloat16 the inputs of its four
    projections, the outputs of those of queries, keys and values (as they are, and laid out for
    attention), and of the gated MLP both halves and its activation.

    Args:
        layers: of the model.
        width: of the residual stream.
        qkv: outputs of the query, key and value projection.
        heads: width of all query heads together.
        feed: width of the MLP.
    """
    inputs = 2 * width + heads + feed
    return layers * (2 * 4 * width + 2 * (inputs + 2 * qkv + 3 * feed))
