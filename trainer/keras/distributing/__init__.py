"""`distribute`: a Keras model's large embeddings become tables, and its steps pull and push."""
