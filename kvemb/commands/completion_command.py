"""What `kvemb completion` prints: a script that lets a shell complete verbs and options, made by shtab from the parser."""

import argparse

from kvemb.errors import ConfigError


def completion_command(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the script for one shell."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion is made by shtab, which is not installed here; run: pip install 'kvemb[completion]'") from error
    for one in _parsers(parser):
        for action in one._actions:
            if action.dest in ("config", "url"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    print(shtab.complete(parser, shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    verbs = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(verb for of in verbs for verb in of)]
