"""The cells of a sweep, by its name or from a user's file."""

from ..sweep_grid import Cell, Grid, cells
from .file import read
from .lists import SWEEPS

__all__ = ["SWEEPS", "Cell", "Grid", "cells", "read"]
