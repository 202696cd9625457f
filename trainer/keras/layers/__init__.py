"""One lookup in Keras: rows enter the step beside its batch, and a shadow variable takes their gradient."""
