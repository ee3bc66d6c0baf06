"""Causal linear attention on a GPU without gradients, as Triton kernels: chunked.py for CUDA tensors.
And of a compressed cache what in plain torch is hundreds of small operations: to write codes (encode.py), to rotate
queries (rotate_query.py), which tokens stay (heavy_hitters.py), and attention to a tier from its codes (tier.py;
codes.py, decode.py); and all of a decoded token, in three kernels (token.py: token_encode.py, token_attend.py and
token_update.py, all with rows.py), as an operator of torch (operators.py).

The kernels of linear attention (kernels.py) are two phases over chunks of 64 tokens, as in compiled/features.h, and one
for decoding:

1. Walk through the chunks, keep the state before each, and the level its features are measured from. Features do not
   mix here, so that blocks of features, as well as of values, walk side by side.
2. All chunks at once read the state before them and see their own keys by a product. Where a later key of the chunk
   stands so far above a row that the row's terms underflow, the chunk is flagged ...
3. ... and done again one token after the other, which is exact whatever the range. The same kernel is decoding. The
   flags never leave the GPU, so that a call waits for nothing and can be captured in a CUDA graph.

Kernels in the manner of flash-linear-attention (arXiv 2312.06635) have the same two phases, but take the features
themselves, exp(a) and exp(b), and carry the plain sums ``S = Σ exp(b_j) v_j`` and ``u = Σ exp(b_j)``. Log-features of
real models reach hundreds, where those sums overflow. Here the state is a mean and a log-mass (state.py), and exponents
are taken of differences that are at most 0 (but for rounding), in float32 or better whatever the type of the values. No
adapter to kernels of that form could be exact, and there is none.

Triton comes with torch where there is a GPU to use; modules of kernels need it, and are imported at the first call.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from dofla.attention.state import FeatureState

TRITON = "3.5"
"""The least version of triton: older ones take no matrices of less than 16 rows."""

CHUNK = 64
"""Tokens per chunk: enough for the matrix units, few enough that pairs within a chunk cost no more than the state."""

_PRECISION = "ieee"
"""Input precision of float32 products: TF32, Triton's default, has 10 bits and would miss 1e-4. No effect on bf16."""


@lru_cache(maxsize=1)
def obstacle() -> str | None:
    """Why the kernels cannot be used here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0, which bfloat16 products need"
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if TorchVersion(triton.__version__) < TRITON:
        return f"triton {triton.__version__} is older than {TRITON}, which the kernels need: it comes with torch 2.9"
    return None


def usable(*tensors: Tensor) -> bool:
    """True if the kernels take these tensors: float32 or bfloat16 on one GPU, not empty, no gradient asked for."""
    first, differentiable = tensors[0], torch.is_grad_enabled()
    if not first.is_cuda:  # before anything else, as a CPU asks for every token
        return False
    if not all(t.device == first.device and t.numel() and t.dtype in (torch.float32, torch.bfloat16) for t in tensors):
        return False
    return not (differentiable and any(t.requires_grad for t in tensors)) and _obstacle() is None


@torch.compiler.assume_constant_result
def _obstacle() -> str | None:
    return obstacle()


def linear_attention(
    a: Tensor, b: Tensor, value: Tensor, *, state: FeatureState
) -> tuple[Tensor, Tensor, FeatureState]:
    """:func:`dofla.attention.chunked`, causal, in float32. Values may be bfloat16: products are then of bfloat16
    numbers, summed in float32."""
    a, b, value = a.contiguous(), b.contiguous(), value.contiguous()
    state = state.map(torch.Tensor.contiguous)
    batch, heads, length, _ = a.shape
    out = torch.empty(batch, heads, length, value.shape[-1], dtype=torch.float32, device=a.device)
    normalizer = torch.empty(batch, heads, length, dtype=torch.float32, device=a.device)
    after = state.map(torch.empty_like)
    with torch.cuda.device_of(a):  # Triton launches on the current device
        if length == 1:
            _token_by_token(a, b, value, state, out, normalizer, after, None)
        else:
            _prefill(a, b, value, state, out, normalizer, after)
    return out, normalizer, after


def _prefill(
    a: Tensor, b: Tensor, value: Tensor, state: FeatureState, out: Tensor, normalizer: Tensor, after: FeatureState
) -> None:
    """Fills ``out``, ``normalizer`` and ``after``."""
    from dofla.attention.gpu import kernels

    batch, heads, length, features = a.shape
    kv_heads, value_dim = value.shape[1], value.shape[-1]
    units, chunks = batch * kv_heads, block_count(length, CHUNK)
    means = state.mean.new_empty(units, chunks, features, value_dim)
    log_masses = state.log_mass.new_empty(units, chunks, features)
    tops = state.mean.new_empty(units, chunks, features)
    untrusted = torch.empty(units, chunks, dtype=torch.int32, device=a.device)
    sizes = length, features, value_dim

    # Small blocks: the walk is as long as the sequence, so let many walk.
    block_m, block_v = block_size(features, 32), block_size(value_dim, 32)
    kernels.states_before_chunks[(units, block_count(features, block_m), block_count(value_dim, block_v))](
        *(b, value, state.mean, state.log_mass, means, log_masses, tops, untrusted, after.mean, after.log_mass),
        *sizes,
        **{"CHUNK": CHUNK, "BLOCK_M": block_m, "BLOCK_V": block_v, "PRECISION": _PRECISION},
    )
    # What fits into the registers of sm_80 and sm_90: products in float32 take twice as many threads.
    block_m, block_v = block_size(features, 32), block_size(value_dim, 64)
    kernels.read_chunks[(batch * heads * chunks, block_count(value_dim, block_v))](
        *(a, b, value, means, log_masses, tops, untrusted, out, normalizer),
        *(heads // kv_heads, *sizes),
        **{"CHUNK": CHUNK, "BLOCK_M": block_m, "BLOCK_V": block_v, "PRECISION": _PRECISION},
        num_warps=8 if value.dtype == torch.float32 else 4,
        num_stages=1,  # its loop is short; several stages would take more shared memory than most GPUs have
    )
    _token_by_token(a, b, value, FeatureState(means, log_masses), out, normalizer, None, untrusted)


def _token_by_token(
    a: Tensor,
    b: Tensor,
    value: Tensor,
    before: FeatureState,
    out: Tensor,
    normalizer: Tensor,
    after: FeatureState | None,
    only: Tensor | None,
) -> None:
    """Each chunk from the state ``before`` it [units, chunks, ...], a unit being one KV head of one batch row.

    ``only`` [units, chunks] marks the chunks to do; None means all. Into ``after`` go the states after them.
    """
    from dofla.attention.gpu import kernels

    batch, heads, length, features = a.shape
    kv_heads, value_dim = value.shape[1], value.shape[-1]
    # A query sees all features at once, so their number decides how many values fit beside them.
    block_m = block_size(features, None)
    block_v = block_size(value_dim, max(2048 // block_m, 16))
    grid = batch * kv_heads * block_count(length, CHUNK), block_count(value_dim, block_v)
    kernels.token_by_token[grid](
        *(a, b, value, before.mean, before.log_mass, only, out, normalizer),
        *((None, None) if after is None else (after.mean, after.log_mass)),
        *(heads // kv_heads, length, features, value_dim),
        **{"CHUNK": CHUNK, "BLOCK_M": block_m, "BLOCK_V": block_v},
        num_warps=4 if block_m * block_v <= 4096 else 8,
    )


def block_size(size: int, most: int | None) -> int:
    """The power of two that holds ``size``, at least 16 (the least a product takes) and at most ``most``."""
    block = max(16, 1 << (size - 1).bit_length())
    return block if most is None else min(block, most)


def block_count(size: int, block: int) -> int:
    return -(-size // block)
