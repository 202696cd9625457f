"""The gRPC service: messages come in, answers go out; and how many streams there may be."""
