"""flash-attn's functions with its signatures, layout and meaning, computed by fulmen.

    from fulmen.integrations.flash_attn import flash_attn_func      # was: from flash_attn import flash_attn_func

q, k, v are (B, N, H, D), packed (total, H, D), and copied if their last dimension is strided, as flash-attn does.
`causal` and windows are aligned to the bottom right; -1 in a window is no limit and softcap 0 or less is no cap.

With `return_attn_probs` a call gives (o, lse, None): lse is (B, H, N), packed (H, total), differentiable here, and -inf
for a row that sees no key, where flash-attn has +inf. The probabilities, which flash-attn has only for its tests, are
None. max_seqlen_* are not needed. `deterministic` on a GPU takes backend "triton", whose gradients repeat bit for bit.

`flash_attn_with_kvcache` and block tables have no gradients; kvcache.py has what comes before its attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fulmen.boundary import require_tensors, row_contiguous
from fulmen.flash.op import flash_attention, flash_attention_with_lse
from fulmen.integrations import kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Output = Tensor | tuple[Tensor, Tensor, None]
WindowSize = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """q (B, N_Q, H, D), k and v (B, N_KV, H_KV, D) to o (B, N_Q, H, D)."""
    _refuse(dropout_p, alibi_slopes)
    _check_rank(4, "(B, N, heads, head dim)", q=q, k=k, v=v)
    options = _options(q, softmax_scale, causal, window_size, softcap, deterministic)
    q, k, v = (row_contiguous(x).transpose(1, 2) for x in (q, k, v))
    if not return_attn_probs:
        return flash_attention(q, k, v, **options).transpose(1, 2)
    o, lse = flash_attention_with_lse(q, k, v, **options)
    return o.transpose(1, 2), lse, None


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_func`, with kv (B, N_KV, 2, H_KV, D)."""
    k, v = _unpacked("kv", kv, 2, 5, "(B, N, 2, heads, head dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_func`, with qkv (B, N, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, 3, 5, "(B, N, 3, heads, head dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Output:
    """q (total_q, H, D), k and v (total_k, H_KV, D), int32 offsets (sequences + 1,) to o (total_q, H, D).

    With `block_table` k and v are pages (pages, page, H_KV, D), with `seqused_k` (sequences,) alone they are a cache
    (sequences, capacity, H_KV, D). Its lengths are seqused_k or the differences of cu_seqlens_k. No gradients.
    """
    _refuse(dropout_p, alibi_slopes)
    _check_rank(3, "(total, heads, head dim)", q=q)
    _check_offsets(cu_seqlens_q=cu_seqlens_q)
    options = _options(q, softmax_scale, causal, window_size, softcap, deterministic)
    if block_table is None and seqused_k is None:
        _check_rank(3, "(total, heads, head dim)", k=k, v=v)
        _check_offsets(cu_seqlens_k=cu_seqlens_k)
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        k, v = (row_contiguous(x).transpose(0, 1)[None] for x in (k, v))
    else:
        require_tensors({}, {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "block_table": block_table})
        _check_rank(4, "(pages, page, heads, head dim), or (sequences, capacity, heads, head dim)", k=k, v=v)
        if seqused_k is None and cu_seqlens_k is None:
            raise ValueError("block_table needs seqused_k, or cu_seqlens_k, for the lengths of the sequences")
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        kvcache.check_read("cu_seqlens_k" if seqused_k is None else "seqused_k", lengths, k, block_table)
        options |= {"cu_seqlens_q": cu_seqlens_q, "kv_lengths": lengths, "page_table": block_table}
        k, v = (x.transpose(1, 2) for x in (k, v))
    q = row_contiguous(q).transpose(0, 1)[None]
    if not return_attn_probs:
        return flash_attention(q, k, v, **options)[0].transpose(0, 1)
    o, lse = flash_attention_with_lse(q, k, v, **options)
    return o[0].transpose(0, 1), lse[0], None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B, N_Q, H, D) over a cache, to which k and v (B, N_NEW, H_KV, D) are appended in place, to o (B, N_Q, H, D).

    k_cache, v_cache  (rows, capacity, H_KV, D) or, with a block_table, (pages, page, H_KV, D) of 16 to 256 tokens
    cache_seqlens     int32 (B,) or an int: tokens in the cache before k and v; required with k. With the new ones they
                      are at most the capacity.
    cache_batch_idx   int32 (B,): the cache's row of each row of q. They differ where k and v are appended. Copies these
                      rows if the capacity is no multiple of 16 or rows are apart in memory.
    cache_leftpad     int32 (B,): the first token that counts, at most cache_seqlens. Copies the rows.
    rotary_cos, _sin  (positions, dim / 2), positions at least the capacity: turn k, and q at the same positions; all of
                      q at the first new position unless causal or windowed
    num_splits        accepted and not needed: keys are split by the capacity

    Lengths stay on the GPU and shapes do not change, so a step can be captured in a CUDA graph. No gradients.

    Values of tensors are checked on the CPU only. On a GPU lengths and rows are clamped for reading; new tokens beyond
    the capacity, or of a row that the cache does not have, are not written. Two writers of one row leave it undefined.
    """
    _refuse(0.0, alibi_slopes)
    _number("num_splits", num_splits, operator.index)
    options = _options(q, softmax_scale, causal, window_size, softcap, False)
    each_query = options["causal"] or options["window"] is not None
    turn = kvcache.Turn(rotary_cos, rotary_sin, bool(rotary_interleaved), each_query)
    caches = kvcache.Caches(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    q, caches = kvcache.update(q, k, v, caches, turn)
    k_all, v_all, lengths, table = kvcache.readable(q, caches)
    q, k_all, v_all = (x.transpose(1, 2) for x in (q, k_all, v_all))
    options |= {"kv_lengths": lengths, "page_table": table}
    if not return_softmax_lse:
        return flash_attention(q, k_all, v_all, **options).transpose(1, 2)
    o, lse = flash_attention_with_lse(q, k_all, v_all, **options)
    return o.transpose(1, 2), lse


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_varlen_func`, with kv (total_k, 2, H_KV, D)."""
    k, v = _unpacked("kv", kv, 2, 4, "(total, 2, heads, head dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """As `flash_attn_varlen_func`, with qkv (total, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, 3, 4, "(total, 3, heads, head dim)")
    _check_offsets(cu_seqlens=cu_seqlens)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _options(
    q: Tensor, softmax_scale: float | None, causal: bool, window_size: WindowSize, softcap: float, deterministic: bool
) -> dict[str, Any]:
    if not isinstance(window_size, Sequence | Tensor) or len(window_size) != 2:
        raise ValueError(f"window_size={window_size!r}: must be (left, right), each an int, -1 for no limit")
    sides = (_number(f"window_size[{i}]", side, operator.index) for i, side in enumerate(window_size))
    left, right = (None if side < 0 else side for side in sides)
    cap = _number("softcap", softcap)
    return {
        "causal": bool(causal),
        "window": None if left is None and right is None else (left, right),
        "softcap": None if cap <= 0 else cap,
        "scale": None if softmax_scale is None else _number("softmax_scale", softmax_scale),
        "backend": "triton" if deterministic and q.is_cuda else "auto",
    }


def _number(name: str, value: Any, read: Callable[[Any], Any] = float) -> Any:
    """A Python number; `value` may be numpy's or, as in flash-attn, a 0-d tensor on the CPU."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ValueError(f"{name} is a tensor on {value.device}, which the host would wait for: pass a number")
    try:
        return read(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={value!r}: must be {'a number' if read is float else 'an int'}") from None


def _refuse(dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p:
        raise NotImplementedError(f"dropout_p={dropout_p}: fulmen has no attention dropout; pass 0.0")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: fulmen's softmax attention has no ALiBi; pass None")


def _check_rank(rank: int, layout: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.is_nested:
            raise ValueError(f"{name} is a nested tensor: use flash_attn_varlen_func")
        require_tensors({name: x}, {})
        if x.ndim != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have {rank} dimensions: {layout}")


def _check_offsets(**offsets: Tensor | None) -> None:
    """To the operation None says that nothing is packed."""
    for name, x in offsets.items():
        if x is None:
            raise ValueError(f"{name} is None, must be int32 offsets (sequences + 1,); of one sequence they are [0, N]")


def _unpacked(name: str, x: Tensor, parts: int, rank: int, layout: str) -> tuple[Tensor, ...]:
    require_tensors({name: x}, {})
    if x.ndim != rank or x.shape[-3] != parts:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must be {layout}")
    return x.unbind(-3)
