"""Latent attention, absorbed MLA: o = softmax(mask(scale q kv^T)) kv[..., :value_dim], one kv for all heads.

The path of a call is that of `flash_attention`: look for the plan of an equal call (`fulmen.plans`); without one check
arguments, build the spec and let `dispatch.pick` choose a kernel. Compilers and modes see one `torch.library` operator.
There is no backward; backend="reference" is differentiable as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import (
    empty_rows,
    is_plain_eager,
    no_gradient,
    refuse_unsupported_derivatives,
    register_operator,
)
from fulmen.latent.spec import LatentSpec, Residuals, check_inputs, check_options, scale_of, spec_of
from fulmen.plans import Plan, Repeated


def latent_attention(
    q: Tensor,
    kv: Tensor,
    *,
    value_dim: int = 512,
    kv_lengths: Tensor | None = None,
    max_kv_length: int | None = None,
    page_table: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of all heads over one latent cache, as in absorbed MLA: o (B, H, N_Q, value_dim).

    There is no gradient, but for backend="reference", which is plain PyTorch.

    q              (B, H, N_Q, D), as 576 = 512 + 64; any strides whose last dimension is contiguous.
    kv             (B, N_KV, D): the keys of every head, whose first `value_dim` columns are the values. With a
                   `page_table` (pages, page, D), pages of 16 to 256 keys.
    kv_lengths     int32 (B,) on the device: row b has its first kv_lengths[b] keys; None: all there is room for. What
                   lies beyond may be anything, NaN included. A length is clamped to 0 and the room; a row of length 0
                   gives zeros.
    max_kv_length  the longest row to expect, by which keys are split over the GPU; the room unless given. It decides
                   speed alone.
    page_table     int32 (B, pages of a row) on the device: entry i is the page of kv that holds the keys from i * page
                   on. Rows may share pages. Entries are clamped to the pages there are.
    causal         query i sees the keys up to i + kv_lengths[b] - N_Q, so the last query sees everything.
    scale          multiplies q kv^T; 1 / sqrt(D) unless given.
    backend        "auto" takes the fastest that supports the call; a name works or raises, it never falls back.

    Nothing is read on the host, and a call does not depend on lengths, so that it can be captured in a CUDA graph. The
    result has the same bits every time.
    """
    return attend(q, kv, value_dim, kv_lengths, max_kv_length, page_table, causal, scale, backend)


def attend(
    q: Tensor, kv: Tensor, value_dim: int, kv_lengths: Tensor | None, max_kv_length: int | None,
    page_table: Tensor | None, causal: bool, scale: float | None, backend: str, appended: bool = False,
) -> Tensor:  # fmt: skip
    """`latent_attention`, by default.

    appended  whether the launches before this one that overlap (PDL) write nothing but q and the last N_Q keys of each
              row, and the one right before waits before it lets this one start. Other keys are then read before the
              wait. Compilers and modes do not know of it.
    """
    tensors: tuple[Any, ...] = (q, kv, kv_lengths, page_table)
    plain = (
        type(value_dim) is int
        and type(causal) is bool
        and type(backend) is str
        and (max_kv_length is None or type(max_kv_length) is int)
        and (scale is None or type(scale) is float)
    )
    key: tuple[Any, ...] = (value_dim, max_kv_length, causal, scale, backend, appended)
    if plain:
        which, given = plans.given(tensors)
        plan = plans.find((which, "latent", *key), given)
        if plan is not None:
            return plan.forward.run(*tensors)
    options = check_options(causal, max_kv_length)
    x, E = check_inputs(q, kv, kv_lengths, page_table, value_dim)
    facts = (E, scale_of(x.q, scale), *options)
    if dispatch.differentiable_as_it_is("latent", backend):  # plain PyTorch: no boundary to cross
        spec = spec_of(x, *facts)
        return dispatch.pick("latent", spec, backend).forward(spec, x)
    refuse_unsupported_derivatives("latent_attention", x)
    if torch.is_grad_enabled() and (x.q.requires_grad or x.kv.requires_grad):
        raise NotImplementedError(
            "latent_attention has no gradient, and q or kv requires one: call it under torch.no_grad(), or take "
            "backend='reference', which is differentiable"
        )
    if not is_plain_eager(*x):
        return torch.ops.fulmen.latent_forward(*x, *facts, backend)
    key = key if plain else (*facts, backend, appended)
    return _planned(("latent", *key), x, (*facts, backend), appended).forward.run(*x)


def _planned(key: tuple[Any, ...], x: Residuals, arguments: tuple[Any, ...], appended: bool = False) -> Plan:
    """The plan of a call whose arguments are right: tensors, and after them what the operator takes."""
    which, given = plans.given(x)
    plan = plans.find((which, *key), given)
    if plan is None:
        spec = spec_of(x, *arguments[:-1])._replace(appended=appended)
        plan = plans.keep((which, *key), given, _plan(spec, dispatch.pick("latent", spec, arguments[-1]), arguments))
    return plan


def _plan(spec: LatentSpec, kernel: dispatch.Kernel, arguments: tuple[Any, ...]) -> Plan:
    refused = Repeated(no_gradient("latent_attention"), None)
    return Plan(spec, plans.forward_of(kernel, spec, Residuals), lambda: refused, arguments, False)


# ------------------------------------------------------------------------- the torch.library boundary


_lib = torch.library.Library("fulmen", "FRAGMENT")
TENSORS = 4


def _forward(*args: Any) -> Tensor:
    tensors, arguments = Residuals(*args[:TENSORS]), args[TENSORS:]
    return _planned(("latent operator", *arguments), tensors, arguments).forward.run(*tensors)


def _forward_fake(q: Tensor, kv: Tensor, _lengths: Any, _table: Any, value_dim: int, *facts: Any) -> Tensor:
    return empty_rows(q, q.shape[1], value_dim)


register_operator(
    _lib,
    "latent_forward(Tensor q, Tensor kv, Tensor? kv_lengths, Tensor? page_table, int value_dim, float scale,"
    " bool causal, int? max_kv_length, str backend) -> Tensor",
    _forward,
    _forward_fake,
    no_gradient("latent_attention"),
)
