"""Measurements: engine, handoff and serving, each against its floor or a peer."""
