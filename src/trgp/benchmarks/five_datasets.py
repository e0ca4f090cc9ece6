"""CIFAR-10, MNIST, SVHN, Fashion-MNIST and notMNIST, 32 x 32 in three channels, a head each."""

from ..data import NORMALISATION, Tensors, as_rgb32, to_tensors
from ..models import ResNet18
from .common import Benchmark, Published, Request, Task, hold_out

TASKS = 5
PAPER = {
    "multitask": Published(91.54, 0.28),
    "ewc": Published(88.64, 0.26, -4),
    "hat": Published(91.32, 0.18, -1),
    "a-gem": Published(84.04, 0.33, -12),
    "er-res": Published(88.31, 0.22, -4),
    "gpm": Published(91.22, 0.20, -1),
    "trgp": Published(93.56, 0.10, -0.04),
}
SETS = {  # each with the constants that normalise it
    "cifar10": "cifar10",
    "mnist": "mnist_padded",
    "svhn": "svhn",
    "fashion_mnist": "fashion_mnist",
    "notmnist": "notmnist",
}
GREY, COLOUR = [(28, 28, 1), (32, 32, 1)], [(32, 32, 3)]


def make(
    request: Request, *, mnist_for_fashion: bool = False, fixed_split: bool = False
) -> Benchmark:
    """Each set's own train and test images, 5 % of the former held out for validation.

    That is 47 500/2500/10 000, 57 000/3000/10 000, 69 595/3662/26 032, 57 000/3000/10 000 and
    for notMNIST, as `trgp.data` prepares it, 16 009/842/1873 (as published, with two unreadable
    images as black ones, 16 011/842/1873). The seed changes which images are held out. It does
    not change the order of the tasks, nor the train and test images.

    mnist_for_fashion: MNIST once more in place of Fashion-MNIST, with the latter's
        normalisation, because the published loader asks for Fashion-MNIST in a way that
        torchvision ignores.
    fixed_split: hold out the same images whatever the seed, because the published loader always
        shuffles with seed 1.
    """
    seed = 1 if fixed_split else request.seed
    tasks = []
    for name, norm in list(SETS.items())[: request.count]:
        source = "mnist" if name == "fashion_mnist" and mnist_for_fashion else name
        shapes = COLOUR if name in ("cifar10", "svhn") else GREY
        images = request.read(source, 10, *shapes)
        train = to_tensors(images.train_images, images.train_labels, request.device)
        test = to_tensors(images.test_images, images.test_labels, request.device)
        # Made three channels last of all: grey images are then seen three times, not copied.
        parts = [
            Tensors(as_rgb32(source, part.x), part.y, NORMALISATION[norm])
            for part in (*hold_out(train, 5, seed), test)
        ]
        tasks.append(Task(name if source == name else f"{source} for {name}", 10, *parts))
    return Benchmark(request.name, tuple(tasks), lambda: ResNet18(request.count, 10), True)
