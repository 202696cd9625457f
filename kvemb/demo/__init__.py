"""The demo job: skip-gram embeddings of the identifiers in the Python standard library's own source files.

Here lives the pure job: the text (`corpus`), the batches (`batches`), the model and its training loop (`skipgram`),
the judgement of the result (`evaluate`) and the one-process baseline on local arrays (`local_run`). The job reaches
its rows through the `skipgram.Rows` protocol only, so the distributed run and the baseline execute the same code.
Starting servers and processes must not live in these modules.
"""
