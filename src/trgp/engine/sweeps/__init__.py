"""Sweeps: which cells they are made of, by a name or by a user's file."""

from ..sweep_grid import Cell, Grid, cells
from .file import read
from .lists import SWEEPS

__all__ = ["SWEEPS", "Cell", "Grid", "cells", "read"]
