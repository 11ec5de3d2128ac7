"""Repeated calls on a GPU that is not here (`tests.posing`): what they launch, and whether the host waits."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import fulmen
from fulmen import layers, plans
from fulmen.integrations import fla, mamba
from fulmen.testing import flash, latent, lightning, step
from tests import posing

ARCHS = (80, 90)
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
PROGRAM = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from tests import posing, test_posing
posing.install({arch})
test_posing.tell({arch})
"""
Tensors = dict[str, Tensor]
Made = tuple[Callable[..., Iterable[Tensor]], Callable[[], Tensors]]


def others(x: Tensors) -> Callable[[], Tensors]:
    """A function that makes tensors like these, at addresses that no call has seen."""
    kept: list[Tensors] = []

    def new() -> Tensors:
        kept.append({name: copied(t).requires_grad_(t.requires_grad) for name, t in x.items()})
        return dict(kept[-1])

    return new


def copied(x: Tensor) -> Tensor:
    """With its strides."""
    storage = x.detach().untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]


def tensors_of(x: Any, *names: str) -> Tensors:
    return {name: getattr(x, name) for name in names if isinstance(getattr(x, name), Tensor)}


def both_ways(op: Callable[..., Any], given: Tensors, gradients: Tensors, rest: dict[str, Any]) -> Made:
    """A call without gradients, then one with them and its backward."""

    def call(**tensors: Tensor) -> list[Tensor]:
        back = [tensors.pop(name) for name in gradients]
        with torch.no_grad():
            results = listed(op(**tensors, **rest))
        leaves = [t for t in tensors.values() if t.requires_grad]
        found = listed(op(**tensors, **rest))
        return [*results, *found, *torch.autograd.grad(found, leaves, back)]

    return call, others(given | gradients)


def listed(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [t for t in x if isinstance(t, Tensor)]


def softmax(backend: str, D: int = 64, E: int | None = None, **options: Any) -> Made:
    x = flash.inputs(2, 4, 192, D, E=E, **BF16, **{"causal": True, **options})
    given = tensors_of(x, "q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k")
    rest = {name: t for name, t in x.options().items() if name not in given} | {"backend": backend}
    for name in {"q", "k", "v", "sinks"} & set(given):
        given[name].requires_grad_()
    return both_ways(fulmen.flash_attention, given, {"do": x.do}, rest)


def over_cache(backend: str, **options: Any) -> Made:
    x = flash.cache_inputs([150, 7], 192, N_Q=1, H=8, D=64, **BF16, **options)
    given = tensors_of(x, "q", "k", "v", "kv_lengths", "page_table")
    rest = {"causal": True, "backend": backend}
    return (lambda **tensors: [fulmen.flash_attention(**tensors, **rest)]), others(given)


def linear(backend: str, D: int = 64, E: int | None = None, states: bool = False, **options: Any) -> Made:
    sizes = {"B": 2, "H": 4, "N": 192, "D": D, "E": E, "decay": "mixed", **BF16, **options}
    x = lightning.inputs(initial_state=states, **sizes)
    given = tensors_of(x, "q", "k", "v", "decay", "initial_state", "cu_seqlens")
    for name in {"q", "k", "v", "initial_state"} & set(given):
        given[name].requires_grad_()
    if x.decay is not None and x.decay.ndim == 3:
        x.decay.requires_grad_()
    rest = {name: t for name, t in x.options().items() if name not in given} | {"backend": backend}
    op = fulmen.lightning_attention_with_state if states else fulmen.lightning_attention
    return both_ways(op, given, tensors_of(x, "do", "dstate") if states else {"do": x.do}, rest)


def next_token(**options: Any) -> Made:
    x = step.inputs(3, 4, D=64, decay="mixed", slots=[2, 0, 1], **BF16, **options)
    given = tensors_of(x, "q", "k", "v", "decay", "state", "slots", "accepted")
    drafts = {} if x.draft is None else dict(zip(("draft_k", "draft_v"), x.draft, strict=True))

    def call(**tensors: Tensor) -> list[Tensor]:
        draft = tuple(tensors.pop(name) for name in drafts) or None
        return [fulmen.lightning_step(**tensors, draft=draft)]

    return call, others(given | drafts)


def compressed(**options: Any) -> Made:
    x = latent.inputs(2, 16, 1, 192, 576, 512, lengths=[150, 7], **BF16, **options)
    given = tensors_of(x, "q", "kv", "kv_lengths", "page_table")
    return (lambda **tensors: [fulmen.latent_attention(**tensors, value_dim=512)]), others(given)


def layer(make: Callable[[], Any], packed: bool = False) -> Made:
    """A layer's training step."""
    made, rows = make().to(torch.bfloat16), (1, 192) if packed else (2, 96)
    given = {name: torch.randn(*rows, 256, **BF16) for name in ("x", "dy")}
    given["x"].requires_grad_()
    if packed:
        given["cu_seqlens"] = torch.tensor([0, 100, 192], dtype=torch.int32)

    def call(x: Tensor, dy: Tensor, **rest: Tensor) -> list[Tensor]:
        torch.autograd.grad(made(x, **rest), [x, *made.parameters()], dy)
        return []  # torch's products free memory, so that the same address is many a tensor's

    return call, others(given)


def layer_step(make: Callable[[], Any], new_cache: Callable[[], Any], pool: bool = False) -> Made:
    """The next token of each of two rows."""
    made = make().to(torch.bfloat16).eval()
    served = layers.Sequences(2, 64, pages=8, page_size=16, slots=2, device="cuda")
    cache, rows = (made.new_pool(served), [served.new(), served.new()]) if pool else (new_cache(), [])

    def call(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            made(x, cache=cache)
        return []

    def tokens(count: int) -> Tensor:
        if pool:
            served.step(rows, count)
        return torch.randn(2, count, 256, **BF16)

    call(tokens(5))
    return call, lambda: {"x": tokens(1)}


def scan(D: bool = True, z: bool = False, groups: int = 1) -> Made:
    """Of mamba-ssm's interface, with gradients of everything."""
    x, y = torch.randn(2, 2, 192, 4, 64, **BF16).unbind()
    B, C = torch.randn(2, 2, 192, groups, 128, **BF16).unbind()
    given = {"x": x, "dt": torch.rand(2, 192, 4, **BF16), "A": -torch.rand(4), "B": B, "C": C, "dt_bias": torch.rand(4)}
    given |= ({"D": torch.rand(4)} if D else {}) | ({"z": y} if z else {})
    for t in given.values():
        t.requires_grad_()
    return both_ways(mamba.mamba_chunk_scan_combined, given, {"do": torch.randn_like(x)}, {"dt_softplus": True})


def with_and_without(make: Callable[..., Made], **options: bool) -> Made:
    """One call after the other, of the same shapes: what is prepared for one must not serve the other."""
    plans.clear()  # of other cases
    (whole, inputs), (less, fewer) = make(), make(**options)
    kept = set(fewer())

    def call(**tensors: Tensor) -> list[Tensor]:
        return [*whole(**tensors), *less(**{name: t for name, t in tensors.items() if name in kept})]

    return call, inputs


def gated(backend: str = "auto") -> Made:
    """Of fla's."""
    q, k, v, do = torch.randn(4, 2, 192, 4, 64, **BF16).unbind()
    given = {"q": q, "k": k, "v": v, "g": -torch.rand(2, 192, 4)}
    for t in given.values():
        t.requires_grad_()
    return both_ways(lambda **x: fla.chunk_simple_gla(**x)[0], given, {"do": do}, {})


ROPE = {"causal": True, "rope": {}, "qk_norm": "before"}
LATENT = {"q_rank": 64, "kv_rank": 64, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
LAYERS: dict[str, tuple[Callable[[str], Any], Callable[[], Any]]] = {
    "self": (lambda how: layers.MultiHeadSelfAttention(256, 4, backend=how, **ROPE), lambda: layers.KVCache(64)),
    "grouped": (lambda how: layers.GroupedQueryAttention(256, 4, 2, backend=how, **ROPE), lambda: layers.KVCache(64)),
    "minimax": (lambda how: layers.LightningAttention(256, 4, num_layers=2), layers.StateCache),
    "ring": (lambda how: layers.LightningAttention(256, 2, num_layers=2, preset="ring"), layers.StateCache),
    "latent": (
        lambda how: layers.MultiHeadLatentAttention(256, 2, causal=True, backend=how, **LATENT),
        lambda: layers.LatentCache(64),
    ),
    "mamba": (lambda how: layers.Mamba2(256), layers.MambaCache),
}  # fmt: skip
SOFTMAX: tuple[dict[str, Any], ...] = (
    {}, {"D": 128}, {"D": 192, "E": 128}, {"D": 256}, {"causal": False}, {"window": (50, 0)}, {"softcap": 20.0},
    {"sinks": True}, {"H_KV": 2}, {"layout": "fused"}, {"lengths_q": [100, 92]},
)  # fmt: skip
LINEAR: tuple[dict[str, Any], ...] = (
    {}, {"D": 128}, {"decay": None}, {"states": True}, {"layout": "fused"}, {"lengths": [100, 92]}, {"H_KV": 2},
    {"decay": "token"}, {"decay": "token", "D": 128, "states": True}, {"decay": "token", "lengths": [100, 92]},
    {"decay": "token", "D": 128, "E": 64, "groups": 2}, {"B": 1, "H": 1, "N": 9000, "D": 128, "states": True},
)  # fmt: skip


def cases(arch: int) -> dict[str, Callable[[], Made]]:
    found: dict[str, Callable[[], Made]] = {}
    native = ("cuda",) if arch == 90 else ()
    for backend in ("triton", *native):
        found |= {f"softmax {backend} {one}": functools.partial(softmax, backend, **one) for one in SOFTMAX}
        for one in ({}, {"page": 16}, {"H_KV": 2, "window": (40, 0)}):
            found[f"cache {backend} {one}"] = functools.partial(over_cache, backend, **one)
    for backend in ("triton", "triton_split", *native):
        for one in LINEAR:
            if backend != "cuda" or "H_KV" not in one:
                found[f"linear {backend} {one}"] = functools.partial(linear, backend, **one)
    for one in ({}, {"T": 4, "draft": True}, {"H_KV": 2}):
        found[f"step {one}"] = functools.partial(next_token, **one)
    for one in ({}, {"page": 64}):
        found[f"latent {one}"] = functools.partial(compressed, **one)
    for name, (make, cache) in LAYERS.items():
        of = functools.partial(make, (*native, "triton")[0])
        found[f"layer {name}"] = functools.partial(layer, of)
        found[f"layer {name} packed"] = functools.partial(layer, of, packed=True)
        found[f"layer {name} step"] = functools.partial(layer_step, of, cache)
        if name != "mamba":
            found[f"layer {name} pool"] = functools.partial(layer_step, of, cache, pool=True)
    for one in ({}, {"D": False}, {"z": True, "groups": 2}):
        found[f"scan {one}"] = functools.partial(scan, **one)
    found["scan with and without D"] = functools.partial(with_and_without, scan, D=False)
    found["gated"] = gated
    return found


def reads() -> Made:
    """A call that must be found wrong: the host reads a result."""
    return (lambda x: [x * x.amax().item()]), others({"x": torch.randn(8, **BF16)})


def stale() -> Made:
    """Another: what is launched has the tensors of the first call."""
    first: list[Tensors] = []

    def call(**tensors: Tensor) -> list[Tensor]:
        first.append(tensors)
        return [fulmen.flash_attention(**first[0], backend="triton")]

    q, k, v = torch.randn(3, 1, 2, 64, 64, **BF16).unbind()
    return call, others({"q": q, "k": k, "v": v})


def tell(arch: int) -> None:
    """What is wrong with each case."""
    wrong = {}
    for name, make in (cases(arch) | {"reads": reads, "stale": stale}).items():
        try:
            wrong[name] = posing.repeated(*make())
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps(wrong))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_repeated_call_launches_what_the_first_did(arch, fresh_process):
    found = json.loads(fresh_process(PROGRAM.format(arch=arch)))
    assert "waits for the GPU: ['item']" in found.pop("reads")
    assert "is, once prepared," in found.pop("stale")
    wrong = [f"{name}: {text}" for name, text in found.items() if text]
    assert not wrong, "\n\n".join(wrong)
