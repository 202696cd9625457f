"""Options of the verbs. Imports nothing that a verb's start would have to wait for.

The cluster's file stands in front of a verb's other words, or is given as `--config FILE`. Here are also the options of `kvemb plan`,
`kvemb bench`, `kvemb publish`, `kvemb view` and `kvemb shard`, and the example in each verb's help: tests/integration/test_cli.py checks
that every verb has one that its parser takes.
"""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from kvemb.errors import ConfigError

DEFAULT = "kvemb.yaml"


class _Given(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object) -> None:
        if "config_given" in namespace:
            parser.error(f"the cluster's file is given twice: {namespace.config} and {values}")
        namespace.config = namespace.config_given = values


class AddressesThenFile(_Given):
    """Several addresses, after which the cluster's file may stand: argparse would take it for one more of them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object) -> None:
        assert isinstance(values, list)
        if len(values) > 1 and ":" not in values[-1]:
            super().__call__(parser, namespace, values.pop())
        setattr(namespace, self.dest, values)


def takes_config(
    verb: argparse.ArgumentParser, default: str | None = DEFAULT, what: str = "kvemb.yaml of the cluster (default: ./kvemb.yaml)"
) -> None:
    """Let `args.config` be given in both ways; to be called before the verb's other words are added."""
    verb.add_argument("config", nargs="?", metavar="FILE", default=argparse.SUPPRESS, action=_Given, help=what)
    verb.add_argument("--config", metavar="FILE", default=default, action=_Given, help="the same")


def takes_words(verb: argparse.ArgumentParser, actions: Sequence[str], *more: str) -> None:
    """Let a verb take an action, the cluster's file and more; `words_of` tells them apart."""
    following = "".join(f" [{word} ...]" for word in more)
    verb.add_argument(
        "words", nargs="*", metavar="WORD", help=f"[{' | '.join(actions)}] [FILE]{following}; FILE is ./kvemb.yaml unless given"
    )
    verb.add_argument("--config", metavar="FILE", default=None, help="the cluster's file, in its place among the words")


def words_of(args: argparse.Namespace, actions: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the action (the first, unless another is named), the path of kvemb.yaml, and what follows."""
    words = list(args.words)
    named = bool(words) and words[0] in actions
    action, rest = (words[0], words[1:]) if named else (actions[0], words[:])
    source = args.config
    if source is None:
        source = rest.pop(0) if rest and not _is_address(rest[0]) else DEFAULT
    elif rest and action != actions[0] and not _is_address(rest[0]):
        raise ConfigError(f"the cluster's file is given twice: {source} and {rest[0]}")
    if rest and not named:
        raise ConfigError(f"{words[0]!r} is none of {', '.join(actions)}, and more than the path of a kvemb.yaml was given")
    if rest and action == actions[0]:
        raise ConfigError(f"{' '.join(rest)}: {action} takes nothing but the path of a kvemb.yaml")
    return action, source, rest


def _is_address(word: str) -> bool:
    return re.search(r":\d+$", word) is not None and not os.path.exists(word)


_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl", "rmsprop")


def add_plan(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `kvemb plan`."""
    plan = verbs.add_parser("plan", help="how many nodes and shards a table will need, from measured costs; needs no cluster")
    plan.add_argument("--ids", type=large, required=True, metavar="N", help="rows that will exist, as 1e9")
    plan.add_argument("--dim", type=large, required=True, metavar="N", help="weights of a row")
    plan.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of weights in storage (default float32)"
    )
    plan.add_argument("--optimizer", choices=_OPTIMIZERS, default="adam", help="without its options (default adam)")
    plan.add_argument("--step-ids", type=large, default=100_000, metavar="N", help="distinct ids of a step, of all trainers (default 1e5)")
    plan.add_argument("--steps-per-s", type=positive, default=1.0, metavar="X", help="how many such steps a second (default 1)")
    plan.add_argument("--trainers", type=large, default=8, metavar="N", help="processes that train (default 8)")
    plan.add_argument("--node-gb", type=positive, default=64.0, metavar="GB", help="memory limit of a storage node (default 64)")
    plan.add_argument("--shard-gb", type=positive, default=64.0, metavar="GB", help="memory of a shard's host (default 64)")
    plan.add_argument("--cache-mb", type=positive, default=256.0, metavar="MB", help="parameter_servers.cache_mb (default 256)")
    plan.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    return plan


def add_bench(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `kvemb bench`."""
    bench = verbs.add_parser("bench", help="how fast this cluster's rows are read, node by node; changes nothing, a reader may run it")
    takes_config(bench)
    bench.add_argument("--seconds", type=positive, default=30.0, metavar="S", help="how long to pull, in all (default 30)")
    bench.add_argument("--table", default="", help="whose rows (default: the table with the most)")
    bench.add_argument("--batch", type=large, default=10_000, metavar="N", help="ids of a pull (default 10000)")
    bench.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    return bench


def add_conformance(doctor: argparse.ArgumentParser) -> None:
    """Add the options of `kvemb doctor` for a server that is not of the cluster."""
    doctor.add_argument(
        "--conformance",
        default="",
        metavar="URL",
        help="instead: whether the server at redis://[USER@]HOST:PORT can hold rows, check by check, under scratch keys; needs pytest",
    )
    doctor.add_argument("--password-env", default="", metavar="NAME", help="environment variable that holds the password there")


def add_publish(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `kvemb publish`."""
    publish = verbs.add_parser("publish", help="keep a copy of tables' weights in another Redis or Valkey server, until it is ended")
    takes_config(publish)
    _takes_target(publish)
    _takes_rows(publish)
    publish.add_argument("--layout", choices=("kvemb", "nve"), default="kvemb", help="nve: one hash a table, for NVIDIA's embedding cache")
    publish.add_argument("--part", default="1/1", metavar="I/N", help="this is publisher I of N, which share the slots")
    return publish


def add_view(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `kvemb view`."""
    view = verbs.add_parser("view", help="named copies of tables' weights with a dense file, that change no more; which one readers use")
    actions = view.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make one; broken off, it is made by the same command again")
    use = actions.add_parser("use", help="have all readers follow one; `live` is what `kvemb publish` maintains")
    drop = actions.add_parser("drop", help="delete one that is not in use")
    listed = actions.add_parser("list", help="show those that there are")
    for action in (create, use, drop, listed):
        takes_config(action)
        if action is not listed:
            action.add_argument("name", help="its name")
        _takes_target(action)
    _takes_rows(create)
    create.add_argument("--model", default="", metavar="FILE", help="the dense part, of any kind: model.onnx, model.pt2")
    return view


def _takes_target(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--to", required=True, metavar="URL", help="redis://[USER@]HOST:PORT; or rediss://, with the files of storage.tls")
    verb.add_argument("--password-env", default="", metavar="NAME", help="environment variable that holds the password there")


def _takes_rows(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tables", required=True, metavar="A,B", help="their names")
    verb.add_argument(
        "--dtype", choices=("float32", "float16", "int8"), default="float32", help="of the weights there; int8 with a scale for each row"
    )


def shard_options() -> argparse.ArgumentParser:
    """Return the options of `kvemb shard`, whose program reads them itself."""
    parser = argparse.ArgumentParser(
        prog="kvemb shard",
        description="Run one parameter-server shard.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=example_text("shard"),
    )
    takes_config(parser)
    parser.add_argument("--shard", required=True, type=int, help="which shard, counted from 0")
    parser.add_argument("--listen", help="host:port to bind, when it is not the shard's address in the file; port 0: a free one")
    parser.add_argument("--ready-file", help="written with the bound host:port once the shard serves")
    parser.add_argument("--start-timeout", type=float, default=60.0, metavar="S", help="wait so long for storage, or the port (default 60)")
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S", help="at a stop, apply for so long, and flush a long journal (default 30)"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="json: each line an object with its ids")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="leave out what matters less (default info)"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="shut out a process that may run the shard and cannot be ended, its host being lost (one that hangs here: kill -9)",
    )
    parser.add_argument(
        "--roll-back",
        action="store_true",
        help="start although the journal has lost its end: rows in storage that are newer go back to where it ends, and pushes are lost",
    )
    return parser


def positive(text: str) -> float:
    """Read a number above 0, which need not be whole."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def moment(text: str) -> datetime:
    """Read a time, of this machine's time zone where it names none."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 2026-11-26T18:30:00 or 2026-11-26T18:30:00Z") from None


def large(text: str) -> int:
    """Read a whole number, which may be written as 1e9."""
    number = positive(text)
    if number != int(number) or number > 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 1e18")
    return int(number)


EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "demo": ("kvemb demo --store redis --nodes 3 --shards 2 --trainers 2", "kvemb demo --config kvemb.yaml"),
    "shard": ("kvemb shard --config kvemb.yaml --shard 0",),
    "status": ("kvemb status", "kvemb status --watch 10", "kvemb status --json kvemb.yaml"),
    "tables": ("kvemb tables", "kvemb tables --json --config kvemb.yaml", "kvemb tables --evictions", "kvemb tables --dry-run"),
    "show": ("kvemb show user 42", "kvemb show user -5 --json"),
    "feed": ("kvemb feed --tables user,item", "kvemb feed --json --weights --from start kvemb.yaml"),
    "publish": (
        "kvemb publish --to redis://10.1.0.1:6379 --tables user,item --dtype int8",
        "kvemb publish kvemb.yaml --to redis://10.1.0.1:6379 --tables user --part 2/4",
    ),
    "view": (
        "kvemb view create v12 --to redis://10.1.0.1:6379 --tables user,item --model model.pt2",
        "kvemb view use v12 --to redis://10.1.0.1:6379",
        "kvemb view list --to redis://10.1.0.1:6379",
    ),
    "init": ("kvemb init --store redis --nodes 10.0.0.1:6379 10.0.0.2:6379 --shards 10.0.1.1:7070",),
    "doctor": ("kvemb doctor", "kvemb doctor --json kvemb.yaml", "kvemb doctor --conformance redis://10.1.0.1:6379"),
    "certificates": ("kvemb certificates kvemb.yaml", "kvemb certificates --days 7 --out trial"),
    "acl": ("kvemb acl > users.acl", "kvemb acl --check trainer"),
    "repair": ("kvemb repair --node 10.0.0.1:6379", "kvemb repair --all --timeout 7200"),
    "nodes": (
        "kvemb nodes kvemb.yaml",
        "kvemb nodes add kvemb.yaml 10.0.0.3:6379 --max-mb-per-s 50",
        "kvemb nodes remove kvemb.yaml 10.0.0.1:6379 --dry-run",
        "kvemb nodes replace kvemb.yaml 10.0.0.1:6379 10.0.0.4:6379 --yes",
        "kvemb nodes rebalance kvemb.yaml --weights 10.0.0.3:6379=2",
    ),
    "shards": (
        "kvemb shards kvemb.yaml",
        "kvemb shards add kvemb.yaml 10.0.1.3:7070",
        "kvemb shards remove kvemb.yaml 10.0.1.2:7070 --dry-run",
        "kvemb shards rebalance kvemb.yaml --weights 10.0.1.1:7070=2",
    ),
    "moves": ("kvemb moves kvemb.yaml", "kvemb moves abort kvemb.yaml"),
    "config": ("kvemb config show kvemb.yaml",),
    "alter": (
        "kvemb alter user --dim 32 --new-columns zeros --dry-run",
        "kvemb alter user --optimizer adagrad,lr=0.1 --save s3://bucket/run/before",
        "kvemb alter user --abort",
    ),
    "drop": ("kvemb drop user", "kvemb drop user --yes"),
    "save": (
        "kvemb save s3://bucket/run/step-1000",
        "kvemb save s3://bucket/run/step-2000 --base s3://bucket/run/step-1000 --keep 5",
        "kvemb save s3://bucket/run/log --every 60 --keep 1440",
    ),
    "load": (
        "kvemb load s3://bucket/run/step-1000",
        "kvemb load s3://bucket/run/step-1000 --table user",
        "kvemb load s3://bucket/run/log --until 2026-11-26T18:30:00Z",
    ),
    "verify": ("kvemb verify s3://bucket/run/step-1000", "kvemb verify /backups/monday --against-storage"),
    "ls": ("kvemb ls s3://bucket/run",),
    "prune": ("kvemb prune s3://bucket/run --keep 5 --dry-run", "kvemb prune s3://bucket/run --keep 5"),
    "import": (
        "kvemb import user s3://bucket/user.parquet --ids user_id --weights embedding",
        "kvemb import item model.safetensors --weights item.weight --resume",
    ),
    "export": ("kvemb export user s3://bucket/user.parquet", "kvemb export item item.npy --ids item-ids.npy"),
    "bench": ("kvemb bench", "kvemb bench kvemb.yaml --seconds 10 --table user --batch 100000"),
    "completion": ("kvemb completion bash > ~/.local/share/bash-completion/completions/kvemb", "kvemb completion zsh > ~/.zfunc/_kvemb"),
    "plan": ("kvemb plan --ids 1e11 --dim 10 --optimizer adam --step-ids 1e6", "kvemb plan --ids 5e8 --dim 64 --optimizer sgd --json"),
}


def example_text(verb: str) -> str:
    """Return the text below a verb's options; "" for a verb without an example."""
    lines = EXAMPLES.get(verb, ())
    return "\n".join([f"example{'s' if len(lines) > 1 else ''}:", *(f"  {line}" for line in lines)]) if lines else ""
