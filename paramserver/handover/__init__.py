"""Slots that change their shard while rows stay where they are: what the giver hands over, and how the taker makes it its own."""
