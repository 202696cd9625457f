"""One format of JSON log lines for shards and trainers: what reads the one reads the other."""

import logging

_NAMES = {"levelname": "level", "threadName": "thread"}


def json_log_formatter(cluster: str = "", trainer: str = "") -> logging.Formatter:
    """Return a formatter for `logging` that makes each line an object with time (UTC), level, thread, message, and exc_info of an error.

    Trainers log to "kvemb" and below by the standard `logging`; without a handler of the program's own only warnings are seen.

    Args:
        cluster: its name, in every line; "" leaves it out.
        trainer: this process's name in the job, likewise.

    Example:
        >>> import json, logging
        >>> formatter = json_log_formatter(cluster="ads", trainer="rank-0")
        >>> record = logging.LogRecord("kvemb", logging.WARNING, "", 0, "node %s is back", ("n:1",), None)
        >>> line = json.loads(formatter.format(record))
        >>> line["level"], line["cluster"], line["trainer"], line["message"]
        ('WARNING', 'ads', 'rank-0', 'node n:1 is back')

    In a program: `handler = logging.StreamHandler(); handler.setFormatter(kvemb.json_log_formatter(trainer="rank-0"));
    logging.basicConfig(level="INFO", handlers=[handler])`.
    """
    own = {name: value for name, value in (("cluster", cluster), ("trainer", trainer)) if value}
    return formatter_of((), own)


def formatter_of(attributes: tuple[str, ...], own: dict[str, str]) -> logging.Formatter:
    """Return a formatter that shows further attributes of each record, and values of its own in every line."""
    from pythonjsonlogger.json import JsonFormatter

    fields = ("levelname", *attributes, "message", "threadName")
    return JsonFormatter(fields, timestamp="time", rename_fields=_NAMES, static_fields=own)
