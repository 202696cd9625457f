"""Loaders whose batches come with their rows pulled: prepare, and which parts of a batch feed which module."""
