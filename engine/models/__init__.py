"""Decoder models as plain functions over weights and an operation table."""
