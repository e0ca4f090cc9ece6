"""miniImageNet in twenty tasks of five classes, a head each."""

from ..data import NORMALISATION, to_tensors
from ..models import ResNet18
from .common import Benchmark, Published, Request, class_tasks, shuffled

TASKS = 20
PAPER = {
    "multitask": Published(69.46, 0.62),
    "ewc": Published(52.01, 2.53, -12),
    "hat": Published(59.78, 0.57, -3),
    "a-gem": Published(57.24, 0.72, -12),
    "er-res": Published(58.94, 0.85, -7),
    "gpm": Published(60.41, 0.61, -0.7),
    "trgp": Published(61.78, 0.60, -0.5),
}


def make(request: Request) -> Benchmark:
    """2450 train, 50 validation and 500 test images a task.

    The seed changes which classes make up which task (37 gives the published tasks) and which
    2 % of the train images are held out. It does not change the train and test images.
    """
    images = request.read("miniimagenet", 100, (84, 84, 3))
    norm, device = NORMALISATION["miniimagenet"], request.device
    train = to_tensors(images.train_images, images.train_labels, device, norm)
    test = to_tensors(images.test_images, images.test_labels, device, norm)
    groups = shuffled(100, request.seed).view(20, 5).tolist()[: request.count]
    tasks = class_tasks(train, test, groups, 2, request.seed)
    return Benchmark(
        request.name,
        tasks,
        lambda: ResNet18(request.count, 5, image_size=84, stride=2),
        True,
    )
