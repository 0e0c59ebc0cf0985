"""The one kind of error that a user sees: what is wrong, where, and what to do about it."""


class UserError(Exception):
    """A fault of the input or the data. The command line prints it as one line and exits with 1."""
