"""A web page that recommends items, and learns from each click while you look on.

    pip install fastapi uvicorn
    python examples/serving_web.py                        # then open http://127.0.0.1:8000
    python examples/serving_web.py --config kvemb.yaml    # on a running cluster

Three things are at work, as in production. This process serves: it reads rows of users and items by `kvemb.serve`, and can write none.
A trainer, a process of its own, learns from clicks (two_tower/online.py). Between them is the cluster, whose feed tells this process which
rows have changed, so that what a click taught shows in the next recommendation.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from dlrm.place import add_arguments
from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from two_tower.interests import interests_of
from two_tower.online import add_sizes, trained
from two_tower.served import Recommender

from kvemb.cli import exit_in_order
from kvemb.errors import InvalidInputError, KvembError, StorageError


class Click(BaseModel):
    """What a user has chosen."""

    user: int
    item: int


def app_of(recommender: Recommender, take_click: Callable[[tuple[int, int]], None], n_users: int) -> FastAPI:
    """Return the application: a page, what it asks for, and where its clicks go."""
    app = FastAPI(title="kvemb recommends")
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    interests = interests_of(len(recommender.items), np.random.default_rng(0))

    @app.get("/", response_class=HTMLResponse)
    def index() -> str:
        return page

    @app.get("/recommend")
    def recommend(user: int, k: int = 10) -> dict[str, Any]:
        if not 1 <= k <= len(recommender.items):
            raise HTTPException(422, f"k is {k}; there are {len(recommender.items)} items")
        try:
            items, scores = recommender.recommend([user], k)
        except InvalidInputError as error:
            raise HTTPException(422, str(error)) from error
        except StorageError as error:
            raise HTTPException(503, str(error)) from error
        found = zip(items[0].tolist(), scores[0].tolist(), strict=True)
        return {"user": user, "items": [{"item": item, "interest": int(interests[item]), "score": score} for item, score in found]}

    @app.post("/click", status_code=202)
    def click(click: Click) -> dict[str, str]:
        if not (0 <= click.user < n_users and 0 <= click.item < len(recommender.items)):
            raise HTTPException(422, f"there are {n_users} users and {len(recommender.items)} items")
        take_click((click.user, click.item))
        return {"click": "is on its way to the trainer"}

    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0, or 1 after an error that was told in one line on standard error."""
    parser = argparse.ArgumentParser(description="Serve a recommender on a web page, and learn from its clicks.")
    add_arguments(parser, local=False)
    add_sizes(parser)
    parser.add_argument("--port", type=int, default=8000, help="of the page, on this machine alone (default 8000)")
    args = parser.parse_args(argv)
    try:
        with trained(args) as model, Recommender(model.url, model.folder) as recommender:
            print(f"rows: {model.url}\nmodel: {model.folder}\nopen http://127.0.0.1:{args.port}", flush=True)
            uvicorn.run(app_of(recommender, model.clicks.put, args.users), port=args.port, log_level="warning")
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # uvicorn has ended in order
        pass
    return 0


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
