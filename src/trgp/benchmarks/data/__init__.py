"""Image data: the store on disk, the public sources, and batches on the device."""

from .catalogue import BENCHMARKS, Catalogue, present
from .images import NORMALISATION, Normalisation, Tensors, as_rgb32, to_tensors
from .prepare import prepare
from .sources import SOURCES, Remote, Source
from .store import SETS, ImageSet, data_root, load, save

__all__ = [
    "BENCHMARKS",
    "NORMALISATION",
    "SETS",
    "SOURCES",
    "Catalogue",
    "ImageSet",
    "Normalisation",
    "Remote",
    "Source",
    "Tensors",
    "as_rgb32",
    "data_root",
    "load",
    "prepare",
    "present",
    "save",
    "to_tensors",
]
