"""Every wrong argument of a layer, a Rotary or a cache has one error that names it and prints what was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fulmen import dispatch
from fulmen.layers import (
    AddNorm,
    GroupedQueryAttention,
    KVCache,
    LatentCache,
    LightningAttention,
    Mamba2,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
    Rotary,
    Sequences,
    StateCache,
    apply_rotary,
)

X = torch.randn(2, 6, 24)
K = torch.zeros(2, 2, 3, 6)
MASK = torch.ones(2, 6, dtype=torch.bool)
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 8}
SCALINGS = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
}  # fmt: skip


def gqa(**options) -> GroupedQueryAttention:
    arguments = {"embed_dim": 24, "num_heads": 4, "num_kv_heads": 2, **options}
    return GroupedQueryAttention(**arguments)


def mla(**options) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(24, 4, **{"kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 10, **options})


def lightning(**options) -> LightningAttention:
    return LightningAttention(24, 4, **options)


def scaled(kind: str, **others) -> Rotary:
    return Rotary(16, scaling={"rope_type": kind, **SCALINGS[kind], **others})


def filled(cache, N: int = 6):
    k = torch.zeros(2, 2, N, 6)
    cache.append(k, k)
    return cache


# what is wrong -> (call, all that the message must say)
CONSTRUCTION = {
    "embed_dim not divisible": (lambda: gqa(embed_dim=26), ["embed_dim=26", "num_heads=4", "head_dim"]),
    "num_kv_heads": (lambda: gqa(num_kv_heads=3), ["num_kv_heads=3 must divide num_heads=4"]),
    "no heads": (lambda: MultiHeadAttention(24, 0), ["num_heads=0", "at least 1"]),
    "embed_dim of a float": (lambda: MultiQueryAttention(24.0, 4), ["embed_dim=24.0", "int"]),
    "head_dim too large": (lambda: gqa(head_dim=257), ["head_dim=257", "1 to 256"]),
    "head_dim zero": (lambda: gqa(head_dim=0), ["head_dim=0", "1 to 256"]),
    "qk_norm": (lambda: gqa(qk_norm=True), ["qk_norm=True", "'before', 'after' or 'all'"]),
    "odd RoPE": (lambda: gqa(head_dim=7, rope={}), ["head_dim=7", "turn 7", "rope={'dim': 6}"]),
    "odd RoPE of a given dim": (lambda: gqa(rope={"dim": 3}), ["dim=3: RoPE turns pairs", "even"]),
    "odd RoPE of half a head": (
        lambda: LightningAttention(48, 8, preset="ring"),
        ["head_dim=6 (embed_dim / num_heads unless", "turn 3", "rope={'base': 600000.0, 'dim': 2}"],
    ),
    "RoPE too wide": (lambda: gqa(rope=Rotary(8)), ["dim=8", "head_dim=6"]),
    "rope of another kind": (lambda: gqa(rope=True), ["rope is a bool", "Rotary"]),
    "rope of another word": (lambda: gqa(rope={"theta": 1e4}), ["rope has 'theta'", "base"]),
    "Rotary: positions of a list": (lambda: Rotary(16)([0, 1]), ["positions is a list", "int64 tensor"]),
    "Rotary: span from before the first": (lambda: Rotary(16).span(-4, 2, "cpu"), ["start=-4", "int of at least 0"]),
    "Rotary: span across the first": (lambda: Rotary(16).span(-2, 4, "cpu"), ["start=-2", "int of at least 0"]),
    "Rotary: span of less than none": (lambda: Rotary(16).span(5, -2, "cpu"), ["N=-2", "int of at least 0"]),
    "Rotary: span of a float": (lambda: Rotary(16).span(0, 2.5, "cpu"), ["N=2.5", "int of at least 0"]),
    "Mamba2: head_dim": (lambda: Mamba2(33), ["embed_dim=33", "head_dim=64 must divide", "num_heads"]),
    "AddNorm: shapes": (lambda: AddNorm(24)(X, X[:1]), ["y has shape (1, 6, 24)", "(2, 6, 24)"]),
    "a pool of a layer that sees both ways": (lambda: gqa().new_pool(Sequences(8, 2)), ["a pool", "causal=False"]),
    "sequences of one": (lambda: Sequences(8, 2).step(Sequences(8, 2).new(), 1), ["sequences is one Sequence", "list"]),
    "causal": (lambda: gqa(causal="top_left"), ["causal='top_left'", "False or True"]),
    "window": (lambda: gqa(window=(-1, 0)), ["window=(-1, 0)"]),
    "window of an int": (lambda: gqa(window=3), ["window=3", "(left, right)"]),
    "softcap": (lambda: gqa(softcap=0.0), ["softcap=0.0"]),
    "scale": (lambda: gqa(scale=0.0), ["scale=0.0"]),
    "backend": (lambda: gqa(backend="cudnn"), ["backend='cudnn'", "eager", "'auto'"]),
    "backend of a list, with dropout": (
        lambda: gqa(dropout=0.1, backend=["eager"]),
        ["backend=['eager']: flash has", "eager", "'auto'"],
    ),
    "backend of names": (
        lambda: lightning(backend=np.array(["eager", "triton"])),
        ["backend=array(['eager', 'triton']", "lightning has", "eager", "'auto'"],
    ),
    "dropout": (lambda: gqa(dropout=1.0), ["dropout=1.0", "below 1"]),
    "dropout on triton": (
        lambda: gqa(dropout=0.1, backend="triton"),
        ["dropout=0.1", "'triton'", "'eager' and 'sdpa'"],
    ),
    "dropout on reference": (lambda: gqa(dropout=0.1, backend="reference"), ["dropout=0.1", "'reference'"]),
    "dtype": (lambda: gqa(dtype=torch.float8_e4m3fn), ["float8_e4m3fn", "must be torch.bfloat16"]),
    "context of a fused layer": (lambda: gqa(fused_qkv=True, context_dim=5), ["context_dim=5", "fused_qkv"]),
    "Rotary: dim": (lambda: Rotary(15), ["dim=15", "even"]),
    "Rotary: dim zero": (lambda: Rotary(0), ["dim=0", "even"]),
    "Rotary: base": (lambda: Rotary(16, base=0.0), ["base=0.0", "positive"]),
    "Rotary: max_positions": (lambda: Rotary(16, max_positions=0), ["max_positions=0"]),
    "Rotary: type": (lambda: Rotary(16, scaling={"rope_type": "ntk"}), ["rope_type='ntk'", "linear", "yarn"]),
    "Rotary: lacking": (lambda: Rotary(16, scaling={"rope_type": "linear"}), ["'linear' lacks factor"]),
    "Rotary: unknown": (
        lambda: Rotary(16, scaling={"rope_type": "linear", "factor": 2.0, "beta_fast": 3}),
        ["'linear' has beta_fast"],
    ),
    "Rotary: no factor": (lambda: Rotary(16, scaling=YARN), ["lacks factor", "max_positions"]),
    "Rotary: base of a string": (lambda: Rotary(16, base="x"), ["base='x'", "positive"]),
    "Rotary: base of yarn": (
        lambda: Rotary(16, base=1, scaling={**YARN, "factor": 2}),
        ["base=1", "above 1", "rope_type='yarn'"],
    ),
    "Rotary: max_positions of a string": (lambda: Rotary(16, max_positions="x"), ["max_positions='x'", "int"]),
    "Rotary: max_positions of a float": (lambda: Rotary(16, max_positions=2.5), ["max_positions=2.5", "int"]),
    "Rotary: interleaved": (lambda: Rotary(16, interleaved="no"), ["interleaved='no'", "False or True"]),
    "Rotary: scaling of a string": (lambda: Rotary(16, scaling="yarn"), ["scaling='yarn'", "dict"]),
    "Rotary: type of a list": (lambda: Rotary(16, scaling={"rope_type": ["a"]}), ["rope_type=['a']", "'yarn'"]),
    "Rotary: factor zero": (lambda: scaled("linear", factor=0), ["'linear' has factor=0", "positive"]),
    "Rotary: factor negative": (lambda: scaled("linear", factor=-2.0), ["'linear' has factor=-2.0", "positive"]),
    "Rotary: factor of a string": (lambda: scaled("yarn", factor="x"), ["'yarn' has factor='x'", "positive"]),
    "Rotary: factor not finite": (lambda: scaled("llama3", factor=torch.nan), ["'llama3' has factor=nan", "finite"]),
    "Rotary: no length": (
        lambda: scaled("yarn", original_max_position_embeddings=0),
        ["'yarn' has original_max_position_embeddings=0", "positive"],
    ),
    "Rotary: truncate": (lambda: scaled("yarn", truncate="no"), ["'yarn' has truncate='no'", "False or True"]),
    "Rotary: low is high": (
        lambda: scaled("llama3", low_freq_factor=4.0),
        ["low_freq_factor=4.0", "high_freq_factor=4.0", "below"],
    ),
    "cache: max_length": (lambda: KVCache(0), ["max_length=0", "at least 1"]),
    "cache: max_length of a bool": (lambda: LatentCache(True), ["max_length=True", "int"]),
    "num_heads of a bool": (lambda: gqa(num_heads=True, num_kv_heads=True), ["num_heads=True", "int"]),
    "num_kv_heads missing": (lambda: gqa(num_kv_heads=None), ["num_kv_heads=None", "int"]),
    "scale of a string": (lambda: gqa(scale="abc"), ["scale='abc'", "number"]),
    "causal of an int": (lambda: gqa(causal=1), ["causal=1", "False or True"]),
    "sinks": (lambda: gqa(sinks="no"), ["sinks='no'", "False or True"]),
    "bias": (lambda: gqa(bias="no"), ["bias='no'", "False or True"]),
    "fused_qkv": (lambda: gqa(fused_qkv=1), ["fused_qkv=1", "False or True"]),
    "context_dim zero": (lambda: gqa(context_dim=0), ["context_dim=0", "at least 1"]),
    "context_dim negative": (lambda: gqa(context_dim=-3), ["context_dim=-3", "at least 1"]),
    "context_dim of a string": (lambda: gqa(context_dim="x"), ["context_dim='x'", "int"]),
    "context_dim of a float": (lambda: gqa(context_dim=2.0), ["context_dim=2.0", "int"]),
    "norm_eps": (lambda: gqa(norm_eps=-1.0), ["norm_eps=-1.0", "0 or a positive"]),
    "MLA: absorb of an int": (lambda: mla(absorb=1), ["absorb=1", "True, False or 'auto'"]),
    "MLA: absorb of zero": (lambda: mla(absorb=0), ["absorb=0", "True, False or 'auto'"]),
    "MLA: causal of an int": (lambda: mla(causal=1), ["causal=1", "False or True"]),
    "MLA: norm_eps": (lambda: mla(norm_eps=None), ["norm_eps=None", "0 or a positive"]),
    "MLA: dtype": (lambda: mla(dtype=torch.int32), ["dtype=torch.int32", "torch.float32"]),
    "lightning: norm_eps": (lambda: lightning(norm_eps=torch.nan), ["norm_eps=nan", "finite"]),
    "lightning: layer of a float": (lambda: lightning(layer=1.5, num_layers=4), ["layer=1.5", "int"]),
    "lightning: layer of a string": (lambda: lightning(layer="x"), ["layer='x'", "int"]),
    "lightning: layer too large": (lambda: lightning(layer=4, num_layers=4), ["layer=4", "num_layers=4"]),
    "lightning: scale of a string": (lambda: lightning(scale="abc"), ["scale='abc'", "number"]),
    "lightning: dtype of a string": (lambda: lightning(dtype="float32"), ["dtype='float32'", "torch.float32"]),
    "lightning: output_norm": (lambda: lightning(output_norm="x"), ["output_norm='x'", "int"]),
    "lightning: preset of a list": (lambda: lightning(preset=["a"]), ["preset=['a']", "'minimax', 'ring' or 'sala'"]),
    "lightning: activation of a list": (lambda: lightning(activation=["a"]), ["activation=['a']", "'silu'"]),
    "lightning: gate": (lambda: lightning(gate="no"), ["gate='no'", "False or True"]),
    "lightning: decay of an array": (lambda: lightning(decay=np.ones(4)), ["decay=array", "must be a tensor"]),
}
CONSTRUCTION |= {
    f"{kind.__name__}: dtype of a string": (
        lambda kind=kind: kind(dtype="float32"),
        ["dtype='float32'", "torch.float32"],
    )
    for kind in (gqa, mla)
}

CALLS = {
    "x of a list": (lambda: gqa()([1.0]), ["x is a list", "must be a tensor"]),
    "positions elsewhere": (lambda: gqa(rope={})(X, torch.arange(6).to("meta")), ["positions is on meta", "cpu"]),
    "x of rank 2": (lambda: gqa()(X[0]), ["x has shape (6, 24)", "embed_dim=24"]),
    "x of another size": (lambda: gqa()(X[..., :23]), ["x has shape (2, 6, 23)", "embed_dim=24"]),
    "mask and cu_seqlens": (
        lambda: gqa()(X[:1], mask=MASK[:1], cu_seqlens=OFFSETS),
        ["mask and cu_seqlens are given together"],
    ),
    "mask of ints": (lambda: gqa()(X, mask=MASK.long()), ["mask is torch.int64", "bool"]),
    "mask of a list": (lambda: gqa()(X, mask=[True]), ["mask is a list", "bool"]),
    "mask of another shape": (lambda: gqa()(X, mask=MASK[:, :5]), ["mask has shape (2, 5)", "(2, 6)"]),
    "mask elsewhere": (lambda: gqa()(X, mask=MASK.to("meta")), ["mask is on meta", "cpu"]),
    "cu_seqlens of a batch": (lambda: gqa()(X, cu_seqlens=OFFSETS), ["cu_seqlens packs", "B must be 1"]),
    "cu_seqlens of longs": (lambda: gqa()(X[:1], cu_seqlens=OFFSETS.long()), ["cu_seqlens is torch.int64", "int32"]),
    "context_cu_seqlens of a list": (
        lambda: gqa()(X[:1], cu_seqlens=OFFSETS, context=X[:1], context_cu_seqlens=[0, 6]),
        ["context_cu_seqlens is a list", "Tensor"],
    ),
    "context_cu_seqlens elsewhere": (
        lambda: gqa()(X[:1], cu_seqlens=OFFSETS, context=X[:1], context_cu_seqlens=OFFSETS.to("meta")),
        ["context_cu_seqlens is on meta, must be on context's cpu"],
    ),
    "cu_seqlens too short": (lambda: gqa(rope={})(X[:1], cu_seqlens=OFFSETS[:2]), ["cu_seqlens must end at N=6"]),
    "cu_seqlens with a cache": (
        lambda: gqa(causal=True)(X[:1], cu_seqlens=OFFSETS, cache=KVCache()),
        ["cache and cu_seqlens are given together"],
    ),
    "positions of another shape": (
        lambda: gqa(rope={})(X, torch.arange(5)),
        ["positions has shape (5,)", "(N,) or (B, N)"],
    ),
    "positions of floats": (lambda: gqa(rope={})(X, torch.arange(6.0)), ["positions is torch.float32", "int64"]),
    "positions too large": (
        lambda: gqa(rope={"max_positions": 9})(X, torch.arange(6) + 4),
        ["positions 4 to 9 are out of range", "max_positions=9"],
    ),
    "positions negative": (lambda: gqa(rope={})(X, torch.arange(6) - 1), ["positions -1 to 4", "at least 0"]),
    "N too large": (lambda: gqa(rope={"max_positions": 5})(X), ["positions 0 to 5 are out of range"]),
    "cache beyond max_positions": (
        lambda: gqa(rope={"max_positions": 9}, causal=True)(X, cache=filled(KVCache())),
        ["positions 6 to 11 are out of range", "max_positions=9"],
    ),
    "cache too small": (
        lambda: gqa(causal=True)(X, cache=filled(KVCache(9))),
        ["the cache is too small", "6 tokens of max_length=9", "6 more"],
    ),
    "cache of another kind": (lambda: gqa(causal=True)(X, cache=LatentCache()), ["cache is a LatentCache", "KVCache"]),
    "cache of a state": (lambda: gqa(causal=True)(X, cache=StateCache()), ["cache is a StateCache", "KVCache"]),
    "cache of a full layer": (lambda: gqa()(X, cache=KVCache()), ["cache", "causal=False"]),
    "cache of another batch": (
        lambda: gqa(causal=True)(X[:1].expand(3, 6, 24), cache=filled(KVCache())),
        ["the cache holds (B=2, N, 2, 6)", "given (B=3, N, 2, 6)", "reset()"],
    ),
    "cache of other heads": (lambda: gqa(num_kv_heads=4, causal=True)(X, cache=filled(KVCache())), ["(B=2, N, 4, 6)"]),
    "cache of another dtype": (
        lambda: gqa(causal=True, dtype=torch.float64)(X.double(), cache=filled(KVCache())),
        ["the cache holds torch.float32", "given torch.float64"],
    ),
    "cache: append a list": (lambda: KVCache().append([0.0], K), ["k is a list", "torch.Tensor"]),
    "cache: append rank 3": (lambda: KVCache().append(K[0], K[0]), ["k has shape (2, 3, 6)", "(B, H_KV, N, D)"]),
    "cache: append another batch": (
        lambda: KVCache().append(K[:1], K),
        ["k has shape (1, 2, 3, 6) and v (2, 2, 3, 6)", "(B, H_KV, N, D) and (B, H_KV, N, E)"],
    ),
    "cache: append another N": (
        lambda: KVCache().append(K, K[:, :, :2]),
        ["k has shape (2, 2, 3, 6) and v (2, 2, 2, 6)"],
    ),
    "cache: append another dtype": (lambda: KVCache().append(K, K.double()), ["v is torch.float64", "as k"]),
    "cache: append elsewhere": (lambda: KVCache().append(K, K.to("meta")), ["v is torch.float32 on meta", "on cpu"]),
    "cache: append another latent": (
        lambda: LatentCache().append(K[0], K[0, :, :2]),
        ["latent has shape (2, 3, 6) and k_rope (2, 2, 6)", "(B, N, R) and (B, N, P)"],
    ),
    "cache: counts of a list": (lambda: KVCache().append(K, K, [2, 3]), ["counts is a list", "torch.Tensor"]),
    "cache: counts of floats": (
        lambda: KVCache().append(K, K, torch.tensor([2.0, 3.0])),
        ["counts is torch.float32 (2,) on cpu", "torch.int64 (B,) = (2,)"],
    ),
    "cache: counts of other rows": (
        lambda: KVCache().append(K, K, torch.tensor([3])),
        ["torch.int64 (1,)", "(B,) = (2,)"],
    ),
    "cache: counts too large": (
        lambda: KVCache().append(K, K, torch.tensor([2, 9])),
        ["counts are 2 to 9", "0 to N=3", "k (2, 2, 3, 6)"],
    ),
    "cache: counts below 0": (
        lambda: LatentCache().append(K[0], K[0], torch.tensor([0, -1])),
        ["counts are -1 to 0", "latent (2, 3, 6)"],
    ),
    "cache: crop": (lambda: filled(KVCache()).crop(7), ["length=7", "6 tokens"]),
    "cache: crop of a string": (lambda: filled(KVCache()).crop("x"), ["length='x'", "int"]),
    "cache: crop of None": (lambda: filled(KVCache(9)).crop(None), ["length=None", "int"]),
    "cache: crop of a float": (lambda: filled(KVCache()).crop(2.5), ["length=2.5", "int"]),
    "cache: crop of a state": (lambda: StateCache().crop("x"), ["length='x'", "int"]),
    "cache: reorder of a string": (lambda: filled(KVCache()).reorder("x"), ["indices is a str", "list of ints"]),
    "cache: reorder of strings": (lambda: filled(KVCache()).reorder([0, "x"]), ["indices[1]='x'", "int"]),
    "cache: reorder too far": (lambda: filled(KVCache()).reorder([1, 2]), ["indices are 1 to 2", "rows 0 to 1"]),
    "cache: reorder of negatives": (
        lambda: filled(KVCache()).reorder(torch.tensor([0, -1])),
        ["indices are -1 to 0", "rows 0 to 1"],
    ),
    "cache: reorder elsewhere": (
        lambda: filled(KVCache()).reorder(torch.tensor([0], device="meta")),
        ["indices is on meta", "cpu"],
    ),
    "cache: reorder of a state": (lambda: StateCache().reorder(torch.tensor([0.0])), ["indices is torch.float32"]),
    "cache: reorder": (lambda: filled(KVCache()).reorder(torch.tensor([0.0])), ["indices is torch.float32"]),
    "context of a fused layer": (
        lambda: MultiHeadSelfAttention(24, 4)(X, context=X),
        ["context", "MultiHeadAttention"],
    ),
    "context of a causal layer": (lambda: gqa(causal=True)(X, context=X), ["context", "causal"]),
    "context with rope": (lambda: gqa(rope={})(X, context=X), ["context", "rope"]),
    "context of another size": (
        lambda: gqa(context_dim=5)(X, context=X),
        ["context has shape (2, 6, 24)", "context_dim=5"],
    ),
    "context of another batch": (lambda: gqa()(X, context=X[:1]), ["context has shape (1, 6, 24)", "B=2"]),
    "context_mask alone": (lambda: gqa()(X, context_mask=MASK), ["context_mask", "no context"]),
    "context_mask": (lambda: gqa()(X, context=X, context_mask=MASK[:, :2]), ["context_mask has shape (2, 2)"]),
    "packed context": (lambda: gqa()(X[:1], cu_seqlens=OFFSETS, context=X[:1]), ["needs cu_seqlens and context_cu"]),
    "apply_rotary: integers": (
        lambda: apply_rotary(torch.ones(1, 1, 6, 8, dtype=torch.int32), *Rotary(8)(torch.arange(6))),
        ["x is torch.int32 (1, 1, 6, 8)", "floating-point"],
    ),
    "apply_rotary: rank 3": (
        lambda: apply_rotary(torch.zeros(1, 6, 8), *Rotary(8)(torch.arange(6))),
        ["x is torch.float32 (1, 6, 8)", "(B, H, N, D)"],
    ),
    "apply_rotary: x of a list": (lambda: apply_rotary([0.0], K, K), ["x is a list", "torch.Tensor"]),
    "apply_rotary: cos of a list": (lambda: apply_rotary(K, [0.0], K), ["cos is a list", "torch.Tensor"]),
    "apply_rotary": (lambda: apply_rotary(torch.zeros(1, 1, 6, 4), *Rotary(8)(torch.arange(6))), ["8", "D=4"]),
}


@pytest.mark.parametrize(("call", "says"), [*CONSTRUCTION.values(), *CALLS.values()], ids=[*CONSTRUCTION, *CALLS])
@torch.no_grad()
def test_wrong_arguments(call, says):
    with pytest.raises(ValueError, match=r".") as error:
        call()
    for part in says:
        assert part in str(error.value)


def test_a_refused_call_leaves_the_cache_as_it_was():
    layer, cache = gqa(causal=True, rope={"max_positions": 9}), filled(KVCache(9))
    with torch.no_grad():
        for N in (4, 9):
            with pytest.raises(ValueError, match=r"."):
                layer(torch.zeros(2, N, 24), cache=cache)
            assert cache.length == 6
        layer(X[:, :3], cache=cache)
    assert cache.length == 9


@pytest.mark.parametrize("max_length", [None, 20])
@pytest.mark.parametrize("kind", ["grouped", "latent"])
@torch.no_grad()
def test_a_refused_kernel_leaves_the_cache_as_it_was(kind, max_length):
    """SDPA takes no rows of different lengths, which is found out after their keys were written."""
    if kind == "grouped":
        layer, cache = gqa(causal=True, backend="sdpa", rope={}), KVCache(max_length)
    else:
        sizes = {"kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 10}
        layer, cache = MultiHeadLatentAttention(24, 4, backend="sdpa", absorb=False, **sizes), LatentCache(max_length)
    want = layer(X)
    layer(X[:, :3], cache=cache)
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="SDPA takes no packed sequences"):
            layer(X[:, 3:] + 1.0, cache=cache, mask=MASK[:, 3:])
        assert cache.length == 3
        assert cache.lengths is None
    layer.options = layer.options._replace(backend="auto")
    torch.testing.assert_close(layer(X[:, 3:], cache=cache), want[:, 3:])


def test_what_a_named_backend_cannot_do_raises_its_reason():
    with pytest.raises(NotImplementedError, match="SDPA takes no packed sequences"):
        gqa(backend="sdpa")(X, mask=MASK)
    with pytest.raises(NotImplementedError, match="SDPA has no softcap and no sinks"):
        gqa(backend="sdpa", dropout=0.1, sinks=True)(X)
    with pytest.raises(NotImplementedError, match=r"preallocated cache.*torch.no_grad"):
        gqa(causal=True)(X, cache=KVCache(9))


LAYERS = {
    "GQA": lambda **kind: GroupedQueryAttention(16, 2, 1, **kind),
    "MLA": lambda **kind: MultiHeadLatentAttention(16, 2, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8, **kind),
    "lightning": lambda **kind: LightningAttention(16, 2, **kind),
}


WRONG_OFFSETS = {
    "no sequence": (1, 6, OFFSETS[:1], "cu_seqlens has shape (1,), so there is no sequence, but N=6"),
    "batch": (2, 6, OFFSETS, "so B must be 1; got x (2, 6, 16)"),
    "elsewhere": (1, 6, OFFSETS.to("meta"), "cu_seqlens is on meta, must be on x's cpu"),
    "list": (1, 6, [0, 6], "cu_seqlens is a list, must be a torch.Tensor"),
}


@pytest.mark.parametrize("wrong", WRONG_OFFSETS)
@pytest.mark.parametrize("layer", LAYERS)
def test_offsets_are_held_against_x(layer, wrong):
    B, N, offsets, message = WRONG_OFFSETS[wrong]
    with pytest.raises(ValueError, match=r".") as error:
        LAYERS[layer]()(torch.randn(B, N, 16), cu_seqlens=offsets)
    assert message in str(error.value)


@pytest.mark.parametrize("layer", LAYERS)
def test_no_sequence_of_no_token(layer):
    x = torch.randn(1, 0, 16, requires_grad=True)
    y = LAYERS[layer]()(x, cu_seqlens=OFFSETS[:1])
    assert y.shape == x.shape
    y.sum().backward()


@pytest.mark.parametrize("make", [gqa, mla, lightning])
def test_a_backend_that_cannot_be_imported(make, monkeypatch):
    op = "lightning" if make is lightning else "flash"
    dispatch.kernels(op)
    monkeypatch.setitem(dispatch._missing[op], "absent", "cannot be imported: No module named 'absent'")
    with pytest.raises(NotImplementedError, match="backend='absent' cannot be imported: No module named 'absent'"):
        make(backend="absent")
    with pytest.raises(ValueError, match=r"backend='other': .* has absent, cuda"):
        make(backend="other")


RAGGED = {
    "softmax": (lambda: GroupedQueryAttention(24, 4, 2, causal=True, rope={}), KVCache),
    "latent": (lambda: MultiHeadLatentAttention(24, 4, kv_rank=8, nope_dim=8, rope_dim=4, value_dim=8), LatentCache),
    "lightning": (lambda: LightningAttention(32, 4, preset="ring"), StateCache),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", RAGGED)
@torch.no_grad()
def test_another_batch_on_a_cache_of_rows_of_different_lengths(kind, rows):
    make, cache = RAGGED[kind][0], RAGGED[kind][1]()
    layer = make()
    size = layer.embed_dim
    layer(torch.randn(2, 3, size), cache=cache, mask=torch.tensor([[True] * 3, [True, False, False]]))
    with pytest.raises(ValueError, match=rf"cache holds 2 rows, and x has B={rows}: call reset\(\)"):
        layer(torch.randn(rows, 1, size), cache=cache)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_nested_tensors_are_refused(layer, layout):
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(4, 16)], layout=layout)
    with pytest.raises(ValueError, match="x is a nested tensor: pack its sequences along N and give cu_seqlens"):
        LAYERS[layer]()(x)


def test_what_odd_rope_is_told_works():
    assert gqa(head_dim=7, rope={"dim": 6}).rope.dim == 6
    assert LightningAttention(48, 8, preset="ring", rope={"base": 600000.0, "dim": 2}).rope.dim == 2


def test_numbers_of_numpy_are_numbers():
    assert type(Rotary(np.int64(8)).dim) is int
    layer = GroupedQueryAttention(np.int64(24), np.int32(4), np.int64(2), norm_eps=np.float32(1e-6), qk_norm="before")
    assert [type(n) for n in (layer.embed_dim, layer.num_heads, layer.q_norm.eps)] == [int, int, float]


@pytest.mark.parametrize("layer", LAYERS)
def test_x_of_another_kind(layer):
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match=r"x is torch.float64, and the layer torch.float32: cast one"):
        LAYERS[layer]()(x.double())
    with pytest.raises(ValueError, match=r"x is on cpu, and the layer on meta: call to_empty"):
        LAYERS[layer](device="meta")(x)
    with torch.autocast("cpu", torch.bfloat16):
        LAYERS[layer]()(x.bfloat16())


def test_a_context_that_is_missing_or_of_another_kind():
    layer = GroupedQueryAttention(16, 2, 1, context_dim=10)
    with pytest.raises(ValueError, match=r"context is None.*context_dim=10.*\(1, 3, 16\)"):
        layer(torch.randn(1, 3, 16))
    with pytest.raises(ValueError, match=r"context is torch.float64, and the layer torch.float32"):
        layer(torch.randn(1, 3, 16), context=torch.randn(1, 3, 10).double())
