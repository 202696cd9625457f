"""The demo job: skip-gram embeddings of the identifiers in the Python standard library's own source files.

The text (`corpus`), where its rows are (`word_rows`), the model and its training loop (`skipgram`), one trainer (`trainer_process`), and
the whole job (`job`). The loop knows rows by a protocol only, so the cluster and the local arrays run the same code.
"""
