"""Ctrl-C may come at any moment of a call to a shard: the next calls must go on as if nothing had been."""

import subprocess
import sys

from kvemb.local_cluster.launcher import LocalCluster

# A process of its own: every wait in here would be one of pytest's, and its hang pytest's.
PROGRAM = """
import signal, sys, threading, time
import numpy as np
import kvemb

N_INTERRUPTS = 400

class Interrupted(Exception):
    pass

armed = False
n_interrupts = 0

def interrupt(*_):
    global armed, n_interrupts
    if armed:  # one a call, none between calls
        armed, n_interrupts = False, n_interrupts + 1
        raise Interrupted

def interrupts():
    delays = np.random.default_rng(0).uniform(0, 0.003, 1 << 20)
    for delay in delays:
        time.sleep(delay)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        if n_interrupts >= N_INTERRUPTS:
            return

with kvemb.connect(sys.argv[1]) as cluster:
    signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Thread(target=interrupts)
    sender.start()
    while sender.is_alive():
        try:
            armed = True
            cluster.progress()
            armed = False
        except Interrupted:
            pass
    sender.join()
    print(n_interrupts >= N_INTERRUPTS, len(cluster.progress(timeout_s=10)))
"""


def test_calls_that_were_interrupted_hold_no_later_call_up() -> None:
    with LocalCluster("valkey", 1, shards=2) as local:
        done = subprocess.run([sys.executable, "-c", PROGRAM, local.url], capture_output=True, text=True, timeout=200, check=False)
    assert (done.stdout.split(), done.returncode) == (["True", "2"], 0), done.stderr


CLOSED_BY_HALF = """
import atexit, os, signal, time
from kvemb.client.all_shards import AllShards
from kvemb.client.shard_channel import ShardChannel

close, closed = ShardChannel.close, []

def close_slowly(channel):
    if channel.shard == 0:
        os.kill(os.getpid(), signal.SIGINT)  # the second Ctrl-C, while the first one is obeyed
    time.sleep(0.3)
    close(channel)
    closed.append(channel.shard)

ShardChannel.close = close_slowly
servers = AllShards(["127.0.0.1:1", "127.0.0.1:2"])
assert len(servers.channels) == 2
try:
    servers.close()
except KeyboardInterrupt:
    servers.close()  # does nothing more
    atexit.register(lambda: print(closed))  # is called when threads like ours have ended
"""


def test_channels_are_closed_to_the_last_before_the_program_ends_though_ctrl_c_came_while_they_were_closed() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED_BY_HALF], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr
