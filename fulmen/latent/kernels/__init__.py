"""CUDA C++ sources of latent attention and their launchers."""
