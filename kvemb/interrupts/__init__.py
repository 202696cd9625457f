"""What Ctrl-C, or the end of the program, must not break: calls made off the main thread, and pushes delivered at exit."""
