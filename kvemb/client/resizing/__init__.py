"""What trainers and commands ask of shards to move slots: nodes and shards that join, leave, take other shares; the progress of it."""
