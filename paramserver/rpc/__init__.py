"""The gRPC service: messages in, messages out, and how many streams there may be."""
