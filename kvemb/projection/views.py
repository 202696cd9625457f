"""Views: named copies of tables' rows that change no more, each with a dense file, beside each other in one target.

A view is a projection under a prefix of its own, whose publisher has stopped. One small value, `kvemb:views` (JSON), names the views, what
each has, and which one is in use. It is replaced only where it is still the one that was read. So a view is there from the moment that it
is whole, readers switch with one write, and one that is in use cannot be dropped. A view has a number that no other ever had, and its keys
begin with it: rows that were read under them are rows of that view. docs/adr/0106 has the argument.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvemb.errors import ConfigError, DeadlineExceededError, FencedError, StorageError, UnknownViewError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.projection.projected_rows import ALL_SLOTS
from kvemb.projection.projection_target import PREFIX, ProjectionTarget
from kvemb.stores.redis_server.compare_and_set import swap
from kvemb.stores.redis_server.redis_commands import ask
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in, run_id_of

VIEWS_KEY = f"{PREFIX}views"
LIVE = "live"
"""The name of the projection that `kvemb publish` maintains; in use while no view is."""
MOST_DENSE_BYTES = 1 << 30
BUILDING, COMPLETE, DROPPING = "building", "complete", "dropping"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_PIECE_BYTES = 8 << 20  # of a dense file, in one value
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class DenseFile:
    """A file beside the rows of a view, as it was when the view was made."""

    name: str  # without its folder; its ending tells what it is
    # size_bytes, sha256: of its content
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class View:
    """One view."""

    name: str  # given by its maker
    number: int  # no other view of the target ever had it
    state: str  # "building", "complete" or "dropping"; readers see complete ones alone
    # tables, dtype: of its rows
    tables: tuple[str, ...]
    dtype: str
    dense: DenseFile | None  # None where it has none
    until: float = 0.0  # unix time: all that was applied before is in its rows; 0 while it is built

    @property
    def prefix(self) -> str:
        """Of its keys."""
        return f"{PREFIX}view-{self.number}:"

    @property
    def content(self) -> tuple[tuple[str, ...], str, DenseFile | None]:
        """What was asked for: two views of one name with the same are the same."""
        return self.tables, self.dtype, self.dense

    def piece_keys(self) -> list[bytes]:
        """The names of the values that hold the dense file, in order."""
        n_pieces = 0 if self.dense is None else -(-self.dense.size_bytes // _PIECE_BYTES)
        return [f"{self.prefix}dense:{piece}".encode() for piece in range(n_pieces)]


@dataclass(frozen=True)
class ViewList:
    """All views of a target, as one value; changes make a new one. Pure."""

    views: Mapping[str, View] = field(default_factory=dict)  # by name
    in_use: str = LIVE  # the name of the one that readers follow; "live" for none
    last_number: int = 0  # of a view, so far

    def encode(self) -> bytes:
        """Return the bytes of `kvemb:views`."""
        views = {name: asdict(view) for name, view in self.views.items()}
        return json.dumps({"in_use": self.in_use, "last_number": self.last_number, "views": views}).encode()

    @staticmethod
    def decode(raw: bytes | None) -> "ViewList":
        """Read them; None is a target without views."""
        if raw is None:
            return ViewList()
        try:
            tree = json.loads(raw)
            views = {name: _view_of(fields) for name, fields in tree["views"].items()}
            return ViewList(views, str(tree["in_use"]), int(tree["last_number"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the target's value {VIEWS_KEY} is no list of views: another program wrote there, or wrote over it"
            ) from error

    def complete(self) -> list[View]:
        """Those that readers may see, oldest first."""
        return sorted((view for view in self.views.values() if view.state == COMPLETE), key=lambda view: view.number)

    def named(self, name: str) -> View | None:
        """Return the view that a reader asks for, "" for the one in use, None: the projection; UnknownViewError: none, or not whole."""
        wanted = name or self.in_use
        view = self.views.get(wanted)
        if wanted == LIVE:
            return None
        if view is None or view.state != COMPLETE:
            names = ", ".join(one.name for one in self.complete()) or "none"
            raise UnknownViewError(f"there is no view {wanted!r}, or none that is whole; there are: {names}")
        return view

    def begun(self, name: str, tables: tuple[str, ...], dtype: str, dense: DenseFile | None) -> "ViewList":
        """Begin a view; the same one that is there, whole or not, stays."""
        view = View(name, self.last_number + 1, BUILDING, tables, dtype, dense)
        there = self.views.get(name)
        if there is not None and there.content == view.content and there.state != DROPPING:
            return self
        if there is not None and there.state == COMPLETE:
            raise ConfigError(f"there is a view {name!r} already, with other content: {_shown(there)}. Give another name, or drop it")
        return replace(self, views={**self.views, name: view}, last_number=view.number)

    def completed(self, view: View, until: float) -> "ViewList":
        """Let readers see a view."""
        if self.views.get(view.name) != view:
            raise FencedError(f"view {view.name!r} was dropped, or begun again, meanwhile; this one ends")
        return replace(self, views={**self.views, view.name: replace(view, state=COMPLETE, until=until)})

    def used(self, name: str) -> "ViewList":
        """Have readers follow this one."""
        self.named(name)
        return replace(self, in_use=name)

    def dropping(self, name: str) -> "ViewList":
        """Take a view from readers, before it is deleted."""
        view = self.views.get(name)
        if view is None:
            raise UnknownViewError(f"there is no view {name!r}; there are: {', '.join(self.views) or 'none'}")
        if self.in_use == name:
            raise ConfigError(f"view {name!r} is in use; let readers use another one first: kvemb view use NAME, or kvemb view use {LIVE}")
        return replace(self, views={**self.views, name: replace(view, state=DROPPING)})

    def dropped(self, view: View) -> "ViewList":
        """Forget a view that was deleted."""
        return replace(self, views={name: one for name, one in self.views.items() if one.number != view.number})


class TargetViews:
    """The views of one target, for those who make and choose them. Stateless: each call asks the target."""

    def __init__(self, address: str, access: RedisAccess) -> None:
        self.address, self._access = address, access

    def read(self) -> ViewList:
        """Return the views that there are."""
        deadline = Deadline.after(_TIMEOUT_S)
        with logged_in(self.address, self._access, deadline) as link:
            return ViewList.decode(_value(link, VIEWS_KEY, deadline))

    def target(self, view: View) -> ProjectionTarget:
        """Where the rows of a view are written."""
        return ProjectionTarget(self.address, self._access, ALL_SLOTS, view.prefix)

    def begin(self, name: str, tables: tuple[str, ...], dtype: str, dense: DenseFile | None) -> View:
        """Begin a view, or find the one that was begun; what another one of this name has left is deleted first."""
        if not _NAME.fullmatch(name) or name == LIVE:
            raise ConfigError(f"{name!r} is no name of a view: give up to 100 letters, digits, '.', '_' and '-', and not {LIVE!r}")
        there = self.read().views.get(name)
        if there is not None and there.state != COMPLETE and (there.state == DROPPING or there.content != (tables, dtype, dense)):
            self.drop(name)
        return self._change(lambda views: views.begun(name, tables, dtype, dense)).views[name]

    def require_building(self, view: View) -> None:
        """Refuse to go on with a view that is not being built any more. Raises FencedError."""
        self.read().completed(view, 0.0)

    def complete(self, view: View, target: ProjectionTarget, dense: bytes, not_before_s: float) -> None:
        """Write the dense file, and let readers see the view."""
        for number, key in enumerate(view.piece_keys()):
            target.put(key, dense[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES])
        record = target.record()
        if record is None or record["until"] < not_before_s:
            raise StorageError(f"target {self.address} has lost what it had of view {view.name!r}; repeat the command")
        self._change(lambda views: views.completed(view, record["until"]))

    def use(self, name: str) -> None:
        """Have all readers follow this view. Raises UnknownViewError."""
        if name == LIVE and ProjectionTarget(self.address, self._access, ALL_SLOTS).about() is None:
            raise UnknownViewError(f"target {self.address} holds no projection that `kvemb publish` maintains; publish one first")
        self._change(lambda views: views.used(name))

    def drop(self, name: str) -> None:
        """Delete a view with its rows; UnknownViewError for none. Killed at any point, it is done by doing it again."""
        view = self._change(lambda views: views.dropping(name)).views[name]
        target = self.target(view)
        try:
            target.take_over()  # ends a process that is building it
            target.remove_all(view.piece_keys())
        finally:
            target.close()
        self._change(lambda views: views.dropped(view))

    def _change(self, change: Callable[[ViewList], ViewList]) -> ViewList:
        """Replace the list by another one, computed from what is there; done again where another process was faster."""
        deadline = Deadline.after(_TIMEOUT_S)
        while True:
            with logged_in(self.address, self._access, deadline) as link:
                run_id, raw = run_id_of(link, deadline), _value(link, VIEWS_KEY, deadline)
            before = ViewList.decode(raw)
            after = change(before)
            if after == before or swap(self.address, self._access, [(VIEWS_KEY.encode(), raw, after.encode())], run_id, deadline)[0]:
                return after
            if deadline.expired:
                raise DeadlineExceededError(f"target {self.address}: others changed the list of views for {deadline.timeout_s:g} s")


def dense_bytes(link: Link, view: View, deadline: Deadline) -> bytes:
    """Return the content of a view's dense file, checked."""
    found = [_value(link, key, deadline) or b"" for key in view.piece_keys()]
    data = b"".join(found)
    if view.dense is None or hashlib.sha256(data).hexdigest() != view.dense.sha256:
        raise StorageError(f"target {link.address}: the dense file of view {view.name!r} is not there whole; make the view again")
    return data


def _value(link: Link, key: str | bytes, deadline: Deadline) -> bytes | None:
    found = ask(link, deadline, "GET", key)
    return found if isinstance(found, bytes) else None


def _view_of(fields: Mapping[str, Any]) -> View:
    dense = None if fields["dense"] is None else DenseFile(**fields["dense"])
    return View(**{**fields, "tables": tuple(fields["tables"]), "dense": dense})


def _shown(view: View) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.until))
    return f"tables {','.join(view.tables)} as {view.dtype} of {since}, {view.dense.name if view.dense else 'no dense file'}"
