"""CIFAR-100 in ten tasks of ten classes, a head each."""

from ..data import NORMALISATION, to_tensors
from ..models import AlexNet
from .common import Benchmark, Published, Request, class_tasks

TASKS = 10
PAPER = {
    "multitask": Published(79.58, 0.54),
    "owm": Published(50.94, 0.60, -30),
    "ewc": Published(68.80, 0.88, -2),
    "hat": Published(72.06, 0.50, 0),
    "a-gem": Published(63.98, 1.22, -15),
    "er-res": Published(71.73, 0.63, -6),
    "gpm": Published(72.48, 0.40, -0.9),
    "trgp": Published(74.46, 0.32, -0.9),
}


def make(request: Request) -> Benchmark:
    """4750 train, 250 validation and 1000 test images a task.

    The seed changes which 5 % are held out. It does not change the classes: task t has 10 t to
    10 t + 9.
    """
    images = request.read("cifar100", 100, (32, 32, 3))
    norm, device = NORMALISATION["cifar100"], request.device
    train = to_tensors(images.train_images, images.train_labels, device, norm)
    test = to_tensors(images.test_images, images.test_labels, device, norm)
    groups = [range(10 * t, 10 * t + 10) for t in range(request.count)]
    tasks = class_tasks(train, test, groups, 5, request.seed)
    return Benchmark(request.name, tasks, lambda: AlexNet(request.count, 10), True)
