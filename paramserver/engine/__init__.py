"""One batch on its way to storage: fetch the rows, let the optimizer change them, write them back. The only writer of rows."""
