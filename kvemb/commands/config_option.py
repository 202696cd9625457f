"""How a verb is told the cluster's file: in front of its other words, or as `--config FILE`. Imports nothing that a verb would wait for."""

import argparse
import os
import re
from collections.abc import Sequence

from kvemb.errors import ConfigError

DEFAULT = "kvemb.yaml"


class _Given(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object) -> None:
        if "config_given" in namespace:
            parser.error(f"the cluster's file is given twice: {namespace.config} and {values}")
        namespace.config = namespace.config_given = values


class AddressesThenFile(_Given):
    """Several addresses, behind which the cluster's file may stand: argparse would take it for one more of them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object) -> None:
        assert isinstance(values, list)
        if len(values) > 1 and ":" not in values[-1]:
            super().__call__(parser, namespace, values.pop())
        setattr(namespace, self.dest, values)


def takes_config(
    verb: argparse.ArgumentParser, default: str | None = DEFAULT, what: str = "kvemb.yaml of the cluster (default: ./kvemb.yaml)"
) -> None:
    """Let `args.config` be given in both ways; to be called before the verb's other words are added.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> takes_config(parser)
        >>> _ = parser.add_argument("url")
        >>> [parser.parse_args(words.split()).config for words in ("s3://a", "my.yaml s3://a", "s3://a --config my.yaml")]
        ['kvemb.yaml', 'my.yaml', 'my.yaml']
    """
    verb.add_argument("config", nargs="?", metavar="FILE", default=argparse.SUPPRESS, action=_Given, help=what)
    verb.add_argument("--config", metavar="FILE", default=default, action=_Given, help="the same")


def takes_words(verb: argparse.ArgumentParser, actions: Sequence[str], *more: str) -> None:
    """Let a verb be told an action, the cluster's file and more; `words_of` tells them apart."""
    following = "".join(f" [{word} ...]" for word in more)
    verb.add_argument(
        "words", nargs="*", metavar="WORD", help=f"[{' | '.join(actions)}] [FILE]{following}; FILE is ./kvemb.yaml unless given"
    )
    verb.add_argument("--config", metavar="FILE", default=None, help="the cluster's file, in its place among the words")


def words_of(args: argparse.Namespace, actions: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the action (the first, unless another is named), the path of kvemb.yaml, and what follows.

    Example:
        >>> words_of(argparse.Namespace(words=["add", "a:1"], config=None), ["show", "add"])
        ('add', 'kvemb.yaml', ['a:1'])
        >>> words_of(argparse.Namespace(words=["add", "my.yaml", "a:1"], config=None), ["show", "add"])
        ('add', 'my.yaml', ['a:1'])
    """
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
