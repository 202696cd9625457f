"""The parts of the two-tower examples: data, a trainer that goes on learning, and what servers use.

The programs are two_tower_torch.py, two_tower_keras.py, serving_web.py and kserve_v2.py beside this folder.
"""
