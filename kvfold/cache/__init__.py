"""Folded caches: pages, the dense window around them, and who folds what."""
