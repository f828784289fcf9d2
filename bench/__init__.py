"""Everything that measures. README.md says what is where, and how each measurement is started."""

from pathlib import Path

#: The repository that this is a part of; results go below it.
REPOSITORY = Path(__file__).resolve().parent.parent
