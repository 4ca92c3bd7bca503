"""Bringing a cluster up: command line, local supervisor, model files, launchers."""
