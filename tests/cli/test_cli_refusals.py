"""Bad input: one sentence that names the fix, exit code 2, and nothing on the disk."""

from pathlib import Path

import pytest
from cli_calls import Trgp

REFUSED = {
    "": "trgp needs a command; see `trgp --help`.",
    "rum": "There is no command 'rum'; did you mean 'run'?",
    "run": "Which benchmark? Name it first",
    "run --epochs 1 permuted-digits": "Which benchmark? Name it first",
    "run pmnits": "There is no benchmark 'pmnits'; did you mean 'pmnist'?",
    "run permuted-digits --method gmp": "There is no method 'gmp'; did you mean 'gpm'?",
    "run permuted-digits --preset papr": "has no preset 'papr'; did you mean 'paper'?",
    "run permuted-digits --epoch 1": "has no option --epoch; did you mean --epochs?",
    "run permuted-digits --xyzzy": "see `trgp run permuted-digits --method trgp --help`.",
    "run permuted-digits --method gpm --epsilon 0.3": "gpm on permuted-digits has no option "
    "--epsilon; trgp has it.",
    "run permuted-digits --no-scrambled": "--no-scrambled; cifar100-superclass has it.",
    "run permuted-digits --fixed_split": "cifar100-superclass and five-datasets have it.",
    "run permuted-digits -q": "has no option -q; options begin with two hyphens.",
    "run permuted-digits twice": "'twice' is one argument too many",
    "run permuted-digits --fresh=yes": "--fresh takes no value; leave 'yes' out.",
    "run permuted-digits --no-evaluate-unseen=1": "takes no value",
    "run permuted-digits --no-quiet": "has no option --no-quiet",
    "run permuted-digits --lr": "--lr needs a value",
    "run permuted-digits --lr fast": "--lr takes a number, not 'fast'.",
    "run permuted-digits --epochs 1.5": "--epochs takes a whole number, not '1.5'.",
    "run permuted-digits --tasks two": "--tasks takes a whole number, not 'two'.",
    "run permuted-digits --threshold 0.9 x": "--threshold takes numbers, not '0.9 x'.",
    "run permuted-digits --norm warm": "--norm takes one of freeze, per_task, shared, not 'warm'.",
    "run permuted-digits --lr=-1": "lr must be a finite number above 0, not -1.0.",
    "run permuted-digits --lr nan": "lr must be a finite number above 0, not nan.",
    "run permuted-digits --threshold 0.9,0.8": "threshold has 2 values for 3 layers",
    "run permuted-digits --tasks 11": "permuted-digits has 10 tasks",
    "run permuted-digits --seed 1 --seeds 2": "--seed and --seeds exclude each other",
    "run permuted-digits --seed -1": "from 0 to 2**32 - 1, not -1.",
    "run permuted-digits --seed 4294967296": "from 0 to 2**32 - 1, not 4294967296.",
    "run permuted-digits --seeds 1,2,1": "A seed is given twice",
    "run permuted-digits --seeds few": "--seeds takes a number of seeds, as in 5, or a list",
    "run permuted-digits --seeds 0": "There is no seed to run",
    "run permuted-digits --seeds 12345678": "is too many; give at most 10000, or --seed 12345678.",
    "run permuted-digits --device gpu": "There is no device 'gpu'",
    "run permuted-digits --log-json no/folder": "is not a file in an existing folder",
    "run permuted-digits --log-json .": "is not a file in an existing folder",
    "run permuted-digits --method nowhere:Thing": "cannot be imported",
    "run permuted-digits --model nowhere:Thing": "cannot be imported",
    "run pmnist": "get it with `trgp data prepare mnist`.",
    "run mine.npz --tasks 2": "There is no file mine.npz",
    "list": "trgp list needs WHAT",
    "list method": "There is no list of method; did you mean 'methods'?",
    "list methods --all": "trgp list has no option --all",
    "table": "There is no folder runs",
    "table .": "There is no finished run in .",
    "table runs other": "'other' is one argument too many",
    "show": "trgp show needs RUN",
    "show nothing": "There is no finished run in nothing",
    "compare nothing": "trgp compare needs B",
    "compare nothing else": "There is no finished run in nothing",
    "data": "trgp data needs a command: list or prepare.",
    "data prepar": "did you mean 'prepare'?",
    "data prepare": "trgp data prepare needs NAME",
    "data prepare minst": "There is no image set 'minst'; did you mean 'mnist'?",
    "data prepare five-datasets": "it needs cifar10 mnist svhn fashion_mnist notmnist.",
    "data prepare miniimagenet": "miniImageNet cannot be downloaded automatically",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_sentence_and_nothing_written(trgp: Trgp, here: Path, command: str) -> None:
    code, out, err = trgp(*command.split())
    assert code == 2
    assert out == ""
    assert err.startswith("trgp: ")
    assert err.count("\n") == 1
    assert REFUSED[command] in err
    assert not list(here.iterdir())


def test_both_spellings_of_a_field_are_accepted(trgp: Trgp) -> None:
    for spelt in ("--test_batch=0", "--test-batch=0", "--test-batch 0"):
        code, _, err = trgp("run", "permuted-digits", *spelt.split())
        assert code == 2
        assert "test_batch must be a whole number of at least 1" in err


def test_the_last_of_an_option_given_twice_counts(trgp: Trgp) -> None:
    _, _, err = trgp("run", "permuted-digits", "--method", "gpm", "--method=none", "--lr", "1")
    assert "There is no method 'none'" in err
