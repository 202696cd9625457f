"""TorchRec's collections and jagged tensors over kvemb tables."""
