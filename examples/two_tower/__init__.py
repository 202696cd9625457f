"""The parts of the two-tower example: its data. The program is examples/two_tower_torch.py."""
