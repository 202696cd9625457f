"""The parts of the two-tower examples: their data. The programs are examples/two_tower_torch.py and examples/two_tower_keras.py."""
