"""The operations of a custom loss's graph, by the names they have on the wire.

Owns: that list; `engine/torch/loss_graphs/call.py` has the functions behind the names, and nothing else is ever called.
Never: holds what changes its arguments, makes random numbers, leaves torch, or reads memory that nobody wrote; what
has a result whose size nobody can tell beforehand; what needs a matrix decomposition.

Names are those of torch 2: `_get_qualified_name` of what torch.fx records.
"""

from __future__ import annotations


def _names(prefix: str, names: str) -> frozenset[str]:
    return frozenset(prefix + name for name in names.split())


_ELEMENTWISE = """
    abs acos acosh asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min clip cos cosh erf erfc exp exp2 expm1
    floor frac lgamma log log10 log1p log2 logaddexp logaddexp2 logit neg negative pow reciprocal relu round rsqrt
    sigmoid sign sin sinh sqrt square tan tanh trunc nan_to_num
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod maximum minimum fmax fmin hypot
    xlogy lerp
    eq ne gt ge lt le isnan isinf isfinite isclose logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_xor bitwise_not
"""
_REDUCTIONS = """
    sum mean prod amax amin max min std var logsumexp norm any all argmax argmin nansum nanmean count_nonzero median
    nanmedian quantile softmax log_softmax cumsum cumprod cummax cummin logcumsumexp
"""
_CHOICE = """
    where gather index_select masked_fill masked_select scatter scatter_add index_add take topk sort argsort narrow
    select diagonal
"""
_SHAPE = """
    reshape flatten unflatten squeeze unsqueeze transpose permute movedim flip roll diff tril triu broadcast_to tile t
    chunk split unbind detach clone numel
"""
_PRODUCTS = "matmul mm mv bmm dot outer"

_BOTH = " ".join((_ELEMENTWISE, _REDUCTIONS, _CHOICE, _SHAPE, _PRODUCTS))

ELEMENTWISE = _names("", _ELEMENTWISE) | _names("", "truediv floordiv mod pos and_ or_ xor invert log_sigmoid")
"""Last parts of names: one result, as large as all arguments together when widened to one shape."""

FACTORIES = _names("torch.", "zeros ones full arange linspace eye")

FUNCTIONS = (
    FACTORIES
    | _names("torch.", _BOTH)
    | _names("torch.", "cat concat stack cosine_similarity zeros_like ones_like full_like")
    | _names("torch.functional.", "norm split")
    | _names(
        "torch.nn.functional.",
        "softmax log_softmax relu silu elu leaky_relu softsign pad normalize mse_loss l1_loss smooth_l1_loss "
        "huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits",
    )
    | _names("torch._C._nn.", "log_sigmoid softplus gelu")
    | _names("torch._C._special.special_", "expit expm1 log1p xlogy")
    | _names("torch._C._linalg.linalg_", "norm vector_norm")
    | _names(
        "operator.",
        "add sub mul truediv floordiv mod pow neg pos abs matmul eq ne lt le gt ge and_ or_ xor invert getitem",
    )
    | _names("math.", "sqrt exp expm1 log log1p log2 log10 pow floor ceil trunc fabs sin cos tan tanh")
    | {"getattr"}
)

METHODS = _names("", _BOTH) | _names(
    "",
    "view view_as reshape_as expand expand_as repeat to type type_as float double half bfloat16 int long bool cpu "
    "contiguous new_zeros new_ones new_full size dim",
)

ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T"})

KEYWORDS = _names(
    "",
    "alpha append approximate atol beta correction decimals delta descending diagonal dim dim0 dim1 dims end "
    "end_dim eps equal_nan exponent fill_value index input k keepdim largest length log_target mask max min mode n nan "
    "neginf negative_slope offset ord other p pad pos_weight posinf prepend q reduction repeats rtol self shape shifts "
    "size sizes sorted split_size_or_sections chunks src stable start start_dim step steps target tensor tensors "
    "threshold unbiased value vec2 mat2 weight x1 x2 x y condition interpolation source sections dtype",
)
"""Keyword arguments that are handed on."""

PLACEMENT = _names("", "device layout memory_format non_blocking copy _stacklevel")
"""Keyword arguments that are dropped, whatever they say: a graph runs where the engine runs it."""

OFF = _names("", "out inplace size_average reduce requires_grad pin_memory")
"""Keyword arguments that torch.fx records though nobody asked for them; they must be null or false."""

DTYPES = _names("", "float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64 bool")
