"""Caches, their layers and their rows as contents of files, which are written whole and read only if undamaged."""
