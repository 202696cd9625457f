"""Parts of a table's definition as values: the initializer of its rows, and the transforms of its gradients. Pure."""
