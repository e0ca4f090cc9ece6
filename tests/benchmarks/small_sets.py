"""Small random image sets in the right shapes."""

from pathlib import Path

import numpy as np

from trgp.benchmarks.data import save

# Of each set: classes, train and test images a class, shape. Enough for one image held out.
SMALL = {
    "mnist": (10, 12, 3, (28, 28, 1)),
    "fashion_mnist": (10, 12, 3, (28, 28, 1)),
    "notmnist": (10, 13, 4, (28, 28, 1)),
    "cifar10": (10, 14, 3, (32, 32, 3)),
    "svhn": (10, 15, 5, (32, 32, 3)),
    "cifar100": (100, 4, 2, (32, 32, 3)),
    "miniimagenet": (100, 10, 1, (84, 84, 3)),
}


def write_small(root: Path, name: str) -> None:
    """A set of random images, its classes mixed; superclass of a class: its rest by 20."""
    classes, train, test, shape = SMALL[name]
    random = np.random.RandomState(list(SMALL).index(name))
    arrays = {}
    for split, each in (("train", train), ("test", test)):
        labels = random.permutation(np.repeat(np.arange(classes), each))
        arrays[f"{split}_images"] = random.randint(0, 256, (len(labels), *shape), np.uint8)
        arrays[f"{split}_labels"] = labels
        if name == "cifar100":
            arrays[f"{split}_coarse_labels"] = labels % 20
    save(root / f"{name}.npz", arrays)
