"""The bytes of a checkpoint: its manifest, the fragments of shards, and blocks of rows as Parquet. No cluster here."""
