"""OWM that protects the linear layers alone."""

from dataclasses import dataclass
from functools import cached_property

from trgp.methods.owm import OWM
from trgp.methods.protected import Protected


@dataclass(frozen=True)
class LinearOWM(OWM):
    """OWM whose convolutions go on as in plain SGD."""

    @cached_property
    def layers(self) -> dict[str, Protected]:
        return {name: each for name, each in super().layers.items() if each.factored}
