"""Trial for issue 6: the split sweep's launches one by one, over segments per SM and tiles.

    PYTHONPATH=. python3 dev/lightning_split_trial.py
"""
import os
import torch
from fulmen import decay, hardware
from fulmen.lightning import triton as fused
from fulmen.lightning import triton_split as split
from fulmen.lightning.op import LightningSpec, Residuals
from timing import timeit

WARM = os.environ.get('WARM')  # compile one case and leave
src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
hw = hardware.of(torch.device("cuda", 0))
usual = fused.config
for shape in ((1, 16, 32768, 128), (1, 8, 65536, 64), (3, 50, 5000, 64)):
    B, H, N, D = shape
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, u = torch.empty_like(q), q.numel() * 2
    for slopes in (decay.alibi(H).cuda(), None):
        if WARM and WARM != f'{D}{slopes is None}':
            continue
        spec = LightningSpec(B, H, H, N, D, D, q.dtype, q.device, has_decay=slopes is not None)
        x = Residuals(q, k, v, slopes, None, None)
        for per_sm in (2,) if WARM else (2, 3, 4, 6):
            for cfg in ((64, 64, 4, 4), (64, 64, 4, 3)):
                split.PROGRAMS_PER_SM = per_sm
                fused.config = lambda spec, hw, cfg=cfg: fused.Config(*cfg)
                f = split.forward_launches(spec, hw, x, o, None)
                b = split.backward_launches(spec, hw, x, do, None, fused.Gradients.empty(spec, x), None)
                each = [timeit(lambda l=l: fused.run([l], q.device), 7) for l in (*f, *b)]
                total = timeit(lambda: fused.run(f, q.device)), timeit(lambda: fused.run(b, q.device))
                print(shape, "decay" if slopes is not None else "none", per_sm, cfg, "grid", f[0].grid, f"fwd {4*u/total[0]/bw:.1%} bwd {7*u/total[1]/bw:.1%}",
                      "us:", *(f"{1e3*t:.0f}" for t in each), flush=True)
    fused.config = usual
