"""What a cluster will need and reach, reckoned from what was measured; nothing here asks a server."""
