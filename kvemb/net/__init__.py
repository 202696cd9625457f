"""Sockets, deadlines and the concurrent exchange with many nodes: the only package that touches the network's data path.

A connection is opened in `link`: plainly, or by another `Connect`, which is where encryption goes.
"""
