"""Where PyTorch ends and our kernels begin: what every operation does with the tensors it is handed.

Autocast, tensor subclasses, compilers, dispatch modes and function transforms are PyTorch's ways to look at a call.
An op asks `is_plain_eager` whether any is there: if not, it runs its backend at once; if so, it goes through its
`torch.library` operator, which all of them understand.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._library.autograd import Info as AutogradInfo
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state

# --------------------------------------------------------------------------------------------- checks


def require_tensors(required: dict[str, Any], optional: dict[str, Any]) -> None:
    for name, x in (required | {n: x for n, x in optional.items() if x is not None}).items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}, must be a torch.Tensor")
        if x.is_nested:
            raise ValueError(f"{name} is a nested tensor, must be a dense one: pack sequences along N, with cu_seqlens")


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, max_head_dim: int, same_length: bool, kv_rows: int | None = None,
    groups: bool = False,
) -> None:  # fmt: skip
    """One clear error for what is wrong with q (B, H, N, D), k (B, H_KV, N_KV, D) and v (B, H_KV, N_KV, E).

    kv_rows  what k and v have instead of B: the rows or pages of a cache
    groups   q and k may also have equally many heads, which divide v's
    """

    def got() -> str:
        return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions, must have 4: (B, heads, N, head dim); {got()}")
    (B, H, N, D), (B_K, H_KV, N_K, D_K), (B_V, H_V, N_V, E) = q.shape, k.shape, v.shape
    if kv_rows is not None:
        if kv_rows != B_K:
            raise ValueError(f"k must have {kv_rows} rows, one for each of kv_lengths, or a page_table; {got()}")
    elif B_K != B or (same_length and N_K != N):
        raise ValueError(f"k must share B={B}{f' and N={N}' if same_length else ''} with q; {got()}")
    if B_V != B_K or N_V != N_K:
        raise ValueError(f"v must share B={B_K} and N={N_K} with k; {got()}")
    if D_K != D:
        raise ValueError(f"k has head dim {D_K}, must have q's D={D}; {got()}")
    shared = groups and H == H_KV > 0 and H_V % H == 0
    if H_V != H_KV and not shared:
        more = ", or a multiple if q has as many as k" if groups else ""
        raise ValueError(f"v has {H_V} heads, must have as many as k, {H_KV}{more}; {got()}")
    if (H_KV == 0 and H != 0) or (H_KV != 0 and H % H_KV != 0):
        raise ValueError(f"k and v have {H_KV} heads, which must divide q's H={H}; {got()}")
    if not (1 <= D <= max_head_dim and 1 <= E <= max_head_dim):
        raise ValueError(f"head dims must be 1 to {max_head_dim}: D={D}, E={E}; {got()}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"q is {q.dtype}, must be bfloat16, float16, float32 or float64")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}, must be q's {q.dtype}: cast one of them")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, must be on q's {q.device}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(
                f"{name}'s last dimension must be contiguous, its strides are {tuple(x.stride())} for shape "
                f"{tuple(x.shape)}: call .contiguous() on it"
            )


def is_number(x: Any) -> bool:
    """Whether x is a real number, numpy's included, and no bool."""
    return (isinstance(x, int | float) and not isinstance(x, bool)) or (not isinstance(x, int) and isinstance(x, Real))


def row_contiguous(x: Tensor) -> Tensor:
    """x, or a copy of it if its last dimension is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.clone(memory_format=torch.contiguous_format)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_int(x: Any) -> int:
    """x, an int, numpy's included, or a 0-d tensor on the CPU, as an int; -1 for anything else."""
    if isinstance(x, int):
        return -1 if isinstance(x, bool) else x
    if isinstance(x, Tensor) and (x.device.type != "cpu" or x.ndim or x.is_floating_point() or x.dtype == torch.bool):
        return -1  # to read a GPU's number would synchronise
    try:
        return operator.index(x)
    except TypeError:
        return -1


def check_scale(scale: float) -> float:
    if not is_number(scale) or not 1e-30 <= abs(scale) <= 1e30:
        raise ValueError(f"scale={scale!r}: must be a number of magnitude 1e-30 to 1e30, for fp32 arithmetic")
    return float(scale)


def check_integers(name: str, x: Tensor | None) -> None:
    """For tensors that are cast to int32 or int64 afterwards."""
    if x is not None and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
        raise ValueError(f"{name} is {x.dtype}, must be integers")


def check_int32(name: str, x: Tensor, q: Tensor, of: str = "q") -> None:
    """int32 on the device of q, the argument called `of`."""
    if x.dtype != torch.int32:
        raise ValueError(f"{name} is {x.dtype}, must be int32")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, must be on {of}'s {q.device}")


def check_offsets(name: str, offsets: Tensor, x: Tensor, of: str = "q", along: int = 2) -> None:
    """`offsets` of sequences packed along a dimension of x, the argument called `of`: all but their values, which are
    `check_offset_values`' matter."""
    N = x.shape[along]
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}, must be (sequences + 1,)")
    if offsets.shape[0] == 1 and N > 0:
        raise ValueError(f"{name} has shape (1,), so there is no sequence, but N={N}: it must end at N")
    check_int32(name, offsets, x, of)
    if x.shape[0] != 1:
        raise ValueError(f"{name} packs sequences along N, so B must be 1; got {of} {tuple(x.shape)}")


def check_offset_values(name: str, offsets: Tensor | None, N: int) -> None:
    """On the CPU, where a look at values costs nothing: they rise from 0 to N."""
    if offsets is None or offsets.device.type != "cpu":
        return
    ends = offsets.tolist()
    if ends[0] != 0:
        raise ValueError(f"{name} must start at 0; got {brief(ends)}")
    if any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"{name} must not decrease; got {brief(ends)}")
    if ends[-1] != N:
        raise ValueError(f"{name} must end at N={N}; got {brief(ends)}")


def check_distinct(name: str, rows: Tensor, there: int, why: str) -> None:
    """Those of `rows`, on the CPU, that are among the `there` rows of a pool differ; the others are nobody's."""
    taken = [row for row in rows.tolist() if 0 <= row < there]
    if len(set(taken)) < len(taken):
        raise ValueError(f"{name} must differ{why}; got {brief(rows.tolist())}")


def brief(values: list[int]) -> str:
    """For a message."""
    return str(values if len(values) <= 16 else [*values[:8], "...", *values[-8:]])


# --------------------------------------------------------------------------------------- allocation


def empty_rows(x: Tensor, heads: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B, heads, N, size) tensor whose memory order of B, heads and N follows x's strides."""
    B, _, N, _ = x.shape
    if x.is_contiguous():
        return torch.empty(B, heads, N, size, dtype=dtype or x.dtype, device=x.device)
    order = sorted(range(3), key=x.stride, reverse=True)
    shape = [(B, heads, N)[i] for i in order] + [size]
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    back = [order.index(i) for i in range(3)]
    return out.permute(*back, 3)


# -------------------------------------------------------------------------------- PyTorch looking on


def plain_memory(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views that only say "negated" are written out: kernels read memory, not such bits."""
    if torch.compiler.is_compiling() or not (q.is_neg() or k.is_neg() or v.is_neg()):
        return q, k, v
    return q.resolve_neg(), k.resolve_neg(), v.resolve_neg()


def autocasts(x: Tensor) -> bool:
    """Whether torch.autocast is enabled on the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside torch.autocast q, k, v take the autocast dtype, as in torch's own attention."""
    if not autocasts(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def aligned(*tensors: Tensor) -> bool:
    """Whether `rows_aligned` holds for all; outside of plain eager calls, where no kernel is called, it does."""
    return not is_plain_eager(*tensors) or all(map(rows_aligned, tensors))


def rows_aligned(x: Tensor, repeats: bool = False) -> bool:
    """Whether rows begin at multiples of 16 bytes and, unless they may, no two at the same: what TMA takes."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and not any(
        n > 1 and (s % unit or (s == 0 and not repeats)) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def readable(x: Tensor) -> Tensor:
    """x, or a copy with its memory order that TMA can read."""
    return x if aligned(x) else empty_rows(x, x.shape[1], x.shape[3]).copy_(x)


def tidy_rows(x: Tensor) -> Tensor:
    """x (B, H, N, D), or a copy if its rows are not contiguous in memory as they are."""
    return row_contiguous(x.resolve_neg())


def outside_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Dtypes were settled in the op's checks; inside, autocast must not touch what a backend computes in fp32."""

    @functools.wraps(implementation)
    def run(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not autocasts(q):
            return implementation(q, *args, **kwargs)
        with torch.autocast(q.device.type, enabled=False):
            return implementation(q, *args, **kwargs)

    return run


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether no compiler, dispatch mode, transform or tensor subclass is active."""
    if torch.compiler.is_compiling() or _dispatch_modes() or _transform() is not None or _tracing() is not None:
        return False
    for x in tensors:  # a loop: `all` of a generator takes twice the time
        kind = type(x)
        if x is not None and not (kind is Tensor or kind is torch.nn.Parameter):
            return False
        if x is not None and not torch._C._has_storage(x):  # legacy vmap, sparse tensors
            return False
    return True


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured there: what is computed holds nothing until the first replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_unsupported_derivatives(op: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Raises for forward-mode AD and the transforms of torch.func, which the operators do not support."""
    func = None if torch.compiler.is_compiling() else torch._C._functorch.peek_interpreter_stack()
    forward_mode = forward_ad._current_level >= 0 and any(
        t is not None and t.is_floating_point() and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
    if forward_mode or (func is not None and func.key() in (TransformType.Grad, TransformType.Jvp)):
        raise NotImplementedError(
            f"{op} has no forward-mode derivative and no torch.func rules; backend='reference' has both"
        )


def needs_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a backward may follow a call with these tensors."""
    if not torch.is_grad_enabled():
        return False
    hidden = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return hidden or any(t is not None and t.requires_grad for t in tensors)  # under vmap it cannot be seen


# --------------------------------------------------------------------------------- torch.library operators


def register_operator(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any],
    save: Callable[..., Any] | None = None,
) -> None:
    """Defines an operator of the namespace fulmen.

    gradients, save  the backward and setup_context of `torch.library.register_autograd`

    In compiled code no argument requires a gradient. Such a call runs at once, where register_autograd's own kernel
    would send it through the dispatcher a second time.
    """
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fulmen::{name}", fake, lib=library)
    operator = getattr(torch.ops.fulmen, name).default
    general = make_autograd_impl(operator, AutogradInfo(gradients, save))
    tensors = [i for i, a in enumerate(operator._schema.arguments) if "Tensor" in str(a.type)]

    def kernel(keyset: Any, *args: Any) -> Any:
        given = [args[i] for i in tensors if i < len(args)]  # defaults may be left out
        if not needs_gradient(given) and is_plain_eager(*given):
            return implementation(*args)
        return general(keyset, *args)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def register_mutation(
    library: torch.library.Library, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Defines an operator of the namespace fulmen that changes arguments in place, as its schema says.

    It refuses gradients. Autograd counts the changes, so that it refuses a backward that saved such an argument before.
    """
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fulmen::{name}", fake, lib=library)
    operator = getattr(torch.ops.fulmen, name).default
    arguments = operator._schema.arguments
    changed = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def kernel(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            raise NotImplementedError(f"{name} has no gradient: call it under torch.no_grad()")
        torch._C._increment_version([args[i] for i in changed if i < len(args) and args[i] is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


# --------------------------------------------------------------------------------------- second derivatives


class _Unpacked:
    """A backward's context whose saved tensors are unpacked once: a checkpoint refuses a second time."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _OnceDifferentiable(torch.autograd.Function):
    """The first `count` tensors, as a function of all of them whose backward raises."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple(t if t is None else t.clone() for t in tensors[:count])  # views have no batching rule

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError(f"{ctx.name} has no second derivative")


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Makes a Function's backward one whose results cannot be differentiated again.

    torch's own decorator cuts the results off from the saved tensors, and `autograd.grad` of some inputs leaves out
    what is cut off. So the second derivative would silently lack every path through the function. An input of which the
    forward saves something else, such as a cast, must be saved itself, too.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _Unpacked(ctx)
        with torch.no_grad():
            found = backward(ctx, *grads)
        sources = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        return _OnceDifferentiable.apply(backward.__qualname__.split(".")[0], len(found), *found, *sources)

    return run


def no_second_derivative(op: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(f"{op} has no second derivative; backend='reference' is twice differentiable")

    return refuse


def no_gradient(op: str) -> Callable[..., Any]:
    """The backward of operations that have none."""

    def refuse(*args: Any) -> Any:
        raise NotImplementedError(f"{op} has no gradient")

    return refuse
