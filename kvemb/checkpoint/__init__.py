"""Checkpoints seen from the client: saved, loaded, listed, verified and pruned; and the files under a checkpoint's URL.

    <url>/<table>/shard-<i>-part-<j>.parquet            rows: id, version, weights[, slots], in the order of their keys
    <url>/<table>/_erased/shard-<i>-part-<j>.parquet    incremental: ids erased since the base
    <url>/<table>/_ids/shard-<i>-part-<j>.parquet       incremental: every existing id, where the erased ones are not known
    <url>/saving.json                                   the fields that all shards share, while a save is under way
    <url>/shard-<i>.json                                the share that one shard has finished, while a save is under way
    <url>/manifest.json                                 written last: without it there is no checkpoint

pyarrow and fsspec write and read the files, and are imported when they are first used: clusters that never save need neither.
"""
