"""Sockets, deadlines and the concurrent exchange with many nodes: the only package that touches the network's data path."""
