"""Exit codes, and the one exception that becomes a sentence and an exit code."""

from __future__ import annotations

from typing import Final

OK: Final = 0
PROBLEM: Final = 1  # the command ran and found a problem, or what it ran failed
USAGE: Final = 2  # the command line or the configuration is wrong
NO_DATA: Final = 3  # no agent answers, or there is nothing to show
NOT_FOUND: Final = 127  # run: no such command
INTERRUPTED: Final = 130

EXIT_CODES_HELP: Final = """\
exit codes:
  0    done
  1    it ran, and found a problem or failed
  2    wrong usage or configuration
  3    no agent answers, or there is no data to show
  127  run: the command was not found
"""


class CliError(Exception):
    """A failure with a sentence for the user and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
