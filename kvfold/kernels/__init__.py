"""Kernels: bytes in, bytes out. One folder a device; `ops` picks the one for a tensor's device."""
