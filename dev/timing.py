"""The clock of the scripts here: the median of cold calls between CUDA events, with the host out of sight.

With WARM set each call runs once and is not timed, so that kernels are compiled before a GPU's time counts.
"""
import functools
import os
import statistics
import torch

WARM = os.environ.get("WARM")


@functools.cache
def l2() -> torch.Tensor:
    """Written before each call: more than any L2 cache holds."""
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def timeit(f, reps=15):
    """ms"""
    f()
    if WARM:
        return 1.0
    f()
    times = []
    for _ in range(reps):
        l2().zero_()
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host queues the call
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
