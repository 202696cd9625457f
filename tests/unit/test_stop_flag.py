"""A flag that a signal handler sets wherever the main thread is: no wait hangs, none is longer than it was asked to be."""

import subprocess
import sys
import threading

from kvemb.process.interrupts import StopFlag

ROUNDS = 200

WAITS_ALL_THE_TIME = """
import faulthandler, os, signal, threading, time
from kvemb.process.interrupts import StopFlag
faulthandler.dump_traceback_later(20, exit=True)
for _ in range({rounds}):
    flag = {flag}()
    signal.signal(signal.SIGUSR1, lambda *_: flag.set())
    threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    while not flag.wait(0):
        pass
"""


def ends(flag: str) -> bool:
    program = WAITS_ALL_THE_TIME.format(rounds=ROUNDS, flag=flag)
    return not subprocess.run([sys.executable, "-c", program], timeout=200, check=False, stderr=subprocess.DEVNULL).returncode


def test_a_handler_sets_it_while_the_main_thread_waits_for_it() -> None:
    assert ends("StopFlag")


def test_a_wait_ends_when_it_is_set_and_when_the_time_is_over() -> None:
    flag = StopFlag()
    assert not flag.wait(0.0)
    assert not flag.wait(0.001)
    threading.Timer(0.01, flag.set).start()
    assert flag.wait(60)
    assert flag.is_set()
    assert flag.wait(0.0)
