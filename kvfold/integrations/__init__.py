"""Engines that kvfold works inside. Thin: no mathematics here."""
