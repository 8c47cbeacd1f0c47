"""Checks that evaluate what they are given, as some of reasoning-gym's do."""


def make_check():
    def check(text: str) -> dict:
        try:
            return {"value": float(eval(text or "0"))}
        except Exception as error:
            return {"value": 0.0, "reason": type(error).__name__}

    return check


def make_broken_check():
    def check(text: str) -> dict:
        raise RuntimeError("no memory")

    return check


def make_long_check():
    def check(text: str) -> dict:
        return {"value": 1.0, "text": "x" * int(text or 0)}

    return check
