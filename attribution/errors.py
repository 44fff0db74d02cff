"""What this package raises.

::

    AttributionError (ValueError)
    +-- TableError          a packed table does not fit its column names
    +-- BandError           latency bands that are not increasing, or not between 0 and 100

Bad *values* inside a well-formed table never raise: they end as ``unattributed`` time.
"""

from __future__ import annotations


class AttributionError(ValueError):
    """Base of the errors of this package."""


class TableError(AttributionError):
    """A packed table and its column names do not fit each other."""


class BandError(AttributionError):
    """Latency bands that cannot be used."""
