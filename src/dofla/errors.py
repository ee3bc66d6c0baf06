"""The one exception that stands for "the input is wrong", as opposed to "dofla is wrong"."""


class DoflaError(ValueError):
    """Bad input. The message is one line naming the thing, the value and the way out; the CLI prints it and exits 2."""
