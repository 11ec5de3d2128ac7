"""The native kernels of softmax attention: a source in CUDA C++ and its launcher each."""
