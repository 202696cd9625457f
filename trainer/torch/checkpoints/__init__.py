"""Rows saved beside the checkpoints of torch models and of other trainers."""
