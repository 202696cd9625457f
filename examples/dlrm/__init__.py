"""The parts of the DLRM examples: the models and their data. The programs are examples/dlrm_torch.py and examples/dlrm_tensorflow.py.

What must not live here: anything the product itself needs; trainers and parameter servers import nothing from examples.
"""
