"""Trains an encoder by instance classification; `python -m trainer --help`."""
