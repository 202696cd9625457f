"""The parts of the DeepFM example: click logs and their readers, metrics, the model. The program is examples/deepfm_torch.py.

What must not live here: anything the product itself needs; trainers and parameter servers import nothing from examples.
"""
