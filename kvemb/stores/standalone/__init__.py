"""Storage whose nodes do not know of each other: memcached and standalone Redis, placed by a cluster map of ours."""
