"""Listening to one object's methods for a while, leaving the object as it was.

A trainer's callbacks get neither its loss nor its gradients before clipping, so the methods that have them
are listened to on the instance. Several listeners may come and go in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Listener:
    """What to call around a method.

    Args:
        before: gets the arguments, as a tuple and a dict.
        after: gets the result.
        failed: gets what the method raised; it is raised on afterwards.
    """

    before: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
    after: Callable[[Any], None] | None = None
    failed: Callable[[BaseException], None] | None = None


def listen(owner: Any, name: str, listener: Listener) -> Callable[[], None]:
    """Put a listener on ``owner.name``; what is returned takes it off again."""
    hook = vars(owner).get(name)
    if not isinstance(hook, _Hook):
        hook = _Hook(owner, name)
    hook.listeners.append(listener)
    return functools.partial(hook.remove, listener)


class _Hook:
    """Stands on an instance in place of its method for as long as anyone listens."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._was_on_instance = name in vars(owner)
        self.listeners: list[Listener] = []
        functools.update_wrapper(self, self._original, updated=())
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listeners = tuple(self.listeners)
        for listener in listeners:
            if listener.before is not None:
                listener.before(args, kwargs)
        try:
            result = self._original(*args, **kwargs)
        except BaseException as error:
            for listener in listeners:
                if listener.failed is not None:
                    listener.failed(error)
            raise
        for listener in listeners:
            if listener.after is not None:
                listener.after(result)
        return result

    def remove(self, listener: Listener) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)
        # Where someone else has wrapped this in the meantime, it stays and only passes calls on.
        if self.listeners or vars(self._owner).get(self._name) is not self:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)
