"""The three ways a run does not end well."""


class InputError(ValueError):
    """Something the user gave cannot be used; nothing has been written."""


class RunError(RuntimeError):
    """A run failed: it diverged, could not write, or found a damaged checkpoint."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: what was finished is saved, and the same command goes on from there."""
