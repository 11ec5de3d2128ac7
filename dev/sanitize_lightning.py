"""Every kernel once, on odd shapes, for compute-sanitizer (memcheck, initcheck, racecheck):

PYTHONPATH=. compute-sanitizer --tool memcheck python3 dev/sanitize_lightning.py
"""

import torch

from fulmen.testing import lightning as testing
from fulmen.lightning import triton_split

triton_split.MIN_SEGMENT = 64

for dtype in (torch.bfloat16, torch.float16):
    for decay in ("mixed", None):
        x = dict(B=2, H=4, N=333, D=48, E=80, H_KV=2, dtype=dtype, device="cuda", decay=decay, initial_state=True)
        testing.check(testing.inputs(**x), "triton")
        testing.check(testing.inputs(**x), "triton_split")
        x = dict(B=1, H=2, N=200, D=64, dtype=dtype, device="cuda", decay=decay, lengths=[0, 1, 70, 0, 129])
        testing.check(testing.inputs(**x, layout="bnhd"), "triton")
for decay in ("mixed", None):
    for D in (64, 128):
        x = dict(D=D, dtype=torch.bfloat16, device="cuda", decay=decay)
        testing.check(testing.inputs(B=2, H=40, N=333, initial_state=True, **x), "cuda")
        testing.check(testing.inputs(B=1, H=2, N=1500, **x, layout="bnhd"), "cuda")
        testing.check(testing.inputs(B=1, H=2, N=700, lengths=[0, 1, 70, 0, 629], **x), "cuda")
        testing.check(testing.inputs(B=1, H=135, N=1100, initial_state=True, **x), "cuda")  # three heads left over
print("checked")
