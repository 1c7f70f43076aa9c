"""What other gateways use of keys' limits, as far as this one has read it."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Row

from gateway.access.key_usage import KeyUsage, total

SILENT_S = 10.0  # a gateway that has not reported for so long is gone: nothing runs there
_LATE_S = 10.0  # that a transaction may take


class Others:
    """Of each row that has not changed only its version is read.

    Attributes:
        since: rows as of this time or later, in the database's Unix seconds, are to be read with their requests.
    """

    def __init__(self) -> None:
        self.since = 0.0
        self._rows: dict[tuple[str, str], tuple[int, bool, KeyUsage]] = {}

    def take(self, rows: Iterable[Row[Any]], at: float, local: float) -> dict[str, KeyUsage]:
        """Takes all rows of all others, and returns what all together use of each key where that is new.

        Args:
            at: the database's time now.
            local: this gateway's.
        """
        before, self._rows = self._rows, {}
        new, is_whole = set[str](), True
        for row in rows:
            place, is_there = (row.gateway, row.key_name), row.seen_at > at - SILENT_S
            known = before.pop(place, None)
            if known is not None and known[:2] == (row.version, is_there):
                self._rows[place] = known
                continue
            new.add(row.key_name)
            if row.admitted is not None:
                zero = math.ceil(local + row.as_of - at)
                admitted = {zero - age: requests for age, requests in json.loads(row.admitted)}
            elif known is not None and known[0] == row.version:
                admitted = known[2].admitted
            else:  # its transaction took longer: next time all are read
                admitted, is_whole = {}, False
            running, sessions = (row.running, row.sessions) if is_there else (0, 0)
            self._rows[place] = row.version, is_there, KeyUsage(running, sessions, admitted)
        new |= {key_name for _, key_name in before}
        self.since = at - _LATE_S
        if not is_whole:
            self.since, self._rows = 0.0, {place: (0, *each[1:]) for place, each in self._rows.items()}
        return self._together(new)

    def _together(self, names: set[str]) -> dict[str, KeyUsage]:
        of_key = defaultdict[str, list[KeyUsage]](list)
        for (_, key_name), (_, _, usage) in self._rows.items():
            if key_name in names:
                of_key[key_name].append(usage)
        return {name: total(of_key[name]) for name in names}
