"""`python -m trgp` is `trgp`."""

from .cli import entry

entry()
