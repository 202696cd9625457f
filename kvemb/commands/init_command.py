"""What `kvemb init` does: it writes a kvemb.yaml that says of every key what it is for, and checks it as every program will."""

import argparse
import os
from pathlib import Path

import yaml

from kvemb.config import parse
from kvemb.errors import ConfigError

# What is commented out stands at its default, or shows how the key is written.
_TEMPLATE = """\
# One file for the whole cluster: it starts the shards, connects the trainers and drives the `kvemb` command.
cluster: {cluster}
storage:
  kind: {kind}
  nodes: {nodes}  # at the first start they get equal shares, and the cluster notes whose is which: the order is free from then on
  # timeout_s: 5.0  # of one exchange with all nodes
  # on_lost_node: wait  # or fail: what a pull does while a node is down or in repair
  # allow_row_loss: false  # true: also nodes whose settings may evict rows
  # username_env: KVEMB_STORAGE_USER  # names of environment variables, never the secrets; Redis and Valkey
  # password_env: KVEMB_STORAGE_PASSWORD
  # tls: {{ca: tls/ca.pem}}  # docs/security.md
  # insecure: false  # true: plain text to other machines, on a network that only the job's own processes reach
parameter_servers:
  shards: {shards}  # kvemb shard --shard 0, 1, …
  # data_dir: kvemb-data  # journals and indexes, from this file's folder on: keep them on a disk that lasts
  # durability: fsync  # or os: an acknowledged push survives the process, not the machine
  # journal_max_mb: 4096  # then a shard takes a local snapshot and cuts its journal
  # away_timeout_s: 600.0  # how long a shard may be away before what waits for it fails; pulls go on
  # cache_mb: 256  # records that a shard keeps so as not to fetch them again
  # mode: async  # or sync: all trainers' parts of a step at once
  # trainers: 4  # sync only: how many
  # barrier_timeout_s: 60.0  # sync only: how long a step waits for a trainer
  # on_lost_trainer: abort  # sync only: or wait, or drop
  # metrics_port: 9470  # for Prometheus; shards of one host have ports side by side
  # tls: {{ca: tls/ca.pem, cert: tls/me.crt, key: tls/me.key}}  # docs/security.md
  # insecure: false
tables: {{}}
  # Programs create tables; those that all agree on may stand here instead:
  # user: {{dim: 16, optimizer: {{kind: adam, lr: 1e-3}}, initializer: {{kind: normal, std: 0.01}}}}
"""


def init_command(args: argparse.Namespace) -> int:
    """Write the file, unless there is one."""
    path = Path(args.config)
    nodes = args.nodes or ["127.0.0.1:11211" if args.store == "memcached" else "127.0.0.1:6379"]
    lists = {
        name: "[" + ", ".join(f'"{address}"' for address in given) + "]" for name, given in (("nodes", nodes), ("shards", args.shards))
    }
    text = _TEMPLATE.format(cluster=yaml.safe_dump(args.cluster).splitlines()[0], kind=args.store, **lists)
    parse(yaml.safe_load(text), {})
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already, and was left as it is; give another path") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    where = "" if path == Path("kvemb.yaml") else f" {os.fspath(path)}"
    print(f"wrote {path}. With {len(nodes)} empty {args.store} node{'s' if len(nodes) > 1 else ''} running, start the shards:")
    for shard in range(len(args.shards)):
        print(f"  kvemb shard --config {path} --shard {shard}")
    print(f"then see what is wrong, if anything:\n  kvemb doctor{where}")
    return 0
