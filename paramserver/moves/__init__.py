"""Slots that move between nodes while training goes on: who copies and erases their rows, and who carries a plan from phase to phase."""
