"""The way of rows through a trainer: pulls and pushes are prepared, read in one batch, and put where the caller wants them."""
