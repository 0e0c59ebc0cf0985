"""Least squares with no negative coefficient, exact for a handful of them."""

from itertools import combinations

import numpy as np


def fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients [n], none below 0, whose terms [m, n] · coefficients err least, relatively and squared, from seconds [m].

    At the optimum some coefficients are 0 and the others solve plain least squares; of so few, every choice is tried.
    """
    relative = terms / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1
    scaled, target = relative / scale, np.ones(len(seconds))
    best, least = np.zeros(terms.shape[1]), float(len(seconds))
    for size in range(1, terms.shape[1] + 1):
        for chosen in map(list, combinations(range(terms.shape[1]), size)):
            solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            error = float(((scaled[:, chosen] @ solution - target) ** 2).sum())
            if error < least and (solution >= 0).all():
                best, least = np.zeros(terms.shape[1]), error
                best[chosen] = solution
    return best / scale
