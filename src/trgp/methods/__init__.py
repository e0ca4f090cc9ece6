"""The methods, one short file each: the changes that a method makes to plain SGD."""

import dataclasses
from collections.abc import Mapping

from ..lookup import imported, meant
from ..types import Params, Rate
from .agem import AGEM
from .apd import APD
from .base import About, Batch, Context, Factors, Grads, Method, Network, Report, sgd
from .den import DEN
from .er import ER
from .ewc import EWC
from .finetune import Finetune
from .gpm import GPMMethod
from .hat import HAT
from .lwf import LwF
from .multitask import Multitask
from .owm import OWM
from .pnn import PNN
from .rcl import RCL
from .single import Single
from .trgp import TRGPMethod

__all__ = [
    "METHODS",
    "About",
    "Batch",
    "Context",
    "Factors",
    "Grads",
    "Method",
    "Network",
    "Params",
    "Rate",
    "Report",
    "find",
    "sgd",
]

METHODS: Mapping[str, type[Method]] = {
    "finetune": Finetune,
    "single": Single,
    "multitask": Multitask,
    "owm": OWM,
    "ewc": EWC,
    "hat": HAT,
    "agem": AGEM,
    "er": ER,
    "lwf": LwF,
    "pnn": PNN,
    "den": DEN,
    "rcl": RCL,
    "apd": APD,
    "gpm": GPMMethod,
    "trgp": TRGPMethod,
}


def find(name: str) -> type[Method]:
    """Find a method by its name, or a user's own by `module:Class`."""
    if not isinstance(name, str):
        raise TypeError(f"A method is given by its name or as 'module:Class', not as {name!r}.")
    if ":" in name:
        found = imported(name, "method")
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise ValueError(f"{name} is no method; derive it from trgp.methods.Method.")
        if not isinstance(getattr(found, "about", None), About):
            raise ValueError(
                f"{name} has no `about`; give it an About that describes the method and its needs."
            )
        for field in dataclasses.fields(found):
            if field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"{name} has no default for its option '{field.name}'; give one.")
        return found
    if name not in METHODS:
        raise ValueError(
            f"There is no method {name!r}; {meant(name, METHODS)} One of your own is given as "
            "module:Class."
        )
    return METHODS[name]
