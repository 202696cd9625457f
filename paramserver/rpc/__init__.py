"""The gRPC service: messages come in, answers go out; how many streams there may be, and the shard's figures."""
