"""Exports for other programs: an encoder for other libraries, and rows with their images.

Import from it: the name below; `python -m trainer.export` runs it.
It may import: `data` and `run`.
"""

LIBRARIES = ("torchvision", "timm", "onnx")
