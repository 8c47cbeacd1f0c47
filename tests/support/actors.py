"""What stands for Ray's actors in tests: calls are recorded, answers are the test's."""

import asyncio
import concurrent.futures


class Answer:
    """What a call returns: awaited, or turned into a future. With `...` it comes by `give`."""

    def __init__(self, value=None):
        self.result = concurrent.futures.Future()
        if value is not ...:
            self.give(value)

    def give(self, value) -> None:
        """The value that was waited for; an exception is raised there."""
        if isinstance(value, Exception):
            self.result.set_exception(value)
        else:
            self.result.set_result(value)

    def future(self):
        return self.result

    def __await__(self):
        future = asyncio.wrap_future(self.result)
        # asyncio would log an error that comes too late to be received.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future.__await__()


class Actor:
    """`answers` are values by method, or functions of the call's arguments."""

    def __init__(self, **answers):
        self.answers = answers
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    def called(self, name: str) -> list[tuple]:
        """The arguments of each call of a method."""
        return [arguments for method, *arguments in self.calls if method == name]


class Method:
    """A method of an actor."""

    def __init__(self, actor: Actor, name: str, returns: int = 1):
        self.actor = actor
        self.name = name
        self.returns = returns

    def options(self, num_returns: int = 1, **_) -> "Method":
        """With several returns the answer is a tuple of as many values, or an exception."""
        return Method(self.actor, self.name, num_returns)

    def remote(self, *args):
        """Records the call."""
        self.actor.calls.append((self.name, *args))
        found = self.actor.answers.get(self.name)
        value = found(*args) if callable(found) else found
        if self.returns == 1:
            return as_answer(value)
        values = value if isinstance(value, tuple) else (value,) * self.returns
        return [as_answer(part) for part in values]


def as_answer(value) -> Answer:
    """The value as what a call returns."""
    return value if isinstance(value, Answer) else Answer(value)
