"""The mathematics of folding, on plain tensors: no caches, no models, no formats."""
