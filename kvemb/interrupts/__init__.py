"""What an interrupt, or the end of the program, must not break: calls off the main thread, and pushes delivered at exit."""
