"""On Python's path of a process that `compare` profiles: every thread is profiled, and the sum is written when the process ends."""

import atexit
import cProfile
import os
import pstats
import threading
import time

_profiles: list[cProfile.Profile] = []


def _begin(*event: object) -> None:
    """Take the place of this hook in a thread that has just begun."""
    profile = cProfile.Profile(time.thread_time)  # what waits takes nothing
    _profiles.append(profile)
    profile.enable()


def _end() -> None:
    for profile in _profiles:
        profile.disable()
    stats = pstats.Stats(_profiles[0])
    for profile in _profiles[1:]:
        if profile.getstats():
            stats.add(profile)
    stats.dump_stats(f"{os.environ['KVEMB_COMPARE_PROFILES']}/{os.getpid()}")


if "KVEMB_COMPARE_PROFILES" in os.environ:
    threading.setprofile(_begin)
    _begin()
    atexit.register(_end)
