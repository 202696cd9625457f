"""Optimizers in torch whose step pushes gradients, and clipping over the gradients of rows."""
