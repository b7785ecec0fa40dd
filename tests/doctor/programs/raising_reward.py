"""A reward function that fails."""


def score(response: str, answer: str, **_: object) -> float:
    return float(answer["final"])  # type: ignore[index]
