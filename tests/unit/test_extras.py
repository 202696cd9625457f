"""Libraries that only some verbs need: each hint names packages that an index has, and the environment that lacks them."""

import importlib.util
import sys

import pytest

from kvemb.process.extras import install_line, lacks, missing_for_checkpoints


def test_a_hint_names_packages_and_never_kvemb_which_is_on_no_index() -> None:
    for extra in ("embedded", "torch", "keras", "tensorflow", "jax", "checkpoint", "certificates", "completion"):
        assert install_line(extra).startswith("pip install '")
        assert "kvemb" not in install_line(extra)


def test_what_saves_lack_is_said_with_the_environment_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_for_checkpoints() == ""
    found = importlib.util.find_spec
    monkeypatch.setattr("kvemb.process.extras.find_spec", lambda name: None if name == "fsspec" else found(name))
    assert missing_for_checkpoints() == lacks("fsspec", what="saves and loads", extra="checkpoint")
    assert sys.prefix in missing_for_checkpoints()
    assert "'fsspec>=" in missing_for_checkpoints()
