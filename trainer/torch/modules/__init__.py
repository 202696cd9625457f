"""The torch modules over one or several tables: Embedding, EmbeddingBag, DenseFeatures, and how rows are pooled."""
