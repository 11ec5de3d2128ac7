"""Who competes in a case: our backends, from the registry, and other people's kernels, from the table BASELINES.

Packages outside torch are imported by the call that needs them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fulmen
from fulmen import dispatch, hardware
from fulmen.bench import Refused, adapters, schema
from fulmen.bench.adapters.attention import flash
from fulmen.bench.adapters.layers import WORDS, layer, layer_parts
from fulmen.bench.cases import Line
from fulmen.bench.gate import Attend, Problem
from fulmen.flash.sdpa import unsupported_reason

Case = dict[str, Any]
Need = Callable[[Case, torch.device], str | None]
OURS = "fulmen "  # begins the names of our competitors


class Baseline(NamedTuple):
    """One implementation that is not ours."""

    op: str  # what it computes, a name of `fulmen.bench.adapters`
    call: Callable[[Any], Any]  # timed, on the arguments of that operation's problems; (B, H, N, D) in and out
    needs: tuple[Need, ...] = ()  # what a case and a device must be: each says None, or why it cannot take them
    packages: tuple[str, ...] = ("torch",)  # names under which it may be installed, for its version
    pinned: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # around calls, outside what is timed
    case: Case = {}  # noqa: RUF012  (never changed): what its case has instead of the line's own

    def refusal(self, case: Case, device: torch.device) -> str | None:
        return next((why for need in self.needs if (why := need(case, device))), None)

    def version(self) -> str:
        for package in self.packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return torch.__version__ if package == "torch" else importlib.metadata.version(package)
        return ""


# ----------------------------------------------------------------------------------------------------- needs
def of_case(right: Callable[[Case], Any], why: str) -> Need:
    """What a case must be; `why` not is filled in from the case."""
    return lambda case, device: None if right(case) else why.format(**case)


def installed(module: str, package: str) -> Need:
    def need(case: Case, device: torch.device) -> str | None:
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(module) is not None:
                return None
        return f"{package} is not installed"

    return need


def on_gpu(case: Case, device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"a kernel for CUDA GPUs, and the device is {device}"


def sdpa_kernel_for(op: Any, name: str) -> Need:
    """One kernel of torch's SDPA, for the softmax attention of `op` on a GPU."""
    return lambda case, device: unsupported_reason(op.spec(op.complete(case), device), hardware.of(device), name)


def cudnn_layer(case: Case, device: torch.device) -> str | None:
    """On a CPU SDPA takes what it has."""
    if layer.within(case)[0] is not flash:
        return f"softmax attention, and the case is a {WORDS[case['layer']]}"
    return None if device.type != "cuda" else sdpa_kernel_for(layer, "cudnn")(case, device)


first_query = of_case(
    lambda case: not case["causal"] or "N_Q" not in case,
    "is_causal counts from the first query and key, ours from the last: N_Q={N_Q}, N={N}",
)
no_options = of_case(
    lambda case: not any(case.get(key) for key in flash.OPTIONS), f"is called without {', '.join(flash.OPTIONS)}"
)
sixteen_bit = of_case(lambda case: case["dtype"] in ("bfloat16", "float16"), "computes in bf16 and fp16, not {dtype}")
same_width = of_case(lambda case: case["D"] == case["E"], "needs E = D, here D={D}, E={E}")
HEADS = "needs as many heads of k and v as of q, here H={H}, "
no_groups = of_case(lambda case: not case.get("groups"), HEADS + "groups={groups}")
own_heads = of_case(lambda case: case["H"] == case["H_KV"], HEADS + "H_KV={H_KV}")
one_decay = of_case(lambda case: not case.get("per_token"), "has a constant decay, and the case one for each token")
fp32_states = of_case(lambda case: case.get("state_dtype") != "bfloat16", "writes states in fp32, not in bf16")
fla_installed = installed("fla", "flash-linear-attention")


# ----------------------------------------------------------------------------------------------------- calls
def sdpa(x: Any) -> Tensor:
    grouped = x.q.shape[1] != x.k.shape[1]
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=bool(x.causal), enable_gqa=grouped)


def flash_attn(x: Any) -> Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    return flash_attn_func(q, k, v, causal=bool(x.causal)).transpose(1, 2)


def flash_attn_4(x: Any) -> Tensor:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    found = flash_attn_func(q, k, v, causal=bool(x.causal))
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)  # some versions return lse, too


def fla(name: str, x: Any) -> Tensor:
    from fla.ops import simple_gla  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    options = {} if x.decay is None else {"g_gamma": -x.decay}
    if x.decay is not None and x.decay.ndim == 3:
        options = {"g": -x.decay.transpose(1, 2)}
    o, _ = getattr(simple_gla, name)(q, k, v, scale=x.scale, **options)
    return o.transpose(1, 2)


def fla_step(given: Any) -> tuple[Tensor, Tensor]:
    """o, and the states after the step, in memory of their own."""
    from fla.ops.simple_gla import fused_recurrent_simple_gla  # type: ignore[import-not-found, unused-ignore]

    x = given.call
    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    options = {"scale": x.scale, "initial_state": x.state, "output_final_state": True}
    o, state = fused_recurrent_simple_gla(q, k, v, g_gamma=-x.decay, **options)
    return o.transpose(1, 2), state


def lightning_attention_2(x: Any) -> Tensor:
    from lightning_attn.ops import lightning_attn_func  # type: ignore[import-not-found, unused-ignore]

    slopes = torch.zeros(x.q.shape[1], device=x.q.device) if x.decay is None else x.decay
    return lightning_attn_func(x.q, x.k, x.v, slopes.view(-1, 1, 1))


def sdpa_layer(own: Any, x: Tensor) -> Tensor:
    """A layer as one writes it without us: nn.Linear's products, norms, RoPE and scaled_dot_product_attention."""
    if hasattr(own, "kv_rank"):
        q, k, v = latent_heads(x, own)
    else:
        each = own.qkv_proj(x).chunk(3, -1) if own.fused_qkv else (own.q_proj(x), own.k_proj(x), own.v_proj(x))
        q, k, v = (t.unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for t in each)
        if own.rope is not None:
            q, k = (placed(own, t, norm) for t, norm in ((q, own.q_norm), (k, own.k_norm)))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=own.options.causal, enable_gqa=grouped)
    return own.o_proj(o.transpose(1, 2).flatten(2))


def placed(own: Any, y: Tensor, norm: Any) -> Tensor:
    """Heads normed and turned."""
    cos, sin = own.rope.span(0, y.shape[2], y.device)
    a, b = F.rms_norm(y, (own.head_dim,), norm.weight, 1e-6).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(y.dtype)


def latent_heads(x: Tensor, own: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of latent attention."""
    B, N, H = *x.shape[:2], own.num_heads
    sizes = [own.nope_dim, own.rope_dim]
    q = own.q_b_proj(F.rms_norm(own.q_a_proj(x), (own.q_rank,), own.q_a_layernorm.weight, 1e-6))
    q_nope, q_rope = q.view(B, N, H, sum(sizes)).transpose(1, 2).split(sizes, -1)
    c, k_rope = own.kv_a_proj_with_mqa(x).split([own.kv_rank, own.rope_dim], -1)
    kv = own.kv_b_proj(F.rms_norm(c, (own.kv_rank,), own.kv_a_layernorm.weight, 1e-6))
    k_nope, v = kv.view(B, N, H, -1).transpose(1, 2).split([own.nope_dim, own.value_dim], -1)
    cos, sin = own.rope.span(0, N, x.device)  # a table that is kept

    def rotated(y: Tensor) -> Tensor:
        a, b = y.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(y.dtype)

    k_rope = rotated(k_rope[:, None]).expand(-1, H, -1, -1)
    return torch.cat([q_nope, rotated(q_rope)], -1), torch.cat([k_nope, k_rope], -1), v


def fla_layer(own: Any, x: Tensor) -> Tensor:
    """Lightning attention by fla between torch's operations; softmax attention by torch."""
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found, unused-ignore]

    if not hasattr(own, "output_gate"):
        return sdpa_layer(own, x)
    q, k, v = F.silu(own.qkv_proj(x)).unflatten(-1, (own.num_heads, 3, -1)).unbind(-2)
    o, _ = chunk_simple_gla(q, k, v, g_gamma=-own.decay, scale=own.scale)
    return own.out_proj(own.norm(o.flatten(2)) * torch.sigmoid(own.output_gate(x)))


def stack(attention: Callable[[Any, Tensor], Tensor], p: Any) -> Tensor:
    """A training step's losses with this attention between torch's operations."""
    from fulmen.bench.adapters.train import PLAIN  # here: another commit's layers may lack what it imports

    return p.stack(p.ids, p.targets, PLAIN._replace(attention=attention))


# ------------------------------------------------------------------------------------------------- the table
def pinned_cudnn() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if torch.cuda.is_available() else contextlib.nullcontext()


pinned_fa2 = functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
chunk, fused_chunk = (functools.partial(fla, f"{name}_simple_gla") for name in ("chunk", "fused_chunk"))
FLA = ("flash-linear-attention", "fla-core")
FLA_NEEDS = (no_groups, own_heads, on_gpu, fla_installed)
FLASH_ATTN_NEEDS = (sixteen_bit, same_width, no_options, on_gpu)

BASELINES = {
    "sdpa": Baseline("flash", sdpa, (first_query, no_options)),
    "sdpa-fa2": Baseline("flash", sdpa, (on_gpu, sdpa_kernel_for(flash, "flash")), pinned=pinned_fa2),
    "sdpa-cudnn": Baseline("flash", sdpa, (on_gpu, sdpa_kernel_for(flash, "cudnn")), pinned=pinned_cudnn),
    "flash-attn": Baseline(
        "flash", flash_attn, (*FLASH_ATTN_NEEDS, installed("flash_attn.flash_attn_interface", "flash-attn")),
        ("flash-attn",),
    ),
    "flash-attn-4": Baseline(
        "flash", flash_attn_4, (*FLASH_ATTN_NEEDS, installed("flash_attn.cute", "flash-attn-4")), ("flash-attn-4",)
    ),
    "sdpa-layer": Baseline("layer", lambda p: sdpa_layer(p.layer, p.x), (cudnn_layer,), pinned=pinned_cudnn),
    "layer-parts": Baseline("layer_parts", layer_parts.attend("auto")),
    "sdpa-stack": Baseline("train", functools.partial(stack, sdpa_layer), case={"pattern": "G"}),
    "fla-stack": Baseline("train", functools.partial(stack, fla_layer), (on_gpu, fla_installed), FLA),
    "fla-chunk": Baseline("lightning", chunk, FLA_NEEDS, FLA),
    "fla-fused-chunk": Baseline("lightning", fused_chunk, FLA_NEEDS, FLA),
    "fla-recurrent": Baseline("step", fla_step, (fp32_states, *FLA_NEEDS), FLA),
    "lightning-attention-2": Baseline(
        "lightning", lightning_attention_2,
        (one_decay, no_groups, own_heads, on_gpu, installed("lightning_attn", "lightning-attention")),
        ("lightning-attn", "lightning_attn"),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- competitors
@dataclass
class Competitor:
    """One implementation in one case."""

    name: str
    op: str
    function: str
    attend: Attend  # the timed call: a problem's arguments -> o
    problem: Callable[[int], Problem]  # seed -> arguments of the timed shape
    small: Callable[..., Problem]  # seed, fully -> arguments of an odd shape, for the gate
    fully: Attend | None = None  # the call with every output it has, for the gate; None: attend returns all
    refusal: str | None = None  # why it cannot take the case
    skip: str | None = None  # why it is not tried
    backend: str = ""  # what "auto" took, or the version of the package
    version: str = ""
    pinned: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # as of a Baseline

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    def cell(self, line: Line, run_id: str, pass_: str, cache: str, seed: int, command: str) -> schema.Cell:
        """An empty cell; `command` measures it alone."""
        return schema.Cell(
            run_id, line.suite, self.op, self.function, dict(line.case), self.name, pass_, backend=self.backend,
            version=self.version, cache=cache, seed=seed, command=command,
        )  # fmt: skip


def rivals(line: Line, backends: Sequence[str] = (), others: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Our backends and the baselines of a line, by name; `backends` and `others` replace the line's own.

    "*" is every registered backend but the reference, "-name" leaves one out, "none" stands for nobody.
    """
    op, given = adapters.backends_of(line.op, line.case), backends or line.backends
    registered = dispatch.kernels(op)
    every = [kernel for kernel in registered if kernel != "reference"]
    ours = [name for word in given for name in (every if word == "*" else [word])]
    ours = [name for name in ours if name != "none" and name[0] != "-" and f"-{name}" not in given]
    others = [name for name in others or line.baselines if name != "none"]
    known = [*registered, *dispatch._missing[op], "auto"]
    for names, there, what in ((ours, known, f"{line.op} has no backend"), (others, sorted(BASELINES), "no baseline")):
        for name in names:
            if name not in there:
                raise Refused(f"{what} {name!r}; there are {', '.join(there)}")
    return list(dict.fromkeys(ours)), list(dict.fromkeys(others))


def of(line: Line, device: torch.device, backends: Sequence[str] = (), others: Sequence[str] = ()) -> list[Competitor]:
    """The competitors of a line whose case is complete."""
    ours, others = rivals(line, backends, others)
    return [backend(line, device, name) for name in ours] + [baseline(line, device, name) for name in others]


def backend(line: Line, device: torch.device, name: str) -> Competitor:
    """One of ours."""
    op, case, adapter = line.op, line.case, adapters.of(line.op)
    refusal, taken = None, name
    try:
        taken = adapters.taken(op, case, device, name)
    except NotImplementedError as error:
        refusal = str(error)
    return Competitor(
        f"{OURS}{name}", op, adapter.function(case), adapter.attend(name),
        functools.partial(adapter.problem, case, device), functools.partial(adapter.small, case, device),
        adapter.attend_fully(name), refusal, backend=taken, version=fulmen.__version__,
    )  # fmt: skip


def baseline(line: Line, device: torch.device, name: str) -> Competitor:
    """One of other people's, on the case in the words of the operation it computes."""
    entry = BASELINES[name]
    adapter, version = adapters.of(entry.op), entry.version()
    own = {key: line.case[key] for key in adapter.KEYS if key in line.case} | entry.case
    try:
        own = adapter.complete(own)
        function, refusal = adapter.function(own), entry.refusal(line.case | own, device)
    except ValueError as error:
        function, refusal = entry.op, str(error)
    return Competitor(
        name, entry.op, function, entry.call, functools.partial(adapter.problem, own, device),
        functools.partial(adapter.small, own, device), None, refusal, backend=version, version=version,
        pinned=entry.pinned,
    )  # fmt: skip
