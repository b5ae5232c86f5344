"""SOFT backbones for MMDetection 3.x and MMSegmentation 1.x."""

__version__ = '0.1.0'
