"""The way of rows through a trainer: pulls and pushes prepared, read in one batch, kept, and put where the caller wants them."""
