"""Places for the answers of one request."""

from contextlib import ExitStack

from gateway.access.api_key import ApiKey
from services.common.errors import Unavailable
from services.common.rpc.call import Admission


class Places:
    """Places for a request's answers beside its first, which has the request's own.

    Args:
        admission: the gateway's. Further answers of all requests leave half of its places free.
        key: its limit counts, too; None: there are no keys.
        each: places that are taken together.
    """

    def __init__(self, admission: Admission, key: ApiKey | None, each: int = 1) -> None:
        self._admission, self._key, self._each = admission, key, each

    def take(self) -> ExitStack | None:
        """A place; closing it gives it back. None: none is free."""
        with ExitStack() as places:
            for _ in range(self._each):
                if (place := self._one()) is None:
                    return None
                places.push(place)
            return places.pop_all()

    def _one(self) -> ExitStack | None:
        if self._admission.in_flight >= self._admission.max_running // 2:
            return None
        with ExitStack() as place:
            try:
                place.enter_context(self._admission.admit())
            except Unavailable:  # the gateway drains
                return None
            if self._key is not None:
                if (of_key := self._key.one_more()) is None:
                    return None
                place.push(of_key)
            return place.pop_all()
