"""The trainer's side: one bridge per framework, each a package of its own here (`trainer.torch`).

What must not live here: parameter-server code, and any import of a framework. Import the bridge you use.
"""
