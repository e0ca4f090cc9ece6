"""Errors that end a run: unusable input, a failure and an interrupt."""


class InputError(ValueError):
    """The user's input cannot be used; nothing has been written."""


class RunError(RuntimeError):
    """A run failed: it diverged, could not write, or found a damaged checkpoint."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C interrupted a run; finished epochs are saved, and the same command resumes it."""
