"""Where the host's time goes in a small call: PYTHONPATH=. python3 dev/host_flash.py (on the GPU)."""
import time, cProfile, pstats
import torch, fulmen
from fulmen.flash import op
F = torch.nn.functional
q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
def t(name, f, n=2000):
    for _ in range(50): f()
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize(); a = time.perf_counter()
        for _ in range(n // 5): f()
        best = min(best, (time.perf_counter() - a) / (n // 5) * 1e6); torch.cuda.synchronize()
    print(f"{name:40s} {best:.2f} us", flush=True)
t("F.sdpa", lambda: F.scaled_dot_product_attention(q, k, v))
t("flash_attention triton", lambda: fulmen.flash_attention(q, k, v, backend="triton"))
t("flash_attention sdpa", lambda: fulmen.flash_attention(q, k, v, backend="sdpa"))
with torch.no_grad():
    t("F.sdpa no_grad", lambda: F.scaled_dot_product_attention(q, k, v))
    t("flash_attention triton no_grad", lambda: fulmen.flash_attention(q, k, v, backend="triton"))
plan = next(p for p in op._plans.values() if p.kernel.name == "triton")
t("plan.quick", lambda: plan.quick(q, k, v))
t("empty_like", lambda: torch.empty_like(q))
t("_plain", lambda: op._plain(q, k, v))
t("unwatched", lambda: op.unwatched(q, k, v))
t("data_ptr x3", lambda: (q.data_ptr(), k.data_ptr(), v.data_ptr()))
t("key", lambda: hash((q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device)))
cell = plan.quick.__closure__
call = next(c.cell_contents for c in cell if type(c.cell_contents).__name__ == "Ready")
o = torch.empty_like(q)
ad = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), None, None, None, None)
t("Ready", lambda: call((q, k, v), ad))
c = call.compiled
st = torch._C._cuda_getCurrentRawStream(0)
t("compiled.run", lambda: c.run(call.grid, 1, 1, st, c.function, c.packed_metadata, None, None, None, *ad, *call.rest))
L = c.run
t("C launch", lambda: L.launch(call.grid, 1, 1, st, c.function, False, False, None, None, c.packed_metadata, None, None, None, *ad, *call.rest))
t("current_device", lambda: torch.cuda.current_device())
t("raw stream", lambda: torch._C._cuda_getCurrentRawStream(0))
gq, gk, gv = (x.clone().requires_grad_() for x in (q, k, v))
t("F.sdpa grad", lambda: F.scaled_dot_product_attention(gq, gk, gv))
t("flash_attention triton grad", lambda: fulmen.flash_attention(gq, gk, gv, backend="triton"))
do = torch.randn_like(q)
t("F.sdpa fwd+bwd", lambda: torch.autograd.grad(F.scaled_dot_product_attention(gq, gk, gv), (gq, gk, gv), do))
t("flash_attention triton fwd+bwd", lambda: torch.autograd.grad(fulmen.flash_attention(gq, gk, gv, backend="triton"), (gq, gk, gv), do))
from fulmen.flash.op import Residuals
pg = next(p for p in op._plans.values() if p.kernel.name == "triton" and p.spec.needs_grad)
x = Residuals(q, k, v); oo, ll = pg.kernel.forward(pg.spec, x)
t("kernel.forward with lse", lambda: pg.kernel.forward(pg.spec, x))
t("kernel.backward", lambda: pg.kernel.backward(pg.spec, x, oo, ll, do, None))
from fulmen.flash import triton as ft
from fulmen.boundary import empty_rows
t("empty_rows", lambda: empty_rows(q, 1, 64))
t("heads_summed", lambda: ft.heads_summed(pg.spec, ft.hardware.of(pg.spec.device)))
t("hash spec", lambda: hash(pg.spec))
class Id(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, c): ctx.save_for_backward(a, b, c); return a.view_as(a), b
    @staticmethod
    def backward(ctx, x, y): return ctx.saved_tensors
t("an empty Function, fwd", lambda: Id.apply(gq, gk, gv))
t("an empty Function, fwd+bwd", lambda: torch.autograd.grad(Id.apply(gq, gk, gv)[0], (gq, gk, gv), do))
pr = cProfile.Profile(); pr.enable()
for _ in range(300): pg.kernel.backward(pg.spec, x, oo, ll, do, None)
pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(14)
