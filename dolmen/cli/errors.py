"""What every verb may raise."""


class BadInput(Exception):
    """Something the user gave cannot be done. The message says what and which option mends it; exit code 2."""
