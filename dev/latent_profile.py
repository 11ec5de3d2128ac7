"""Latent attention on a GPU: its kernels against fp64, where its time goes, and the ways it could take instead.

    PYTHONPATH=. python3 dev/latent_profile.py                  all of it, about 40 s
    PYTHONPATH=. python3 dev/latent_profile.py check            also without a GPU, with TRITON_INTERPRET=1: small shapes
    PYTHONPATH=. python3 dev/latent_profile.py profile | parts | products | tiles

check     q, k, v and all gradients of `Expanded`, norms, whole layers: error over that of torch's operations in bf16
profile   kernels of a forward and a backward, in order, at the report's three shapes
parts     the layer over its projections and its attention kernel, as tools/measure_layers.py does it, fewer rounds
products  forward and backward of kv_b_proj in every way dev/ladder_layers.md speaks of
tiles     RoPE's and the norms' kernels over how much a program takes
"""
import copy
import functools
import random
import statistics
import sys
import torch
from torch.nn import functional as F
from fulmen import launch
from fulmen.bench.adapters import layer as adapter
from fulmen.layers import MultiHeadLatentAttention, latent
from fulmen.layers import latent_triton as kernels
from fulmen.layers.rotary import Rotary
from timing import timeit

GPU = torch.cuda.is_available()
device = torch.device("cuda", 0) if GPU else torch.device("cpu")
dtype = torch.bfloat16 if GPU else torch.float16  # the interpreter has no bf16 products
CONFIGS = {  # B, N, H, rank
    "cfg1": (2, 2048, 32, 512),
    "cfg2": (1, 4096, 64, 1024),
    "cfg3": (1, 2048, 128, 2048),
}
nope, dim, E = 128, 64, 128


def drawn(*shape, scale=1.0):
    return (torch.randn(shape, device=device) * scale).to(dtype)


# ------------------------------------------------------------------------------------------------- check


def errors(name, got, low, exact):
    """Prints by how much more each of `got` errs than `low`; both against `exact`."""
    worst = 0.0
    for a, b, c in zip(got, low, exact, strict=True):
        assert a.shape == c.shape and a.isfinite().all(), name
        size = c.norm()
        worst = max(worst, float((a.double() - c).norm() / ((b.double() - c).norm() + 2e-4 * size)))
    print(f"   {name}: error {worst:.2f} times that of torch's operations", "" if worst < 1.5 else "  <-- TOO MUCH", flush=True)
    return worst < 1.5


def gradients(function, leaves, douts, kind):
    mine = [t.detach().to(kind).requires_grad_() for t in leaves]
    outs = function(*mine)
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, mine, [d.to(kind) for d in douts])]


def expanded(B, N, H, nope, dim, E, R, interleaved=True):
    cos, sin = (t.to(device) for t in Rotary(dim)(torch.arange(N)))

    def fast(q, c, rope, w):
        q, k, v = kernels.Expanded.apply(1.0 * q, c, rope, w, cos, sin, nope, interleaved)
        return q.unflatten(2, (H, -1)), k, v

    def turned(x):
        x, co, si = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32), cos[:, None], sin[:, None]
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        parts = [a * co - b * si, b * co + a * si]
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    def plain(q, c, rope, w):
        q, up = q.unflatten(2, (H, -1)), (c @ w.T).unflatten(2, (H, -1))
        q = torch.cat([q[..., :nope], turned(q[..., nope:]).to(q.dtype)], 3)
        shared = turned(rope[:, :, None]).to(q.dtype).expand(-1, -1, H, -1)
        return q, torch.cat([up[..., :nope], shared], 3), up[..., nope:]

    leaves = drawn(B, N, H * (nope + dim)), drawn(B, N, R), drawn(B, N, dim), drawn(H * (nope + E), R, scale=R**-0.5)
    douts = drawn(B, N, H, nope + dim), drawn(B, N, H, nope + dim), drawn(B, N, H, E)
    got = gradients(fast, leaves, [d.clone() for d in douts], dtype)
    low, exact = gradients(plain, leaves, douts, dtype), gradients(plain, leaves, douts, torch.float64)
    width = kernels.gather_width(B * N, R, kernels.hardware.of(device)) if not (nope % 64 or dim % 64 or E % 64) else None
    return errors(f"q, k, v and gradients {B, N, H, nope, dim, E, R}, tiles of {width}", got, low, exact)


def gathered(T, H, R, width):
    """The product `latent_gradient` would not choose at this size."""
    dk, dv, w = drawn(T, H * (nope + dim)), drawn(T, H * E), drawn(H * (nope + E), R, scale=R**-0.5)
    out = torch.full((T, R), torch.nan, dtype=dtype, device=device)
    launch.run(kernels.gather_launch(dk, dv, w, out, H, nope, width))
    both = torch.cat([dk.view(T, H, -1)[..., :nope], dv.view(T, H, -1)], 2).view(T, -1)
    return errors(f"gathered {T, H, R}, tiles of {width}", [out], [both @ w], [both.double() @ w.double()])


def norms(B, N, R, R2, rest):
    def plain(x, w, x2, w2):
        first = F.rms_norm(x, (R,), w, 1e-6)
        return first, x[..., R:], F.rms_norm(x2[..., :R2], (R2,), w2, 1e-6), x2[..., R2:]

    leaves = drawn(B, N, R), 1 + drawn(R, scale=0.25), drawn(B, N, R2 + rest), 1 + drawn(R2, scale=0.25)
    douts = drawn(B, N, R), drawn(B, N, 0), drawn(B, N, R2), drawn(B, N, rest)
    fast = functools.partial(kernels.Normed.apply, (1e-6, 1e-6))
    results = [gradients(f, leaves, douts, kind) for f, kind in ((fast, dtype), (plain, dtype), (plain, torch.float64))]
    return errors(f"norms {B, N, R, R2, rest}", *results)


def whole(N, H, packed=False, **sizes):
    torch.manual_seed(1)
    layer = MultiHeadLatentAttention(256, H, backend="eager", **sizes).to(device, dtype)
    exact = copy.deepcopy(layer).double()
    x, dy = drawn(1, N, 256), drawn(1, N, 256)
    more = {"cu_seqlens": torch.tensor([0, N // 3, N], dtype=torch.int32, device=device)} if packed else {}

    def results(module, kind, allowed):
        real = latent.fused, latent.kernels_for
        if not allowed:
            latent.fused = latent.kernels_for = lambda *tensors: None
        at = x.to(kind).requires_grad_()
        y = module(at, **more)
        latent.fused, latent.kernels_for = real
        return [y.detach(), *torch.autograd.grad(y, [at, *module.parameters()], dy.to(kind))]

    results(layer, dtype, True)  # the first makes launches ready, the second repeats them
    args = results(layer, dtype, True), results(layer, dtype, False), results(exact, torch.float64, False)
    return errors(f"layer N={N} H={H}{' packed' if packed else ''} {sizes}", *args)


def check():
    torch.manual_seed(0)
    good = [expanded(2, 7, 3, 5, 6, 7, 11, False), expanded(1, 9, 35, 64, 64, 64, 128)]
    good += [norms(2, 7, 24, 16, 6), norms(1, 9, 5, 40, 1)]
    good += [gathered(130, 2, 256, 256), gathered(77, 3, 128, 128)]
    if GPU:
        good += [expanded(2, 333, 5, 32, 16, 40, 72), expanded(3, 2731, 9, 128, 64, 128, 512)]
        good += [expanded(*CONFIGS["cfg2"][:3], nope, dim, E, 1024), expanded(*CONFIGS["cfg3"][:3], nope, dim, E, 2048)]
        good += [norms(1, 4096, 1024, 1024, 64), norms(2, 1111, 1536, 512, 64), norms(1, 100, 8192, 512, 64)]
        good += [gathered(4096, 64, 1024, width) for width in kernels.WIDTHS]
        good += [whole(301, 5, q_rank=96, kv_rank=128, nope_dim=64, rope_dim=64, value_dim=64)]
        good += [whole(301, 3, True, kv_rank=72, nope_dim=40, rope_dim=24, value_dim=32)]
    print("check:", "all good" if all(good) else "FAILED", flush=True)


# ----------------------------------------------------------------------------------------------- profile


def case_of(name):
    B, N, H, rank = CONFIGS[name]
    return adapter.complete({"layer": "mla", "B": B, "N": N, "H": H, "D": nope + dim, "E": E, "rank": rank, "dtype": "bfloat16"})


def profiled():
    from torch.profiler import ProfilerActivity, profile

    for name in CONFIGS:
        p = adapter.problem(case_of(name), device, 1)
        f, leaves = adapter.attend("auto"), list(p.leaves.values())
        for _ in range(3):
            torch.autograd.grad(f(p.x), leaves, p.douts["o"])
        for what in ("forward", "backward"):
            y = f(p.x)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                if what == "forward":
                    f(p.x)
                else:
                    torch.autograd.grad(y, leaves, p.douts["o"])
                torch.cuda.synchronize()
            events = sorted((e for e in seen.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
            print(name, what, f"{sum(e.time_range.elapsed_us() for e in events):.0f} us in {len(events)} kernels")
            for e in events:
                print(f"   {e.time_range.elapsed_us():8.1f} us  {e.name[:110]}")
        del p, leaves, y
        torch.cuda.empty_cache()


def parts(rounds=20):
    from fulmen.bench.group import Machine
    from tools import measure_layers as measure

    timer = Machine.of(device).timer
    for name in CONFIGS:
        case = case_of(name)
        p = adapter.problem(case, device, 1)
        forward = functools.partial(measure.one_result, adapter.attend("auto"), p.x)
        tasks = {("layer", k): f for k, f in measure.calls(forward, list(p.leaves.values()), [p.douts["o"]]).items()}
        tasks |= {("parts", k): f for k, f in measure.calls(*measure.parts_of(case, device)).items()}
        times = {key: [] for key in tasks}
        for i in range(rounds + 3):
            for key in random.sample(list(tasks), len(tasks)):
                ms = timer.sample(tasks[key], spacer_ms=1.0).ms
                times[key] += [ms] if i >= 3 else []
        mid = {key: statistics.median(x) for key, x in times.items()}
        shares = (f"{k} {mid['layer', k]:.3f} ms {mid['layer', k] / mid['parts', k] - 1:+.1%}" for k in measure.PASSES)
        print(name, "over its parts:", *shares, flush=True)
        del p, tasks, forward
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------- products


def products():
    for name in ("cfg2", "cfg3"):
        B, N, H, R = CONFIGS[name]
        T, D, up = B * N, nope + dim, nope + E
        flop = 2 * T * H * up * R
        c, rope, w = drawn(T, R), drawn(T, dim), drawn(H * up, R)
        k, v, dup, q = drawn(T, H, D), drawn(T, H, E), drawn(T, H * up), drawn(B, N, H * D)
        w3, every, dw, out = w.view(H, up, R), c.expand(H, T, R), torch.empty_like(w), torch.empty_like(c)
        dw3, ab = dw.view(H, up, R), drawn(T, R + dim)
        w_aug, w_pad = drawn(H * D, R + dim), drawn(H * D, R)
        cos = torch.randn(N, dim // 2, device=device)
        k4, rope3 = k.view(B, N, H, D), rope.view(B, N, dim)

        def join():
            k[..., :nope].copy_(dup.view(T, H, up)[..., :nope])

        def dweight():
            torch.bmm(k[..., :nope].permute(1, 2, 0), every, out=dw3[:, :nope])
            torch.bmm(v.permute(1, 2, 0), every, out=dw3[:, nope:])

        def forward():
            torch.bmm(every, w3[:, :nope].mT, out=k[..., :nope].transpose(0, 1))
            torch.bmm(every, w3[:, nope:].mT, out=v.transpose(0, 1))

        def gather(width, stages, warps=8):
            made = kernels.gather_launch(k.view(T, -1), v.view(T, -1), w, out, H, nope, width)
            return functools.partial(launch.run, made._replace(options={"num_warps": warps, "num_stages": stages}))

        both = lambda: torch.cat([k[..., :nope], v], 2)
        rows = {
            "forward: one product": (lambda: F.linear(c, w), flop),
            "   k_nope copied into k (torch's copy; the old join kernel: 45 us at cfg2)": (join, 0),
            "forward: a product for each head, k_nope in place and v": (forward, flop),
            "   of it k_nope": (lambda: torch.bmm(every, w3[:, :nope].mT, out=k[..., :nope].transpose(0, 1)), flop // 2),
            "   of it v": (lambda: torch.bmm(every, w3[:, nope:].mT, out=v.transpose(0, 1)), flop // 2),
            "forward: k augmented [c | rope], v apart": (lambda: (F.linear(ab, w_aug), torch.bmm(every, w3[:, nope:].mT, out=v.transpose(0, 1))), flop // 2 + 2 * T * H * D * (R + dim)),
            "   RoPE of q and k": (lambda: launch.run(kernels.rope_launch(q, rope3, k4, cos, cos, True)), 0),
            "dlatent: one product of both side by side": (lambda: dup @ w, flop),
            "   put side by side (torch.cat; the old unjoin kernel: 80 us at cfg2)": (both, 0),
            "   rows of w put in another order": (lambda: torch.cat([w3[:, :nope], w3[:, nope:]], 0), 0),
            **{f"dlatent: gathered, tiles 128 x {w_}, {s} stages, {n} warps": (gather(w_, s, n), flop) for w_, s, n in ((256, 4, 8), (256, 3, 8), (128, 5, 8), (128, 4, 4), (128, 6, 8))},
            "dlatent: k padded to 192 rows a head, v apart (without making that weight)": (lambda: (k.view(T, -1) @ w_pad).addmm_(v.view(T, -1), w[: H * E]), flop // 2 + 2 * T * H * D * R),
            "   RoPE back of q, sum of k": (lambda: launch.run(kernels.rope_backward_launch(q, k4, rope3, cos, cos, True)), 0),
            "dw: one product of both side by side": (lambda: torch.mm(dup.T, c, out=dw), flop),
            "dw: a product for each head, where they lie": (dweight, flop),
        }
        for what, (f, work) in rows.items():
            ms = timeit(f)
            print(f"{name} {1e3 * ms:8.1f} us  {f'{work / ms / 1e9:4.0f} TFLOP/s' if work else ' ' * 12}  {what}", flush=True)


def tiles():
    B, N, H, R = CONFIGS["cfg2"]
    q, k, rope, cos = drawn(B, N, H * (nope + dim)), drawn(B, N, H, nope + dim), drawn(B, N, dim), torch.randn(N, dim // 2, device=device)
    x, w, x2, rstd = drawn(B, N, R), drawn(R), drawn(B, N, R + dim), torch.ones(2, B * N, device=device)
    usual = kernels.HEADS, kernels.WARPS, kernels.TILE
    for heads in (16, 32, 64):
        for warps in (2, 4, 8):
            kernels.HEADS, kernels.WARPS = {"forward": heads, "backward": heads}, {"num_warps": warps}
            made = kernels.rope_launch(q, rope, k, cos, cos, True), kernels.rope_backward_launch(q, k, rope, cos, cos, True)
            print(heads, "heads", warps, "warps: rope, back us", *(f"{1e3 * timeit(lambda l=l: launch.run(l)):.1f}" for l in made), flush=True)
    kernels.HEADS, kernels.WARPS, _ = usual
    print(f"both norms {1e3 * timeit(lambda: launch.run(kernels.norm_launch(x, w, x, x2, w, x, rstd, (1e-6, 1e-6)))):.1f} us", flush=True)
    for tile in (2048, 4096, 8192):
        for programs in (132, 264, 528):
            kernels.TILE = tile
            sums = torch.empty(programs, 2 * R, device=device)
            back = kernels.norm_backward_launch(x, w, x, x[..., :0], x, x2, w, x, rope, x2, rstd, sums)
            each = [timeit(lambda l=l: launch.run(l)) for l in (back, kernels.sum_launch(sums, w, w))]
            print(f"norms' backward, tile {tile}, {programs} programs: {1e3 * each[0]:.1f} us, sums {1e3 * each[1]:.1f} us", flush=True)
    kernels.TILE = usual[2]


if __name__ == "__main__":
    todo = {"check": check, "parts": parts, "products": products, "profile": profiled, "tiles": tiles}
    for name in sys.argv[1:] or todo:
        todo[name]()
