"""Kernels in Gluon for NVIDIA's tensor cores: numbers.py has codebooks, ptx.py instructions, attend.py attention."""
