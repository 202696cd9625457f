"""materialize: a plain torch copy of a model whose rows are in a cluster."""
