"""Native kernels: CUDA C++ sources, compiled when first needed, kept on disk, launched through the driver.

    compile.py      Variant -> machine code, by NVRTC, with a cache on disk
    arguments.py    a kernel's arguments, described once: the C struct and the packed bytes
    tensor_map.py   what TMA needs to know about a tensor
    launch.py       Launch: a kernel call that can be repeated
    include/        what kernels share

NVRTC needs no GPU, no nvcc and no C++ compiler. It and the driver are reached through `cuda.bindings`, which CUDA
builds of torch bring along; the extra `fulmen[cuda]` installs them beside other builds.
"""

from fulmen.cuda.arguments import STRIDES, Struct
from fulmen.cuda.compile import PACKAGE, Unavailable, Usage, Variant, compile_variant, cubin, describe, source_text
from fulmen.cuda.launch import Launch, problem
from fulmen.cuda.tensor_map import TensorMaps, tensor_maps

__all__ = [
    "PACKAGE",
    "STRIDES",
    "Launch",
    "Struct",
    "TensorMaps",
    "Unavailable",
    "Usage",
    "Variant",
    "compile_variant",
    "cubin",
    "describe",
    "problem",
    "source_text",
    "tensor_maps",
]
