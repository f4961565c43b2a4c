"""Folded caches: pages, the dense window around them, and what each layer folds into."""
