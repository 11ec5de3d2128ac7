"""The native kernels of lightning attention: a source in CUDA C++ and its launcher each."""
