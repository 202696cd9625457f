"""The parts of the DLRM example: the model and its data. The program is examples/dlrm_torch.py.

What must not live here: anything the product itself needs; trainers and parameter servers import nothing from examples.
"""
