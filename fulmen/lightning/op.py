"""Lightning attention: linear attention with a per-head exponential decay.

    o_t = scale * sum_{j <= t} exp(-s_h (t - j)) (q_t . k_j) v_j        s = 0 without decay

or, token by token, S_t = exp(-s) S_{t-1} + k_t v_t^T and o_t = scale * q_t S_t, which is why cost grows with N and
not with N^2. This file is the whole story of a call: check, build the spec, let `dispatch.pick` choose, and in the
backward do the same again; nothing but the arguments is saved. Compilers and modes see two `torch.library` operators.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from fulmen import dispatch

MAX_HEAD_DIM = 256


class LightningSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case."""

    B: int
    H: int
    H_KV: int
    N: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float = 1.0
    has_decay: bool = False
    has_initial_state: bool = False
    with_final_state: bool = False
    sequences: int | None = None  # None: not packed

    @property
    def states(self) -> int:
        """How many states enter and leave: one per batch entry, or one per packed sequence."""
        return self.B if self.sequences is None else self.sequences


class Residuals(NamedTuple):
    """The tensors of a call: what a backend's forward and backward work on, and all that is saved between them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None  # (H,)
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal linear attention with optional per-head decay: o (B, H, N, E).

    q              (B, H, N, D); any strides whose last dimension is contiguous, so a (B, N, H, D) tensor may be
                   passed as `x.transpose(1, 2)` at no cost. bf16, fp16 or fp32 (fp64 on the eager backend).
    k, v           (B, H_KV, N, D) and (B, H_KV, N, E); H_KV divides H, query head h reads head h // (H / H_KV).
    decay          None, or the slopes s >= 0 as fp32 (H,) or (H, 1, 1); `fulmen.decay` builds the usual ones.
                   Not differentiable yet. Its sign is checked on the CPU only: on a GPU that would synchronise.
    scale          multiplies the output; 1 as in the Lightning Attention papers (fla defaults to D ** -0.5).
    initial_state  fp32 (B, H, D, E), the state before the first token; differentiable.
    cu_seqlens     int32 (sequences + 1,) on the inputs' device, rising from 0 to N: B is 1 and N holds packed
                   sequences; the state restarts at each boundary, states are (sequences, H, D, E). Values are
                   checked on the CPU only; on a GPU a wrong one is clamped to [0, N], never read out of bounds,
                   and rows that belong to no sequence are undefined.
    backend        "auto" takes the fastest that supports the call; a name works or raises, it never falls back.
    """
    x = _check(q, k, v, decay, scale, initial_state, cu_seqlens)
    return _attend(x, float(scale), False, backend)[0]


def lightning_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As `lightning_attention`, and the state after the last token, fp32 (B or sequences, H, D, E).

    The state is not scaled and is differentiable; pass it as the next call's `initial_state` to continue.
    """
    x = _check(q, k, v, decay, scale, initial_state, cu_seqlens)
    return _attend(x, float(scale), True, backend)


def lightning_attn_func(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None, variant: str = "chunk_loop"
) -> Tensor:
    """The interface of the Lightning Attention packages: unscaled, `s` of shape (H,) or (H, 1, 1).

    `variant` is the schedule on a GPU: "chunk_loop" is one fused sweep per head (backend "triton"), "parallel"
    splits the sequence over programs ("triton_split"), which pays with few heads and long sequences. On a CPU
    both are the eager backend, which works on all chunks at once.
    """
    variants = {"chunk_loop": "triton", "parallel": "triton_split"}
    if variant not in variants:
        raise ValueError(f"variant={variant!r}: must be one of {', '.join(map(repr, variants))}")
    on_gpu = isinstance(q, Tensor) and q.device.type != "cpu"
    backend = variants[variant] if on_gpu else "eager"
    return lightning_attention(q, k, v, s, backend=backend)


# ------------------------------------------------------------------------------------------------ checks


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside torch.autocast q, k, v take the autocast dtype, as in torch's own attention."""
    if q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Residuals:
    """The tensors of a call as backends take them; one clear error for each wrong argument.

    What would take a look at values is left to `_check_values`.
    """
    given = {"q": q, "k": k, "v": v, "decay": decay, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    for name, tensor in given.items():
        if not (isinstance(tensor, Tensor) or (tensor is None and name not in ("q", "k", "v"))):
            raise ValueError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
    q, k, v = _autocast(q, k, v)

    def got() -> str:
        return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions, must have 4: (B, heads, N, head dim); {got()}")
    (B, H, N, D), (B_K, H_KV, N_K, D_K), (B_V, H_V, N_V, E) = q.shape, k.shape, v.shape
    if B_K != B or N_K != N:
        raise ValueError(f"k must share B={B} and N={N} with q; {got()}")
    if B_V != B or N_V != N:
        raise ValueError(f"v must share B={B} and N={N} with q; {got()}")
    if D_K != D:
        raise ValueError(f"k has head dim {D_K}, must have q's D={D}; {got()}")
    if H_V != H_KV:
        raise ValueError(f"v has {H_V} heads, must have as many as k, {H_KV}; {got()}")
    if (H_KV == 0 and H != 0) or (H_KV != 0 and H % H_KV != 0):
        raise ValueError(f"k and v have {H_KV} heads, which must divide q's H={H}; {got()}")
    if not (1 <= D <= MAX_HEAD_DIM and 1 <= E <= MAX_HEAD_DIM):
        raise ValueError(f"head dims must be 1 to {MAX_HEAD_DIM}: D={D}, E={E}; {got()}")
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
    if not 1e-30 <= abs(scale) <= 1e30:
        raise ValueError(f"scale={scale}: its magnitude must be 1e-30 to 1e30, for fp32 arithmetic")
    _check_decay(q, decay)
    _check_states(q, initial_state, cu_seqlens, E)
    slopes = None if decay is None else decay.detach().reshape(H).contiguous()
    ends = None if cu_seqlens is None else cu_seqlens.contiguous()
    return Residuals(q, k, v, slopes, initial_state, ends)


def _check_decay(q: Tensor, decay: Tensor | None) -> None:
    if decay is None:
        return
    H = q.shape[1]
    if decay.shape not in ((H,), (H, 1, 1)):
        raise ValueError(f"decay has shape {tuple(decay.shape)}, must be (H,) or (H, 1, 1) with q's H={H}")
    if decay.dtype != torch.float32:
        raise ValueError(f"decay is {decay.dtype}, must be float32")
    if decay.device != q.device:
        raise ValueError(f"decay is on {decay.device}, must be on q's {q.device}")
    if decay.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("decay.requires_grad: its gradient is not implemented, pass decay.detach()")


def _check_states(q: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, E: int) -> None:
    B, H, _, D = q.shape
    states = B
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, must be (sequences + 1,)")
        if cu_seqlens.dtype != torch.int32:
            raise ValueError(f"cu_seqlens is {cu_seqlens.dtype}, must be int32")
        if cu_seqlens.device != q.device:
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, must be on q's {q.device}")
        if B != 1:
            raise ValueError(f"cu_seqlens packs sequences along N, so B must be 1; got q {tuple(q.shape)}")
        states = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        want = (states, H, D, E)
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if tuple(initial_state.shape) != want:
            of = "(B, H, D, E)" if cu_seqlens is None else "(sequences, H, D, E)"
            raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, must be {of} = {want}")
        if initial_state.dtype != state_dtype:
            raise ValueError(f"initial_state is {initial_state.dtype}, must be {state_dtype} for q of {q.dtype}")
        if initial_state.device != q.device:
            raise ValueError(f"initial_state is on {initial_state.device}, must be on q's {q.device}")
        if not initial_state.is_contiguous():
            raise ValueError(
                f"initial_state must be contiguous, its strides are {tuple(initial_state.stride())} for shape "
                f"{tuple(initial_state.shape)}: call .contiguous() on it"
            )


def _check_values(decay: Tensor | None, cu_seqlens: Tensor | None, N: int) -> None:
    """What a look at values costs nothing for: tensors on the CPU."""
    if decay is not None and decay.device.type == "cpu" and not bool(((decay >= 0) & decay.isfinite()).all()):
        raise ValueError(f"decay must be finite and >= 0 (the state decays as exp(-decay)); got {decay.tolist()}")
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        ends = cu_seqlens.tolist()
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0; got {_brief(ends)}")
        if any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"cu_seqlens must not decrease; got {_brief(ends)}")
        if ends[-1] != N:
            raise ValueError(f"cu_seqlens must end at N={N}; got {_brief(ends)}")


def _brief(values: list[int]) -> str:
    return str(values if len(values) <= 16 else [*values[:8], "...", *values[-8:]])


def spec_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    with_final_state: bool = False,
) -> LightningSpec:
    """The spec of a call whose arguments are right."""
    B, H, N, D = q.shape
    return LightningSpec(
        B=B,
        H=H,
        H_KV=k.shape[1],
        N=N,
        D=D,
        E=v.shape[3],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        has_decay=decay is not None,
        has_initial_state=initial_state is not None,
        with_final_state=with_final_state,
        sequences=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
    )


def checked_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> LightningSpec:
    """The spec `lightning_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    return _spec(_check(q, k, v, decay, scale, initial_state, cu_seqlens), float(scale), False)


def plain_spec(device: torch.device) -> LightningSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return LightningSpec(4, 32, 32, 8192, 64, 64, dtype, device, has_decay=True)


# -------------------------------------------------------------------------- allocation, shared by backends


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


def empty_states(q: Tensor, sequences: int, E: int) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty(sequences, q.shape[1], q.shape[3], E, dtype=dtype, device=q.device)


# ------------------------------------------------------------------------- the torch.library boundary


_lib = torch.library.Library("fulmen", "DEF")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial_state, Tensor? cu_seqlens"
_lib.define(f"lightning_forward({_TENSORS}, float scale, bool with_state, str backend) -> (Tensor o, Tensor state)")
_lib.define(
    f"lightning_backward({_TENSORS}, Tensor do, Tensor? dstate, float scale, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dinitial_state)"
)


def _spec(x: Residuals, scale: float, with_state: bool) -> LightningSpec:
    return spec_of(
        *x[:4],
        scale=scale,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        with_final_state=with_state,
    )


def _nothing(x: Residuals) -> Tensor:
    """Stands for a state nobody asked for: an op cannot return None."""
    return x.q.new_empty(0, dtype=torch.float32)


def _outside_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Dtypes were settled in `_check`; inside, autocast must not touch what a backend computes in fp32."""

    @functools.wraps(implementation)
    def run(q: Tensor, *args: Any) -> Any:
        if q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
            return implementation(q, *args)
        with torch.autocast(q.device.type, enabled=False):
            return implementation(q, *args)

    return run


@_outside_autocast
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, scale, with_state, backend = args
    x = Residuals(*tensors)
    spec = _spec(x, scale, with_state)
    _check_values(x.decay, x.cu_seqlens, spec.N)
    o, state = dispatch.pick("lightning", spec, backend).forward(spec, x)
    return o, _nothing(x) if state is None else state


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, with_state, _ = args
    x = Residuals(*tensors)
    states = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    o = empty_rows(x.q, x.q.shape[1], x.v.shape[3])
    return o, empty_states(x.q, states, x.v.shape[3]) if with_state else _nothing(x)


@_outside_autocast
def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, do, dstate, scale, backend = args
    x = Residuals(*tensors)
    spec = _spec(x, scale, dstate is not None)
    kernel = dispatch.pick("lightning", spec, backend)
    assert kernel.backward is not None, "natively differentiable backends do not come here"
    if spec.E > 1 and do.stride(3) != 1:  # autograd hands over expanded gradients, as of o.sum()
        do = do.contiguous()
    dq, dk, dv, dinitial = kernel.backward(spec, x, do, None if dstate is None else dstate.contiguous())
    return dq, dk, dv, _nothing(x) if dinitial is None else dinitial


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = Residuals(*args[:6])
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    return dq, dk, dv, _nothing(x) if x.initial_state is None else torch.empty_like(x.initial_state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.with_state, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Any, ...]:
    x = Residuals(*ctx.saved_tensors)
    if do is None:  # only the state was used
        do = torch.zeros((*x.q.shape[:3], x.v.shape[3]), dtype=x.q.dtype, device=x.q.device)
    plain = _unwatched(*x, do, dstate) and not torch.is_grad_enabled()
    run = _backward if plain else torch.ops.fulmen.lightning_backward
    dq, dk, dv, dinitial = run(*x, do, dstate if ctx.with_state else None, ctx.scale, ctx.backend)
    return dq, dk, dv, None, None if x.initial_state is None else dinitial, None, None, None, None


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    raise NotImplementedError(
        "lightning_attention has no second derivative; backend='reference' is twice differentiable"
    )


_lib.impl("lightning_forward", _forward, "CompositeExplicitAutograd")
_lib.impl("lightning_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fulmen::lightning_forward", _forward_fake, lib=_lib)
torch.library.register_fake("fulmen::lightning_backward", _backward_fake, lib=_lib)
torch.library.register_autograd("fulmen::lightning_forward", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("fulmen::lightning_backward", _no_second_derivative, lib=_lib)


class LightningFunction(torch.autograd.Function):
    """The gradient registered above, for plain eager calls, past the dispatcher's Python wrappers."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        outputs = _forward(*inputs)
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, *grads)


def _unwatched(*tensors: Tensor | None) -> bool:
    """Whether nothing but eager PyTorch looks at the call: no compiler, tensor subclass, dispatch mode or transform."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)
    )


def _refuse_derivatives_we_lack(x: Residuals) -> None:
    """Forward mode would silently give zeros, torch.func.grad a riddle."""
    func = None if torch.compiler.is_compiling() else torch._C._functorch.peek_interpreter_stack()
    forward_mode = forward_ad._current_level >= 0 and any(
        t is not None and t.is_floating_point() and forward_ad.unpack_dual(t).tangent is not None for t in x
    )
    if forward_mode or (func is not None and func.key() in (TransformType.Grad, TransformType.Jvp)):
        raise NotImplementedError(
            "lightning_attention has no forward-mode derivative and no torch.func rules; backend='reference' has both"
        )


def _attend(x: Residuals, scale: float, with_state: bool, backend: str) -> tuple[Tensor, Tensor]:
    if dispatch.differentiable_as_it_is("lightning", backend):  # plain PyTorch: no boundary to cross
        _check_values(x.decay, x.cu_seqlens, x.q.shape[2])
        spec = _spec(x, scale, with_state)
        return dispatch.pick("lightning", spec, backend).forward(spec, x)
    inputs = (*x, scale, with_state, backend)
    _refuse_derivatives_we_lack(x)
    if not _unwatched(*x):
        return torch.ops.fulmen.lightning_forward(*inputs)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x.q, x.k, x.v, x.initial_state)):
        return LightningFunction.apply(*inputs)
    return _forward(*inputs)
