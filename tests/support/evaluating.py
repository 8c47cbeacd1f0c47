"""Checks that evaluate what they are given, as some of reasoning-gym's do."""

import os


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
    return lambda text: {"value": 1.0, "text": "x" * int(text or 0)}


def make_counting_check():
    """How many answers this process has judged; it may hang, die, raise or forge instead."""
    judged: list = []

    def check(text: str) -> dict:
        judged.append(bytearray(600 << 20) if text == "grow" else text)
        while text == "hang":
            pass
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise RuntimeError
        return {"value": float(len(judged))}

    return check
