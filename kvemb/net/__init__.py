"""Sockets, deadlines and the concurrent exchange with many nodes: the only package that touches the network's data path.

A connection is opened plainly in `link`, or encrypted in `tls_link`.
"""
