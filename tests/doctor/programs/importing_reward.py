"""A reward function that needs a package which is not installed."""


def score(response: str, answer: str, **_: object) -> float:
    import sympy_plus  # type: ignore[import-not-found]

    return float(sympy_plus.equal(response, answer))
