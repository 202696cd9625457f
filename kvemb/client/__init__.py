"""The client of the parameter-server shards: channels, ordered push streams, acknowledgements.

gRPC is imported here only, and its errors are translated in `channel` only. What must not live here: storage, tables as
callers see them, validation of ids and gradients.
"""
