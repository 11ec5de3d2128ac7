"""torch SDPA served by fulmen: replaces torch's flash-attention operators on CUDA, and gives them back.

    fulmen.integrations.sdpa.install()
    F.scaled_dot_product_attention(q, k, v, is_causal=True)     # where torch chooses flash, fulmen computes
    fulmen.integrations.sdpa.uninstall()

The switch is torch's own (`torch.nn.attention.register_flash_attention_impl`). torch still decides when flash is
chosen, by dtype, head dim and mask; only what the operators do is replaced: `_scaled_dot_product_flash_attention`
(dense; scaled_dot_product_attention) and `_flash_attention_forward` (packed; nested tensors, `varlen_attn`), with
their backwards. The functions here have those operators' signatures.

Here `auto` leaves out the backend `sdpa`, which would call the operators it replaces.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn.attention
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import outside_autocast
from fulmen.flash.spec import FlashSpec, Residuals, checked_spec

__all__ = ["install", "installed", "uninstall"]

NAME = "fulmen"
Window = tuple[int | None, int | None]

_before: str | None = None  # the implementation that was active when fulmen was installed


def install(backend: str = "auto") -> None:
    """Activates fulmen as torch's flash attention on CUDA; `backend` is `flash_attention`'s, but not "sdpa"."""
    global _before
    registry = _registry()
    known = sorted(name for name, kernel in dispatch.kernels("flash").items() if kernel.backward and name != "sdpa")
    if backend not in ("auto", *known):
        raise ValueError(f"backend={backend!r}: torch SDPA can be served by {', '.join(known)}, or 'auto'")
    active = registry.current_flash_attention_impl()
    if active == NAME:
        raise RuntimeError("fulmen serves torch SDPA already: call uninstall() first")
    registry.register_flash_attention_impl(NAME, register_fn=functools.partial(Override, backend))
    registry.activate_flash_attention_impl(NAME)
    _before = active


def uninstall() -> None:
    """Gives the operators back to whoever had them; the name `fulmen` stays in torch's list of implementations."""
    global _before
    registry = _registry()
    active = registry.current_flash_attention_impl()
    if active != NAME:
        raise RuntimeError(f"fulmen does not serve torch SDPA; active is {active or 'what torch was built with'}")
    registry.restore_flash_attention_impl()
    if _before is not None:
        registry.activate_flash_attention_impl(_before)
    _before = None


@contextlib.contextmanager
def installed(backend: str = "auto") -> Iterator[None]:
    """`with installed(): ...`; not per thread: other threads see it, too."""
    install(backend)
    try:
        yield
    finally:
        uninstall()


def _registry() -> Any:
    verbs = ("register", "activate", "restore", "current")
    missing = [n for verb in verbs if not hasattr(torch.nn.attention, n := f"{verb}_flash_attention_impl")]
    if missing:
        raise ImportError(f"torch {torch.__version__} has no torch.nn.attention.{missing[0]}; 2.11 and 2.13 have it")
    return torch.nn.attention


class Override:
    """The operators' replacements, in force until `remove`: what torch calls a handle."""

    def __init__(self, backend: str) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", "CUDA")
        for name, function in OPERATORS.items():
            if hasattr(torch.ops.aten, name):
                self.library.impl(name, functools.partial(function, backend=backend), "CUDA")

    def remove(self) -> None:
        self.library = None  # a library's registrations go with it


# ------------------------------------------------------------------------------- dense: (B, H, N, D)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """(o, lse, no offsets, N_Q, N_KV, two for dropout, no debug mask)."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    o, lse = _forward(query, key, value, None, None, scale, _window(None, None, is_causal), backend)
    return o, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(dropout_p=dropout_p)
    facts = (scale, _window(None, None, is_causal), backend)
    return _backward(query, key, value, None, None, out, logsumexp, grad_out, *facts)


# ------------------------------------------------- (B, N, H, D), or packed: (total, H, D) with offsets


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """(o, lse, two for dropout, no debug mask); lse (B, H, N), packed (H, total)."""
    _refuse(
        dropout_p=dropout_p, return_debug_mask=return_debug_mask, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
        block_table=block_table,
    )  # fmt: skip
    packed = cum_seq_q is not None
    q, k, v = (_heads_first(x, packed) for x in (query, key, value))
    facts = (scale, _window(window_size_left, window_size_right, is_causal), backend)
    o, lse = _forward(q, k, v, _offsets(cum_seq_q), _offsets(cum_seq_k), *facts)
    return _tokens_first(o, packed), lse[0] if packed else lse, *_unused(query)


def flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`flash_forward` into `out`; lse."""
    o, lse, *_ = flash_forward(*args, **kwargs)
    out.copy_(o)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(dropout_p=dropout_p)
    packed = cum_seq_q is not None
    q, k, v, o, do = (_heads_first(x, packed) for x in (query, key, value, out, grad_out))
    lse = logsumexp[None] if packed else logsumexp
    facts = (scale, _window(window_size_left, window_size_right, is_causal), backend)
    dq, dk, dv = _backward(q, k, v, _offsets(cum_seq_q), _offsets(cum_seq_k), o, lse, do, *facts)
    return _tokens_first(dq, packed), _tokens_first(dk, packed), _tokens_first(dv, packed)


# --------------------------------------------------------------------------------- what they share


@functools.lru_cache(maxsize=4096)
def _kernel(spec: FlashSpec, backend: str) -> dispatch.Kernel:
    if backend != "auto":
        return dispatch.pick("flash", spec, backend)
    for kernel in dispatch.candidates("flash", spec):
        if kernel.name != "sdpa" and kernel.backward is not None and kernel.supports(spec) is None:
            return kernel
    why = dispatch.reasons("flash", spec) | {"sdpa": "is what fulmen replaces here"}
    found = dispatch.table("flash", spec, why)
    raise NotImplementedError(f"fulmen serves torch SDPA and has no backend for this call:\n{found}")


@outside_autocast
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, scale: float | None,
    window: Window, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = Residuals(q, k, v, None, cu_seqlens_q, cu_seqlens_k)
    spec = _spec(x, scale, window)._replace(with_lse=True, needs_grad=False)  # autograd is above these operators
    return _kernel(spec, backend).forward(spec, x)


@outside_autocast
def _backward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, o: Tensor, lse: Tensor,
    do: Tensor, scale: float | None, window: Window, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x = Residuals(q, k, v, None, cu_seqlens_q, cu_seqlens_k)
    spec = _spec(x, scale, window)._replace(with_lse=False, needs_grad=True)
    backward = _kernel(spec, backend).backward
    assert backward is not None, "_kernel and install take none without"
    if do.stride(3) != 1:  # an expanded gradient, as of o.sum()
        do = do.contiguous()
    dq, dk, dv, _ = backward(spec, x, o, lse.contiguous(), do, None)
    return dq, dk, dv


def _spec(x: Residuals, scale: float | None, window: Window) -> FlashSpec:
    return checked_spec(
        x.q, x.k, x.v, window=window, scale=scale, cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=x.cu_seqlens_k
    )


def _window(left: int | None, right: int | None, is_causal: bool) -> Window:
    """torch's window, where None and -1 are no limit."""
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return left, 0 if is_causal else right


def _offsets(cum_seq: Tensor | None) -> Tensor | None:
    return None if cum_seq is None else cum_seq.to(torch.int32)


def _heads_first(x: Tensor, packed: bool) -> Tensor:
    """(B, N, H, D) or (total, H, D) as a view (B, H, N, D)."""
    return x.transpose(0, 1)[None] if packed else x.transpose(1, 2)


def _tokens_first(x: Tensor, packed: bool) -> Tensor:
    return x[0].transpose(0, 1) if packed else x.transpose(1, 2)


def _unused(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a random generator that dropout would need, and a debug mask."""
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    return seed, offset, torch.empty(0, dtype=q.dtype, device=q.device)


def _refuse(dropout_p: float = 0.0, return_debug_mask: bool = False, **absent: Any) -> None:
    if dropout_p:
        _lack(f"dropout_p={dropout_p}")
    if return_debug_mask:
        _lack("return_debug_mask=True")
    for name, x in absent.items():
        if x is not None:
            _lack(name)


def _lack(what: str) -> NoReturn:
    raise NotImplementedError(
        f"fulmen serves torch SDPA and has no {what}: call fulmen.integrations.sdpa.uninstall(), or choose another "
        "backend with torch.nn.attention.sdpa_kernel"
    )


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
