"""The `kvemb` command. Its line is read here, that of `kvemb shard` in `paramserver.__main__`; `kvemb.commands` does the verbs.

Little is imported above `main`: Ctrl-C before it is Python's own to report, and prints a traceback.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import TypeAlias

from kvemb.commands.verb_options import (
    AddressesThenFile,
    add_bench,
    add_conformance,
    add_plan,
    add_publish,
    add_view,
    example_text,
    large,
    moment,
    positive,
    takes_config,
    takes_words,
)
from kvemb.errors import ConfigError, KvembError, did_you_mean
from kvemb.stores.storage_kinds import DEFAULT_KIND, KINDS

# 128 + SIGINT, as a shell reports a program that Ctrl-C ended.
_INTERRUPTED = 130
_Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 well, 1 an error (one line on standard error), 2 wrong usage, 130 Ctrl-C. A signal: SystemExit."""
    verb, words = "", list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["shard"]:  # a server: its options, signals and exit codes are its own
        return _shard(words[1:])
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or gRPC says of each handshake that failed what our own line says
    try:
        exit_in_order()
        args = _parse(words)
        verb = args.verb
        return int(args.run(args))
    except KeyboardInterrupt:
        print(f"\ninterrupted{'; all processes of the cluster have been ended' if verb == 'demo' else ''}", file=sys.stderr)
        return _INTERRUPTED
    except ConfigError as error:
        print(f"kvemb {verb}: {error}", file=sys.stderr)
        return 2
    except KvembError as error:
        print(f"kvemb {verb}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def exit_in_order() -> None:
    """Let SIGTERM and SIGHUP (a closed terminal) raise SystemExit in this program, so that its processes are ended and cleaned up.

    A signal that is ignored already (nohup) stays ignored. Once the program is ending, another signal does nothing: it would cut the
    cleaning short. For the main thread only.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    # Handlers run inside the `finally` and `__exit__` that they interrupt, and see the exception that is being handled there.
    if not isinstance(sys.exc_info()[1], (SystemExit, KeyboardInterrupt)):
        raise SystemExit(128 + number)


_GROUPS = {
    "Begin and run": ("demo", "init", "plan", "shard", "certificates", "acl", "completion"),
    "Look": ("status", "doctor", "tables", "show", "feed", "bench", "config"),
    "Change tables": ("alter", "drop", "import", "export"),
    "Nodes and shards": ("nodes", "shards", "moves", "repair"),
    "Backups": ("save", "load", "ls", "verify", "prune"),
    "Serve": ("publish", "view"),
}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, also words behind an option, which argparse returns unread."""
    parser = _parser()
    known = [name for names in _GROUPS.values() for name in names]
    if words and not words[0].startswith("-") and words[0] not in known:
        parser.error(f"no verb {words[0]!r}{did_you_mean(words[0], known) or '.'} kvemb --help lists them all")
    args, more = parser.parse_known_args(words)
    if len(more) == 1 and not more[0].startswith("-") and "config_given" not in args and {"url", "config"} <= vars(args).keys():
        args.config, args.url = args.url, more.pop()  # FILE, an option, URL
    if more and ("words" not in args or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        args.words += more
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvemb", description="Embedding tables in key-value storage.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train skip-gram embeddings on a real cluster, and compare with one process")
    takes_config(demo, "", "kvemb.yaml of a running cluster, instead of starting one")
    demo.add_argument("--store", choices=tuple(KINDS), help=f"storage kind (default {DEFAULT_KIND})")
    demo.add_argument("--nodes", type=_count, help="storage nodes (default 2; redis-cluster 3)")
    demo.add_argument("--shards", type=_count, help="parameter-server shards (default 2)")
    demo.add_argument("--trainers", type=_count, default=2, help="trainer processes (default 2)")
    demo.add_argument("--seed", type=_seed, default=0, help="seed of the run (default 0)")
    demo.add_argument(
        "--metrics-port", type=_count, default=0, help="trainers serve their figures on ports from here on (default: nowhere)"
    )
    demo.set_defaults(run=_demo, refuse=demo.error)
    verbs.add_parser("shard", help="run one parameter-server shard; `kvemb shard --help` shows its options")
    status = _verb(verbs, "status", "show nodes, rows, memory headroom and the lag of every shard", "status_command.status_command")
    status.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    status.add_argument("--watch", nargs="?", type=_count, const=2, metavar="S", help="look again every S seconds (2 unless given)")
    _add_table_verbs(verbs)
    init = verbs.add_parser("init", help="write a kvemb.yaml with a comment on every key")
    takes_config(init, what="where to (default: ./kvemb.yaml)")
    init.add_argument("--cluster", default="kvemb", help="the cluster's name (default kvemb)")
    init.add_argument("--store", choices=tuple(KINDS), default="redis", help="storage kind (default redis)")
    init.add_argument(
        "--nodes", nargs="+", action=AddressesThenFile, metavar="ADDR", help="host:port of each storage node (default: one on this machine)"
    )
    init.add_argument(
        "--shards",
        nargs="+",
        action=AddressesThenFile,
        default=["127.0.0.1:7070"],
        metavar="ADDR",
        help="host:port of each shard (default 127.0.0.1:7070)",
    )
    init.set_defaults(run=_runs("setup_commands", "init_command"))
    doctor = verbs.add_parser("doctor", help="examine nodes, shards, disks and files, and name each fault with its mend")
    takes_config(doctor)
    doctor.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    add_conformance(doctor)
    doctor.set_defaults(run=_doctor)
    text = "make an authority and certificates for a trial of TLS: shards, trainers, admin, storage"
    certificates = _verb(verbs, "certificates", text, "setup_commands.certificates_command")
    certificates.add_argument("--out", default="tls", metavar="FOLDER", help="where to, from the cluster's file on (default tls)")
    certificates.add_argument("--days", type=positive, default=30.0, metavar="N", help="how long they are good for (default 30)")
    acl = _verb(
        verbs,
        "acl",
        "print users for Redis and Valkey nodes: trainers that only read, shards that only do what they do",
        "setup_commands.acl_command",
    )
    acl.add_argument("--check", choices=("trainer", "shard"), help="ask every node whether kvemb.yaml's user is as this role's should be")
    repair = _verb(verbs, "repair", "restore rows that storage nodes have lost, from the shards' journals", "status_command.repair_command")
    repair.add_argument("--node", action="append", default=[], metavar="ADDR", help="compare this node row by row too; may be repeated")
    repair.add_argument("--all", action="store_true", help="compare every node row by row")
    repair.add_argument("--timeout", type=_count, default=3600, metavar="S", help="seconds to wait for the end (default 3600)")
    drop = _verb(verbs, "drop", "delete a table with all its rows", "table_commands.drop_command")
    drop.add_argument("table", help="its name")
    drop.add_argument("--yes", action="store_true", help="do it; without, only say how many rows there are")
    _add_alter(verbs)
    _add_checkpoint_verbs(verbs)
    _add_foreign_verbs(verbs)
    _add_move_verbs(verbs)
    add_publish(verbs).set_defaults(run=_runs("publish_command", "publish_command"))
    add_view(verbs).set_defaults(run=_runs("publish_command", "view_command"))
    add_plan(verbs).set_defaults(run=_runs("plan_command", "plan_command"))
    add_bench(verbs).set_defaults(run=_runs("bench_command", "bench_command"))
    completion = verbs.add_parser("completion", help="print a script that lets a shell complete this command's words")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which")
    completion.set_defaults(run=_completion)
    for name, verb in verbs.choices.items():
        verb.formatter_class, verb.epilog = argparse.RawDescriptionHelpFormatter, example_text(name)
    helps = {one.dest: one.help for one in verbs._choices_actions}
    verbs._choices_actions.clear()  # argparse lists them without groups
    listed = [(f"\n{group}:", *(f"  {name:<14}{helps[name]}" for name in names)) for group, names in _GROUPS.items()]
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, "\n".join(line for lines in listed for line in lines)
    return parser


def _add_table_verbs(verbs: _Verbs) -> None:
    tables = _verb(verbs, "tables", "list the tables: rows, steps, bytes", "table_commands.tables_command")
    text = "show one row: values, version, where it is, and whether shard and storage agree"
    show = _verb(verbs, "show", text, "table_commands.show_command")
    for verb in (tables, show):
        verb.add_argument("--json", action="store_true", help="for programs: one line of JSON")
    tables.add_argument("--evictions", action="store_true", help="rows that the tables' policies have erased, since each shard was started")
    tables.add_argument("--dry-run", action="store_true", help="rows that they would erase now; nothing is erased")
    tables.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="of these two: the second looks at every row")
    feed = _verb(verbs, "feed", "print a line for everything that the shards change, until it is ended", "feed_command.feed_command")
    feed.add_argument("--tables", default="", metavar="A,B", help="their names (default: all)")
    feed.add_argument("--from", dest="start", default="now", metavar="X", help="now (default), start, or an event's position")
    feed.add_argument("--weights", action="store_true", help="read the rows' weights from storage, too (for --json)")
    feed.add_argument("--json", action="store_true", help="for programs: each line an object")
    show.add_argument("table", help="its table")
    show.add_argument("id", type=_id, help="its id; any other word is hashed, as kvemb.hash_ids does")


def _add_alter(verbs: _Verbs) -> None:
    alter = _verb(
        verbs,
        "alter",
        "give a table that has rows another definition; its pushes wait meanwhile, pulls go on",
        "table_commands.alter_command",
    )
    alter.add_argument("table", help="its name")
    alter.add_argument("--dim", type=_count, metavar="N", help="weights of a row")
    alter.add_argument(
        "--new-columns", choices=("initializer", "zeros"), default="initializer", help="of a larger dim (default initializer)"
    )
    alter.add_argument("--optimizer", metavar="KIND[,NAME=X...]", help="as adagrad,lr=0.1; state of the same name is kept")
    alter.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of weights in storage")
    alter.add_argument("--expected-rows", type=large, metavar="N", help="to have another number of buckets")
    alter.add_argument("--layout", choices=("fast", "compact"), help="of the buckets; with --expected-rows")
    alter.add_argument("--save", metavar="URL", help="save a checkpoint there first")
    alter.add_argument("--abort", action="store_true", help="give up an alteration that was broken off, or erase what one has left")
    alter.add_argument("--dry-run", action="store_true", help="only say what would become of the rows")
    alter.add_argument("--yes", action="store_true", help="do not ask")


def _add_move_verbs(verbs: _Verbs) -> None:
    nodes = verbs.add_parser("nodes", help="show the storage nodes; let some join, leave or take other shares while training goes on")
    takes_words(nodes, ("show", "add", "remove", "replace", "rebalance"), "host:port")
    nodes.add_argument("--weights", default="", metavar="ADDR=W,...", help="shares of nodes; 1 of those that are not named")
    nodes.add_argument("--max-mb-per-s", type=positive, default=0.0, metavar="X", help="copy no more than this, all shards together")
    nodes.add_argument("--dry-run", action="store_true", help="only say what would move")
    nodes.add_argument("--yes", action="store_true", help="do not ask")
    shards = verbs.add_parser("shards", help="show the shards; let some join, leave or take other shares while training goes on")
    takes_words(shards, ("show", "add", "remove", "rebalance"), "host:port")
    shards.add_argument("--weights", default="", metavar="ADDR=W,...", help="shares of shards; 1 of those that are not named")
    shards.add_argument("--dry-run", action="store_true", help="only say what would move")
    shards.add_argument("--yes", action="store_true", help="do not ask")
    moves = verbs.add_parser("moves", help="show the move of slots under way, take it back, or look on until it has ended")
    takes_words(moves, ("show", "abort", "resume"))
    now = verbs.add_parser("config", help="show where nodes and shards are now, as the cluster itself knows it")
    takes_words(now, ("show",))
    for verb, command in ((nodes, "nodes_command"), (shards, "shards_command"), (moves, "moves_command"), (now, "config_command")):
        verb.set_defaults(run=_runs("scaling_commands", command))


def _add_checkpoint_verbs(verbs: _Verbs) -> None:
    save = _checkpoint_verb(verbs, "save", "save every table while training goes on", "path or URL of the new checkpoint")
    save.add_argument("--base", default="", metavar="URL", help="a checkpoint beside it: save only what has changed since")
    save.add_argument("--weights-only", action="store_true", help="leave the optimizer's state out, for serving")
    save.add_argument("--extra", default="", metavar="JSON", help="an object to keep in the manifest")
    save.add_argument("--resume", action="store_true", help="go on with a save to this URL that was broken off")
    save.add_argument("--keep", type=_count, metavar="N", help="afterwards delete those beside it but the newest N; exports count apart")
    save.add_argument(
        "--every",
        type=positive,
        metavar="S",
        help="again every S seconds what has changed, until it is ended; the URL is that of their folder",
    )
    load = _checkpoint_verb(verbs, "load", "make the cluster what a checkpoint says", "path or URL of the checkpoint")
    load.add_argument(
        "--table", dest="tables", action="append", metavar="NAME", help="load this one (again for more); all others stay as they are"
    )
    load.add_argument(
        "--until", type=moment, metavar="TIME", help="the URL is that of a folder: load the newest that holds nothing of behind this moment"
    )
    load.add_argument("--offline", action="store_true", help="shards are down: let them load it when they are started")
    load.add_argument("--yes", action="store_true", help="do not ask whether rows may go")
    verify = _checkpoint_verb(verbs, "verify", "check every byte of a checkpoint", "path or URL of the checkpoint")
    verify.add_argument("--against-storage", action="store_true", help="compare every row with the cluster's too")
    _checkpoint_verb(verbs, "ls", "list checkpoints", "of one checkpoint, or of the folder that holds them", config=False)
    prune = _checkpoint_verb(verbs, "prune", "delete old checkpoints; no chain is broken", "of the folder that holds them", config=False)
    prune.add_argument(
        "--keep", type=_count, required=True, metavar="N", help="how many of the newest to keep, and their bases; exports count apart"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say which would be deleted")


def _add_foreign_verbs(verbs: _Verbs) -> None:
    bring = _verb(
        verbs,
        "import",
        "set rows of a table from a file of another program; a row that is there is written over",
        "foreign_commands.import_command",
    )
    bring.add_argument("table", help="its name")
    bring.add_argument("url", help="path or URL of the file, or of a folder of Parquet files")
    bring.add_argument("--format", default="", help="of the file, where its ending does not tell")
    bring.add_argument("--ids", metavar="NAME", help="its array of ids (default: that named id; else row i is id i)")
    bring.add_argument("--weights", metavar="NAME", help="its array of rows (default: that named weights, or the only one with two axes)")
    bring.add_argument(
        "--state", action="append", default=[], metavar="[FIELD=]NAME", help="its array of the optimizer's state, or of one field of it"
    )
    bring.add_argument("--resume", action="store_true", help="go on behind the rows that the table has already")
    give = _verb(verbs, "export", "write the rows of a table into a file that other programs read", "foreign_commands.export_command")
    give.add_argument("table", help="its name")
    give.add_argument("url", help="path or URL of the file: .npy, .safetensors, .parquet, .pt")
    give.add_argument("--format", default="", help="of the file, where its ending does not tell")
    give.add_argument("--ids", metavar="URL", help="of npy: a further file for the ids")
    give.add_argument("--dtype", default="", metavar="float16|int8", help="of the weights in the file, int8 with a scale for each row")


def _checkpoint_verb(verbs: _Verbs, name: str, text: str, url: str, *, config: bool = True) -> argparse.ArgumentParser:
    verb = _verb(verbs, name, text, f"checkpoint_commands.{name}_command", config=config)
    verb.add_argument("url", help=url)
    return verb


def _verb(verbs: _Verbs, name: str, text: str, runs: str, *, config: bool = True) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text)
    if config:
        takes_config(verb)
    verb.set_defaults(run=_runs(*runs.split(".")))
    return verb


def _demo(args: argparse.Namespace) -> int:
    if args.config and (args.store or args.nodes or args.shards):
        args.refuse("--store, --nodes and --shards describe a cluster to start; --config names one that is running")
    from kvemb.demo.job import DemoOptions, run_demo
    from kvemb.process import ProgressLine

    store = args.store or DEFAULT_KIND
    nodes = args.nodes or max(2, KINDS[store].least_nodes)
    options = DemoOptions(store, nodes, args.shards or 2, args.trainers, args.seed, args.config, args.metrics_port)
    return 0 if run_demo(options, ProgressLine(sys.stdout, plain_every_s=5.0)) else 1


def _doctor(args: argparse.Namespace) -> int:
    return _runs("status_command", "conformance_command" if args.conformance else "doctor_command")(args)


def _shard(words: Sequence[str]) -> int:
    from kvemb.commands.shard_program import main as run

    return run(words)


def _runs(module: str, command: str) -> Callable[[argparse.Namespace], int]:
    """Return a function that imports a verb's module when the verb is run: no other verb waits for that."""
    return lambda args: int(getattr(import_module(f"kvemb.commands.{module}"), command)(args))


def _completion(args: argparse.Namespace) -> int:
    from kvemb.commands.setup_commands import completion_command

    return completion_command(_parser(), args.shell)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        from kvemb.arrays.hashing import hash_ids

        return int(hash_ids([text])[0])


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 63):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2**63 - 1")
    return int(text)


class _Version(argparse.Action):
    """Look the version up only when it is asked for: that takes longer than the rest of the start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"kvemb {version('kvemb')}")
        except PackageNotFoundError:  # a source tree that was never installed
            print("kvemb (not installed)")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
