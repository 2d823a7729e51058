"""One small run for all tests of training."""

from tinyrun import material, one_thread  # noqa: F401
