"""One lookup in torch: rows as a leaf tensor, the gradient that waits for a step, and who meets it on the way."""
