"""Is it right? The checks of dev/cuda_trial.py; one function for each kind of case."""
from __future__ import annotations

from cuda_trial_cases import (
    DECODE_QUERIES, FORCED, REPEATED, configs, decode, gpu_cases, grouped_configs, grouped_shapes, tag,
)


def compare(x, o, lse) -> None:
    """Against fp64, with the tolerance of the tests."""
    import torch
    from fulmen.flash import reference
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    torch.cuda.synchronize()
    y = x.to(torch.float64)
    offsets = x.cu_seqlens_q, x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
    exact_o, exact_lse = reference.forward(y.spec(), Residuals(y.q, y.k, y.v, y.sinks, *offsets))
    low_o, low_lse = testing._plain(x)
    blind = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind), "lse is -inf in the wrong rows"
    exponent = float(exact_lse.masked_fill(blind, 0.0).abs().max()) if lse.numel() else 0.0
    fine = torch.finfo(torch.float32).eps / torch.finfo(x.q.dtype).eps
    hide = lambda z: z.masked_fill(blind, 0.0)
    testing.assert_close("lse", hide(lse), hide(low_lse), hide(exact_lse), testing.FORWARD_FACTOR, 4.0)
    testing.assert_close("o", o, low_o, exact_o, testing.FORWARD_FACTOR, 1.0 + fine * 4.0 * exponent)


def check_case(name: str, dtype: str, gradients: bool = False) -> str | None:
    """Through the public call, NaN where nobody writes: o and lse, or with triton's backward all gradients, too."""
    import torch
    from fulmen.flash import cuda
    from fulmen.testing import flash as testing

    x = testing.inputs(**gpu_cases()[name], dtype=getattr(torch, dtype), device="cuda")
    if (why := cuda.supports(x.spec(with_lse=True, needs_grad=gradients))) is not None:
        return f"skip: {why}"
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if gradients:
            testing.check(x, "cuda", ("o", "lse"))
        else:
            with torch.no_grad():
                compare(x, *testing.backend("cuda")(x))
    finally:
        torch.use_deterministic_algorithms(False)
    return None


def check_forced(D: int, i: int, j: int) -> None:
    import torch
    from fulmen.flash import cuda
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    x = testing.inputs(D=D, **FORCED[j], dtype=torch.bfloat16, device="cuda")
    compare(x, *cuda.forward(x.spec(with_lse=True), Residuals(x.q, x.k, x.v), configs(D)[i]))


def check_strangers() -> None:
    """What lies beyond the end of a sequence, or of all, is never used: it may be NaN."""
    import torch
    import fulmen
    from fulmen.testing import flash as testing

    for D, E in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for causal in (False, True):
            x = testing.inputs(1, 2, D=D, E=E, lengths_q=[70, 300, 5, 200], causal=causal, dtype=torch.bfloat16, device="cuda")
            want = fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, causal=causal, backend="cuda")
            part = slice(70, 370)
            k, v = x.k.clone(), x.v.clone()
            k[:, :, :70] = v[:, :, :70] = k[:, :, 370:] = v[:, :, 370:] = float("nan")
            got = fulmen.flash_attention(x.q, k, v, cu_seqlens_q=x.cu_seqlens_q, causal=causal, backend="cuda")
            assert torch.equal(got[:, :, part], want[:, :, part]), (D, causal, int(got[:, :, part].isnan().sum()))
            pages = torch.full((1, 2, 600, D), float("nan"), device="cuda", dtype=torch.bfloat16)
            pages[:, :, :300] = x.k[:, :, :300]
            got = fulmen.flash_attention(x.q[:, :, :300], pages[:, :, :300], x.v[:, :, :300], causal=causal, backend="cuda")
            assert not bool(got.isnan().any()), (D, causal, "a view")


def check_graph() -> None:
    import torch
    import fulmen
    from fulmen.testing import flash as testing

    x = testing.inputs(1, 4, D=128, lengths_q=[500, 0, 1, 1547], causal=True, dtype=torch.bfloat16, device="cuda")
    call = lambda: fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, causal=True, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    call()
    torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        captured = call()
    x.cu_seqlens_q.copy_(torch.tensor([0, 0, 3, 1900, 2048]))
    x.q.normal_()
    graph.replay()
    assert torch.equal(captured, call())


def check_repeat() -> None:
    import torch
    import fulmen
    from fulmen.testing import flash as testing

    for D, E in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for options in ({"N_Q": 1500, "causal": True}, {"N_Q": 1500}, {"lengths_q": [700, 1, 799], "causal": True, "window": (200, None), "sinks": True}):
            x = testing.inputs(4, 8, D=D, E=E, H_KV=4, dtype=torch.bfloat16, device="cuda", **options)
            call = lambda: fulmen.flash_attention_with_lse(x.q, x.k, x.v, **x.options(), backend="cuda")
            want = call()
            differ = sum(not (torch.equal(a, want[0]) and torch.equal(b, want[1])) for a, b in (call() for _ in range(250)))
            assert not differ, (D, options, f"{differ} of 250 runs differ")


def check_gradients() -> None:
    """Larger calls with gradients, against triton, which has the same backward."""
    import torch
    from fulmen.testing import flash as testing

    for D in (64, 128):
        x = testing.inputs(2, 16, 4096, D, H_KV=4, causal=True, dtype=torch.bfloat16, device="cuda")
        a, b = (testing.evaluate(testing.backend(name), x) for name in ("cuda", "triton"))
        for name in ("o", "lse", "dq", "dk", "dv"):
            far = float((getattr(a, name).float() - getattr(b, name).float()).abs().max() / getattr(b, name).float().abs().max())
            assert far < 0.02, (D, name, far)


# ---------------------------------------------------------------------------------------------- the last run


def both_ways(x, cfgs) -> None:
    """Grouped tiles against fp64, and against tiles of single heads: the same bits, as a row's sums do not depend on its tile."""
    import torch
    from fulmen.flash import cuda
    from fulmen.flash.op import Residuals

    spec, offsets = x.spec(with_lse=True), (x.cu_seqlens_q, x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k)
    tensors = Residuals(x.q, x.k, x.v, x.sinks, *offsets)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for cfg in cfgs:
            o, lse = cuda.forward(spec, tensors, cfg._replace(grouped=True))
            compare(x, o, lse)
            if spec.left is not None:  # where a tile's first block of keys begins, and so the order of sums, depends on it
                continue
            single = cuda.forward(spec, tensors, cfg)
            assert torch.equal(lse, single[1]), (tag(cfg), "lse differs from that of single heads")
            assert torch.equal(o, single[0]), (tag(cfg), "o differs from that of single heads")
    finally:
        torch.use_deterministic_algorithms(False)


def check_decode(G: int, D: int) -> None:
    import torch
    from fulmen.testing import flash as testing

    for N in DECODE_QUERIES:
        try:
            both_ways(testing.inputs(**decode(N, G, D), dtype=torch.bfloat16, device="cuda"), grouped_configs(D))
        except AssertionError as error:
            raise AssertionError(f"{N} queries: {error}") from error


def check_grouped(name: str, D: int, E: int, dtype: str) -> None:
    import torch
    from fulmen.testing import flash as testing

    x = testing.inputs(D=D, E=E, **grouped_shapes()[name], dtype=getattr(torch, dtype), device="cuda")
    both_ways(x, grouped_configs(D))


def check_repeated(name: str) -> None:
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    x = testing.inputs(**REPEATED[name], dtype=torch.bfloat16, device="cuda")
    spec, tensors = x.spec(with_lse=True), Residuals(x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, x.cu_seqlens_q)
    cfg = cuda.config(spec, hardware.of(spec.device))
    if name[0] == "!":
        cfg = cfg._replace(grouped=True)
    call = lambda: cuda.forward(spec, tensors, cfg)
    want = call()
    differ = sum(not (torch.equal(a, want[0]) and torch.equal(b, want[1])) for a, b in (call() for _ in range(250)))
    assert not differ, (name, f"{differ} of 250 runs differ")
    print(f"{name}: 250 runs bit-equal, {tag(cfg)}")


def check_paired(D: int, E: int, H_KV: int) -> None:
    """Gradients that cuDNN computes from our o and lse: small ones against fp64, larger ones against those of its own."""
    import torch
    from fulmen.flash import cuda
    from fulmen.testing import flash as testing

    for causal, layout in ((False, "bhnd"), (True, "bhnd"), (True, "bnhd"), (True, "fused")):
        x = testing.inputs(2, 4, 700, D, E=E, H_KV=H_KV, causal=causal, layout=layout, dtype=torch.bfloat16, device="cuda")
        assert cuda.paired(x.spec(needs_grad=True)), (D, E, H_KV, causal)
        testing.check(x, "cuda", ("o",))
    if D == E:
        x = testing.inputs(2, 16, 4096, D, H_KV=4, causal=True, dtype=torch.bfloat16, device="cuda")
        a, b = (testing.evaluate(testing.backend(name, with_lse=False), x, ("o",)) for name in ("cuda", "sdpa"))
        for name in ("o", "dq", "dk", "dv"):
            far = float((getattr(a, name).float() - getattr(b, name).float()).abs().max() / getattr(b, name).float().abs().max())
            assert far < 0.02, (D, name, far)


CHECKS = {"case": check_case, "forced": check_forced, "strangers": check_strangers, "graph": check_graph, "repeat": check_repeat,
          "gradients": check_gradients, "decode": check_decode, "grouped": check_grouped, "repeated": check_repeated,
          "paired": check_paired}
