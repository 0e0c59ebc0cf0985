"""The two kinds of error: what ends a command, and what costs one record."""


class UserError(Exception):
    """A fault of the input or the data. The command line prints it as one line and exits with 1."""


class Reject(Exception):
    """A record that is not kept; its text is the reason, and reports count by what stands before its first colon."""
