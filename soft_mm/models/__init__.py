"""Modules, and the backbone that the host libraries see."""

from .soft import SOFT

__all__ = ['SOFT']
