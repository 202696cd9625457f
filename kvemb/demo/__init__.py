"""The demo job: skip-gram embeddings of the identifiers in the Python standard library's own source files.

The text (`corpus`), the model and its training loop (`skipgram`), where its rows are (`corpus`), one trainer (`trainer_process`),
and all of it together (`job`). The loop knows rows by a protocol only, so the cluster and the local arrays run the same code.
"""
