"""A reward that differs between responses, so that there is something to learn."""


def score(response: str, answer: str, **_: object) -> float:
    return float(len(set(response)))
