"""Loops too long for Python: compiled once by numba, then loaded from its cache.

The compiled loops take and return arrays, hold no lock and use integers, or floats without any libm function, so that
they decide the same on every machine and with any number of threads.
"""

from numba import njit


def compiled(function):
    """Compile a function when it is first called; without a cache where none can be written."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's directory nor the user's cache is writable
        return njit(nogil=True)(function)
