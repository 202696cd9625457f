"""The parameter-server tier: the one writer of every row. Started as `python -m paramserver`; nothing here is imported by trainers."""
