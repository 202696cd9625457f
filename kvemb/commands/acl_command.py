"""What `kvemb acl` prints: users for Redis and Valkey nodes, and whether the one that kvemb.yaml names is as it should be."""

import argparse
import os
import sys

from kvemb.config import load
from kvemb.errors import ConfigError
from kvemb.net.deadline import Deadline
from kvemb.net.tls_link import connector_of
from kvemb.stores.redis_server.acl_users import ACL_USERS, check_user
from kvemb.stores.redis_server.redis_commands import RedisAccess

_EXPLANATION = """\
# Lines of a users file (aclfile), or after ACL SETUSER. Put the SHA-256 of each one's password in the place of HASH:
#   printf %s "$PASSWORD" | sha256sum
# kvemb.yaml names the variables: storage.username_env and storage.password_env, with other values for trainers and for shards.
# A table with layout: compact needs its limits of hashes set in the servers' own configuration: shards may not run CONFIG SET."""


def acl_command(args: argparse.Namespace) -> int:
    """Print the two users; with --check, ask every node what the user of kvemb.yaml may."""
    if not args.check:
        print(_EXPLANATION)
        for user in ACL_USERS.values():
            print(f"user {user.name} {user.rules()} #HASH")
        return 0
    config = load(args.config, os.environ)
    if config.storage.kind == "memcached":
        raise ConfigError("storage.kind: memcached has no users; it can ask for client certificates (docs/security.md)")
    access = RedisAccess(config.storage, connector_of(config.storage.tls))
    wrong = []
    for address in config.storage.nodes:
        wrong += check_user(address, access, ACL_USERS[args.check], Deadline.after(config.storage.timeout_s))
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{len(config.storage.nodes)} nodes: the user may do what a {args.check} does, and nothing that was asked about besides")
    return 1 if wrong else 0
