"""The Redis protocol (RESP2): requests built and replies parsed as arrays. Pure."""
