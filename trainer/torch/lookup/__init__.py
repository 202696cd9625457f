"""One lookup in torch: rows as a leaf tensor, the gradient that waits for a step, and the walks that meet it on the way."""
