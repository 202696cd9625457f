"""The way of rows through a trainer: pulls and pushes are checked, read in one batch, cached, and put where the caller wants them."""
