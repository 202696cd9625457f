"""The memcached meta protocol: requests built and replies parsed as arrays. Pure."""
