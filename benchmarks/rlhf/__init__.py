"""The whole road of tuning on two cores, measured: see __main__.py."""
