"""distribute: a torch model's large embeddings become tables, decided before anything changes."""
