"""Where the time of training steps went, and how stale their rows were: the report, its times, its progress line."""
